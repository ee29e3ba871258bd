//! Kernels: CUDA C++ text compiled by NVRTC, loaded as modules, launched.

use std::ffi::{CString, c_void};
use std::ptr;

use cudarc::driver::sys;
use warpool_driver::{
    Call, DeviceId, ErrorCode, FunctionId, KernelArg, KernelSource, Kernels, LaunchShape, ModuleId, Result, StreamId,
};

use crate::CudaDriver;
use crate::context::Context;
use crate::error::Site;
use crate::nvrtc::{Nvrtc, Target, Unavailable};
use crate::table::{Handle, Used};

/// Loaded code behind its id.
pub(crate) struct Module {
    raw: Handle<sys::CUmod_st>,
    context: Context,
}

/// A kernel behind its id.
pub(crate) struct Function {
    /// CUDA's handle.
    pub(crate) raw: Handle<sys::CUfunc_st>,
    module: ModuleId,
    name: Box<str>,
    /// The sizes of its arguments; drivers before CUDA 12.4 do not tell.
    sizes: Option<Box<[usize]>>,
}

#[cfg(test)]
impl Function {
    /// A kernel for tests.
    pub(crate) fn pretend(sizes: Option<&[usize]>) -> Self {
        Self { raw: Handle::from_number(1), module: ModuleId(1), name: "k".into(), sizes: sizes.map(Into::into) }
    }
}

/// How many arguments a launch takes without allocating memory for them.
const FEW: usize = 16;

impl Kernels for CudaDriver {
    fn module_load(&self, device: DeviceId, source: &KernelSource) -> Result<ModuleId> {
        let site = self.enter(Call::ModuleLoad)?;
        let slot = self.device(site, device)?;
        let capability = self.compute_capability(site, slot)?;
        let nvrtc = self.nvrtc(site)?;
        let compile = |target| {
            let image = nvrtc.compile(source.name, source.cuda, capability, target);
            image.map_err(|error| site.explain(ErrorCode::InvalidSource, error.0))
        };
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let raw = match self.load_image(site, &compile(Target::Ptx)?) {
            // A compiler newer than the driver: its PTX is too, but not its binaries for this device.
            Err(error) if error.code == ErrorCode::UnsupportedPtxVersion => {
                self.load_image(site, &compile(Target::Cubin)?)?
            }
            other => other?,
        };
        Ok(ModuleId(self.modules.insert(Module { raw, context })))
    }

    fn module_unload(&self, module: ModuleId) -> Result<()> {
        let site = self.enter(Call::ModuleUnload)?;
        let row = self.modules.alone(module.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        // Nobody launches its kernels meanwhile, and none is added: that would need the module.
        let functions = self.functions.ids(|function| function.module == module);
        let functions: Vec<_> = functions.into_iter().filter_map(|id| self.functions.alone(id)).collect();
        let _current = self.make_current(site, row.context)?;
        // SAFETY: `raw` came from cuModuleLoadData, and nobody else can use it or its functions.
        site.check(unsafe { (self.api.module_unload)(row.raw.raw()) })?;
        functions.into_iter().for_each(|function| _ = function.remove());
        row.remove();
        Ok(())
    }

    fn function_get(&self, module: ModuleId, name: &str) -> Result<FunctionId> {
        let site = self.enter(Call::FunctionGet)?;
        let row = self.modules.get(module.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let _current = self.make_current(site, row.context)?;
        let nameless = || site.explain(ErrorCode::NotFound, "no kernel has such a name");
        let symbol = CString::new(name).ok().filter(|symbol| !symbol.is_empty()).ok_or_else(nameless)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is live; the name ends with a 0; `raw` takes the handle.
        let code = unsafe { (self.api.module_get_function)(&raw mut raw, row.raw.raw(), symbol.as_ptr()) };
        site.check(code).map_err(|error| match error.code {
            ErrorCode::NotFound => error.with_detail(format!("the module has no kernel {name:?}")),
            _ => error,
        })?;
        let function =
            Function { raw: Handle::new(raw), module, name: name.into(), sizes: self.argument_sizes(site, raw) };
        let same = |known: &Function| known.module == module && *known.name == *name;
        Ok(FunctionId(self.functions.find_or_insert(same, function)))
    }

    unsafe fn kernel_launch(
        &self,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
        stream: StreamId,
    ) -> Result<()> {
        let site = self.enter(Call::KernelLaunch)?;
        let function = self.function(site, function)?;
        let stream = self.stream(site, stream)?;
        check_shape(site, shape)?;
        let _current = self.on_stream(site, &stream)?;
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        let (raw, stream) = (function.raw.raw(), stream.raw.raw());
        self.with_arguments(site, &function, args, |arguments, extra| {
            // SAFETY: function and stream are live, their rows being in use. The arguments are the function's, and
            // the caller promises what it does with them.
            unsafe {
                (self.api.launch_kernel)(raw, gx, gy, gz, bx, by, bz, shape.shared_bytes, stream, arguments, extra)
            }
        })
    }
}

/// One argument as CUDA reads it: from the first byte on, as many as it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    bits: u64,
    bytes: usize,
}

impl Slot {
    const EMPTY: Self = Self { bits: 0, bytes: 0 };

    const fn wide(bits: u64) -> Self {
        Self { bits, bytes: 8 }
    }

    /// The machine is little-endian, so the low half comes first.
    const fn narrow(bits: u32) -> Self {
        Self { bits: bits as u64, bytes: 4 }
    }
}

impl CudaDriver {
    /// The kernel behind an id, live as long as the result.
    pub(crate) fn function(&self, site: Site<'_>, function: FunctionId) -> Result<Used<'_, Function>> {
        self.functions.get(function.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    fn slot(&self, site: Site<'_>, arg: KernelArg) -> Result<Slot> {
        Ok(match arg {
            KernelArg::Ptr(ptr) => Slot::wide(ptr.0),
            KernelArg::U32(value) => Slot::narrow(value),
            KernelArg::I32(value) => Slot::narrow(value.cast_unsigned()),
            KernelArg::U64(value) => Slot::wide(value),
            KernelArg::I64(value) => Slot::wide(value.cast_unsigned()),
            KernelArg::F32(value) => Slot::narrow(value.to_bits()),
            KernelArg::F64(value) => Slot::wide(value.to_bits()),
            KernelArg::Conditional(id) => Slot::wide(self.conditional(site, id)?.handle),
        })
    }

    /// Gives a kernel's arguments to `call` as CUDA takes them, and takes the number that it returns. One of the two
    /// that `call` gets is null; the other holds what CUDA reads there for this kernel, until `call` returns.
    /// `InvalidValue` if the kernel takes other arguments, as far as that can be seen.
    pub(crate) fn with_arguments(
        &self,
        site: Site<'_>,
        function: &Function,
        args: &[KernelArg],
        call: impl FnOnce(*mut *mut c_void, *mut *mut c_void) -> u32,
    ) -> Result<()> {
        let (mut few, mut many) = ([Slot::EMPTY; FEW], Vec::new());
        let slots = if args.len() <= FEW {
            &mut few[..args.len()]
        } else {
            many.resize(args.len(), Slot::EMPTY);
            &mut many[..]
        };
        for (slot, &arg) in slots.iter_mut().zip(args) {
            *slot = self.slot(site, arg)?;
        }
        let code = match &function.sizes {
            Some(sizes) => {
                // CUDA reads as many pointers as the kernel has arguments, and from each as many bytes.
                check_arguments(site, &function.name, sizes, slots)?;
                with_pointers(slots, |arguments| call(arguments, ptr::null_mut()))
            }
            None => with_packed(slots, |extra| call(ptr::null_mut(), extra)),
        };
        site.check(code)
    }

    /// The compiler, loaded if it is not yet.
    fn nvrtc(&self, site: Site<'_>) -> Result<&Nvrtc> {
        if let Some(loaded) = self.nvrtc.get() {
            return Ok(loaded);
        }
        // Not remembered when it fails: it may be installed, or found, later.
        match Nvrtc::load() {
            Ok(loaded) => Ok(self.nvrtc.get_or_init(|| loaded)),
            Err(Unavailable::Library(missing)) => {
                Err(site.explain(ErrorCode::SharedObjectInitFailed, missing.to_string()))
            }
            Err(Unavailable::Symbol(missing)) => {
                Err(site.explain(ErrorCode::SharedObjectSymbolNotFound, missing.to_string()))
            }
        }
    }

    /// Loads PTX or a binary. The context must be current.
    fn load_image(&self, site: Site<'_>, image: &[u8]) -> Result<Handle<sys::CUmod_st>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the image came from NVRTC, whole and ending with a 0; `raw` takes the handle.
        site.check(unsafe { (self.api.module_load_data)(&raw mut raw, image.as_ptr().cast()) })?;
        Ok(Handle::new(raw))
    }

    /// The sizes of a kernel's arguments, if the driver tells.
    fn argument_sizes(&self, site: Site<'_>, function: sys::CUfunction) -> Option<Box<[usize]>> {
        let info = self.api.func_get_param_info?;
        // Asking may load the kernel, which a capture must not be broken by.
        let _relaxed = self.relax(site).ok()?;
        let mut sizes = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function is live; `offset` and `bytes` take one number each.
            let code = unsafe { info(function, sizes.len(), &raw mut offset, &raw mut bytes) };
            match ErrorCode::from_number(code) {
                _ if code == 0 => sizes.push(bytes),
                // There is no argument of that number.
                ErrorCode::InvalidValue => return Some(sizes.into()),
                _ => return None,
            }
        }
    }
}

/// `InvalidValue` for a shape without threads.
pub(crate) fn check_shape(site: Site<'_>, shape: LaunchShape) -> Result<()> {
    if shape.grid.contains(&0) || shape.block.contains(&0) {
        return Err(site.explain(ErrorCode::InvalidValue, "the shape has no threads"));
    }
    Ok(())
}

/// The arguments as pointers to each.
fn with_pointers(slots: &mut [Slot], call: impl FnOnce(*mut *mut c_void) -> u32) -> u32 {
    let (mut few, mut many) = ([ptr::null_mut::<c_void>(); FEW], Vec::new());
    let pointers = if slots.len() <= FEW {
        &mut few[..]
    } else {
        many.resize(slots.len(), ptr::null_mut());
        &mut many[..]
    };
    for (pointer, slot) in pointers.iter_mut().zip(slots) {
        *pointer = (&raw mut slot.bits).cast();
    }
    call(pointers.as_mut_ptr())
}

/// The arguments of a kernel that nobody knows. CUDA takes them from a buffer whose length it is told, so whatever it
/// makes of wrong ones, it reads no others.
fn with_packed(slots: &[Slot], call: impl FnOnce(*mut *mut c_void) -> u32) -> u32 {
    // `CU_LAUNCH_PARAM_END`, `…_BUFFER_POINTER` and `…_BUFFER_SIZE`: names for CUDA, not addresses.
    let [end, buffer_pointer, buffer_size] = [0, 1, 2].map(ptr::without_provenance_mut::<c_void>);
    let mut buffer = pack(slots);
    let mut bytes = buffer.len();
    let mut extra = [buffer_pointer, buffer.as_mut_ptr().cast(), buffer_size, (&raw mut bytes).cast::<c_void>(), end];
    call(extra.as_mut_ptr())
}

/// `InvalidValue` if the kernel takes other arguments, as far as their sizes tell.
fn check_arguments(site: Site<'_>, name: &str, sizes: &[usize], slots: &[Slot]) -> Result<()> {
    if sizes.len() != slots.len() {
        let detail = format!("{name} takes {} arguments, {} are given", sizes.len(), slots.len());
        return Err(site.explain(ErrorCode::InvalidValue, detail));
    }
    for (index, (&wanted, slot)) in sizes.iter().zip(slots).enumerate() {
        if wanted != slot.bytes {
            let detail = format!("argument {index} of {name} has {wanted} bytes, {} are given", slot.bytes);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
    }
    Ok(())
}

/// The arguments one behind the other, each at a multiple of its size: as the kernel has them.
fn pack(slots: &[Slot]) -> Vec<u8> {
    let mut buffer = Vec::with_capacity(slots.len() * 8);
    for slot in slots {
        buffer.resize(buffer.len().next_multiple_of(slot.bytes), 0);
        buffer.extend_from_slice(&slot.bits.to_le_bytes()[..slot.bytes]);
    }
    buffer
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use warpool_driver::{StreamOptions, Streams};

    use super::*;
    use crate::api::Api;
    use crate::fake;

    #[test]
    fn arguments_are_checked_by_number_and_size() {
        let driver = fake::driver();
        let site = driver.enter(Call::KernelLaunch).expect("no callback runs here");
        let check = |sizes: &[usize], slots: &[Slot]| {
            check_arguments(site, "add", sizes, slots).map_err(|error| error.detail.expect("it says why").into_string())
        };
        let slots = [Slot::wide(1), Slot::narrow(2)];
        assert_eq!(check(&[8, 4], &slots), Ok(()));
        assert_eq!(check(&[8], &slots), Err("add takes 1 arguments, 2 are given".to_owned()));
        assert_eq!(check(&[8, 8], &slots), Err("argument 1 of add has 8 bytes, 4 are given".to_owned()));
    }

    thread_local! {
        /// What the last launch of this thread was given, byte by byte.
        static GIVEN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    /// A launch of a kernel whose arguments, if they do not come packed, are all numbers of 8 bytes: as many as the
    /// grid has blocks.
    unsafe extern "C" fn launch(
        _: sys::CUfunction,
        blocks: u32,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: sys::CUstream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> u32 {
        let (from, count, bytes) = if arguments.is_null() { (extra, 5, 0) } else { (arguments, blocks as usize, 8) };
        // SAFETY: there are as many arguments as blocks, or the five entries that name a buffer.
        let pointers = unsafe { std::slice::from_raw_parts(from, count) };
        let read = |pointer: *mut c_void, bytes| {
            // SAFETY: every pointer leads to as many bytes.
            unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), bytes) }.to_vec()
        };
        GIVEN.set(if bytes == 8 {
            pointers.iter().flat_map(|&pointer| read(pointer, bytes)).collect()
        } else {
            let size = read(pointers[3], 8).try_into().map(usize::from_le_bytes);
            read(pointers[1], size.expect("8 bytes"))
        });
        0
    }

    #[test]
    fn few_and_many_arguments_arrive_whole() -> Result<()> {
        let driver = fake::driver_with(Api { launch_kernel: launch, ..fake::api() });
        let stream = driver.stream_create(fake::DEVICE, StreamOptions::default())?;
        for count in [1, 2, FEW, FEW + 1, 40] {
            let args: Vec<_> = (0..count as u64).map(|n| KernelArg::U64(n * 0x0101_0101_0101)).collect();
            let wanted: Vec<u8> = (0..count as u64).flat_map(|n| (n * 0x0101_0101_0101).to_le_bytes()).collect();
            let shape = LaunchShape { grid: [count as u32, 1, 1], ..LaunchShape::ONE };
            for sizes in [Some(&vec![8; count][..]), None] {
                let function = driver.functions.insert(Function::pretend(sizes));
                fake::launch(&driver, FunctionId(function), shape, &args, stream)?;
                assert_eq!(GIVEN.take(), wanted, "{count} arguments");
                let fewer = fake::launch(&driver, FunctionId(function), shape, &args[1..], stream);
                let known = driver.functions.get(function).is_some_and(|function| function.sizes.is_some());
                assert_eq!(fewer.is_err(), known);
            }
        }
        Ok(())
    }

    #[test]
    fn an_empty_shape_is_refused_and_a_huge_one_left_to_cuda() -> Result<()> {
        let driver = fake::driver();
        let stream = driver.stream_create(fake::DEVICE, StreamOptions::default())?;
        let function = fake::kernel(&driver, &[]);
        let code = |grid, block| {
            let shape = LaunchShape { grid, block, shared_bytes: 0 };
            fake::launch(&driver, function, shape, &[], stream).err().map(|error| error.code)
        };
        assert_eq!(code([1, 0, 1], [1; 3]), Some(ErrorCode::InvalidValue));
        assert_eq!(code([1; 3], [1, 1, 0]), Some(ErrorCode::InvalidValue));
        assert_eq!(code([u32::MAX; 3], [u32::MAX; 3]), None);
        Ok(())
    }

    #[test]
    fn packed_arguments_lie_at_multiples_of_their_sizes() {
        assert_eq!(pack(&[]), []);
        let packed = pack(&[Slot::narrow(0x0403_0201), Slot::wide(0x55), Slot::narrow(7), Slot::narrow(8)]);
        assert_eq!(packed, [1, 2, 3, 4, 0, 0, 0, 0, 0x55, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0]);
    }
}
