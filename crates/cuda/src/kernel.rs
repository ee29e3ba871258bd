//! Kernels: CUDA C++ source compiled by NVRTC, loaded as modules, launched.
//!
//! A graph does not keep the modules of its kernels loaded, so this driver does: a module that is unloaded by its id
//! stays loaded until no graph or executable can use it any more.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use warpool_driver::{
    Call, DeviceId, ErrorCode, FunctionId, KernelArg, KernelSource, Kernels, LaunchShape, ModuleId, Result, StreamId,
};

use crate::CudaDriver;
use crate::error::CallSite;
use crate::graph_family::{GraphFamily, GraphUsers};
use crate::handle::{Context, CudaHandle};
use crate::libraries::{Nvrtc, Target, Unavailable};
use crate::object_table::Shared;
use crate::sync::lock;

/// A module in the object table.
pub(crate) struct Module {
    raw: CudaHandle<sys::CUmod_st>,
    context: Context,
    /// The graphs with its kernels. Shared with its functions.
    users: Arc<GraphUsers>,
}

/// A kernel in the object table.
pub(crate) struct Function {
    /// CUDA's handle.
    pub(crate) raw: CudaHandle<sys::CUfunc_st>,
    module: ModuleId,
    /// The graphs with kernels of its module.
    module_users: Arc<GraphUsers>,
    name: Box<str>,
    /// The sizes of its arguments; unknown to drivers before CUDA 12.4.
    sizes: Option<Box<[usize]>>,
}

impl Function {
    /// A graph or executable has it in a node.
    pub(crate) fn used_by_graph(&self, family: Option<&GraphFamily>) {
        if let Some(family) = family {
            self.module_users.add(family);
        }
    }
}

#[cfg(test)]
impl Function {
    /// A kernel for tests.
    pub(crate) fn fake(module: ModuleId, sizes: Option<&[usize]>, module_users: Arc<GraphUsers>) -> Self {
        Self { raw: CudaHandle::from_number(1), module, module_users, name: "k".into(), sizes: sizes.map(Into::into) }
    }
}

#[cfg(test)]
impl Module {
    /// CUDA's handle.
    pub(crate) fn raw(&self) -> *mut sys::CUmod_st {
        self.raw.raw()
    }

    /// A module for tests, and its users.
    pub(crate) fn fake(raw: *mut sys::CUmod_st, context: Context) -> (Self, Arc<GraphUsers>) {
        let users = Arc::<GraphUsers>::default();
        (Self { raw: CudaHandle::new(raw), context, users: Arc::clone(&users) }, users)
    }
}

/// How many arguments a launch takes without allocating memory for them.
const FEW: usize = 16;

impl Kernels for CudaDriver {
    fn module_load(&self, device: DeviceId, source: &KernelSource) -> Result<ModuleId> {
        let site = self.enter(Call::ModuleLoad)?;
        let gpu = self.device(site, device)?;
        let capability = self.compute_capability(site, gpu)?;
        let nvrtc = self.nvrtc(site)?;
        let compile = |target| {
            let image = nvrtc.compile(source.name, source.cuda, capability, target);
            image.map_err(|error| site.explain(ErrorCode::InvalidSource, error.0))
        };
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let raw = match self.load_image(site, &compile(Target::Ptx)?) {
            // The compiler is newer than the driver, and so is its PTX; a binary for this device still works.
            Err(error) if error.code == ErrorCode::UnsupportedPtxVersion => {
                self.load_image(site, &compile(Target::Cubin)?)?
            }
            other => other?,
        };
        Ok(ModuleId(self.modules.insert(Module { raw, context, users: Arc::default() })))
    }

    fn module_unload(&self, module: ModuleId) -> Result<()> {
        let site = self.enter(Call::ModuleUnload)?;
        self.unload_pending(site);
        let object = self.modules.exclusive(module.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        // No call uses its functions meanwhile, and none is added: that would need the module.
        let functions = self.functions.ids(|function| function.module == module);
        let functions: Vec<_> = functions.into_iter().filter_map(|id| self.functions.exclusive(id)).collect();
        let is_used = object.users.exist();
        if !is_used {
            self.unload(site, &object)?;
        }
        functions.into_iter().for_each(|function| _ = function.remove());
        let object = object.remove();
        if is_used {
            lock(&self.modules_pending_unload).push(object);
        }
        Ok(())
    }

    fn function_get(&self, module: ModuleId, name: &str) -> Result<FunctionId> {
        let site = self.enter(Call::FunctionGet)?;
        let object = self.modules.get(module.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let _current = self.make_current(site, object.context)?;
        let no_name = || site.explain(ErrorCode::NotFound, "no kernel can have this name");
        let symbol = CString::new(name).ok().filter(|symbol| !symbol.is_empty()).ok_or_else(no_name)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is live; the name ends with a 0; CUDA writes the handle to `raw`.
        let code = unsafe { (self.api.module_get_function)(&raw mut raw, object.raw.raw(), symbol.as_ptr()) };
        site.check(code).map_err(|error| match error.code {
            ErrorCode::NotFound => error.with_detail(format!("the module has no kernel {name:?}")),
            _ => error,
        })?;
        let function = Function {
            raw: CudaHandle::new(raw),
            module,
            module_users: Arc::clone(&object.users),
            name: name.into(),
            sizes: self.argument_sizes(site, raw),
        };
        let same = |known: &Function| known.module == module && *known.name == *name;
        Ok(FunctionId(self.functions.find_or_insert(same, function)))
    }

    fn function_parameters(&self, function: FunctionId) -> Result<Option<Vec<u64>>> {
        let site = self.enter(Call::FunctionParameters)?;
        let function = self.function(site, function)?;
        Ok(function.sizes.as_ref().map(|sizes| sizes.iter().map(|&bytes| bytes as u64).collect()))
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
        let work = self.begin_work(site, &stream, stream.lock_work());
        if let Some(graph) = work.captured_into() {
            function.used_by_graph(self.family_of_capture(graph).as_ref());
        }
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        let (kernel, queue) = (function.raw.raw(), stream.raw.raw());
        self.with_arguments(site, &function, args, |arguments, extra| {
            // SAFETY: function and stream are live. The arguments are the function's, and the caller promises what it
            // does with them.
            unsafe {
                (self.api.launch_kernel)(kernel, gx, gy, gz, bx, by, bz, shape.shared_bytes, queue, arguments, extra)
            }
        })
    }
}

/// An argument as CUDA reads it: its first `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Argument {
    bits: u64,
    bytes: usize,
}

impl Argument {
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
    /// Looks up a kernel by id, which stays live as long as the result.
    pub(crate) fn function(&self, site: CallSite<'_>, function: FunctionId) -> Result<Shared<'_, Function>> {
        self.functions.get(function.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    fn argument(&self, site: CallSite<'_>, arg: KernelArg) -> Result<Argument> {
        Ok(match arg {
            KernelArg::Ptr(ptr) => Argument::wide(ptr.0),
            KernelArg::U32(value) => Argument::narrow(value),
            KernelArg::I32(value) => Argument::narrow(value.cast_unsigned()),
            KernelArg::U64(value) => Argument::wide(value),
            KernelArg::I64(value) => Argument::wide(value.cast_unsigned()),
            KernelArg::F32(value) => Argument::narrow(value.to_bits()),
            KernelArg::F64(value) => Argument::wide(value.to_bits()),
            KernelArg::Conditional(id) => Argument::wide(self.conditional(site, id)?.handle),
        })
    }

    /// Passes a kernel's arguments to `call` in the form that CUDA takes, and converts the number that it returns. One
    /// of the two pointers is null; the other points to what CUDA reads for this kernel, until `call` returns.
    /// `InvalidValue` if the kernel takes other arguments, as far as their sizes are known.
    pub(crate) fn with_arguments(
        &self,
        site: CallSite<'_>,
        function: &Function,
        args: &[KernelArg],
        call: impl FnOnce(*mut *mut c_void, *mut *mut c_void) -> u32,
    ) -> Result<()> {
        let (mut few, mut many) = ([Argument::EMPTY; FEW], Vec::new());
        let arguments = if args.len() <= FEW {
            &mut few[..args.len()]
        } else {
            many.resize(args.len(), Argument::EMPTY);
            &mut many[..]
        };
        for (argument, &arg) in arguments.iter_mut().zip(args) {
            *argument = self.argument(site, arg)?;
        }
        let code = match &function.sizes {
            Some(sizes) => {
                // CUDA reads one pointer per argument of the kernel, and the size of the argument from each.
                check_arguments(site, &function.name, sizes, arguments)?;
                with_pointers(arguments, |pointers| call(pointers, ptr::null_mut()))
            }
            None => with_packed(arguments, |extra| call(ptr::null_mut(), extra)),
        };
        site.check(code)
    }

    /// Unloads a module that no graph uses. Waits for its kernels, including queued ones, and also while streams
    /// capture (seen on an H200).
    fn unload(&self, site: CallSite<'_>, module: &Module) -> Result<()> {
        let _current = self.make_current(site, module.context)?;
        // Captures forbid it, but it disturbs none: their modules are in use.
        let _relaxed = self.relax_capture_mode(site)?;
        // SAFETY: `raw` came from cuModuleLoadData, and no other call can use it or its functions, nor does a graph.
        site.check(unsafe { (self.api.module_unload)(module.raw.raw()) })
    }

    /// Unloads the modules that were unloaded by id and that no graph uses any more.
    fn unload_pending(&self, site: CallSite<'_>) {
        let unused: Vec<_> =
            lock(&self.modules_pending_unload).extract_if(.., |module| !module.users.exist()).collect();
        for module in unused {
            if let Err(error) = self.unload(site, &module) {
                tracing::warn!("a module could not be unloaded: {error}");
            }
        }
    }

    /// The compiler, loaded at its first use.
    fn nvrtc(&self, site: CallSite<'_>) -> Result<&Nvrtc> {
        if let Some(loaded) = self.nvrtc.get() {
            return Ok(loaded);
        }
        // A failure is not remembered: the library may be installed later.
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
    fn load_image(&self, site: CallSite<'_>, image: &[u8]) -> Result<CudaHandle<sys::CUmod_st>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the image came from NVRTC, complete and with a terminating 0; CUDA writes the handle to `raw`.
        site.check(unsafe { (self.api.module_load_data)(&raw mut raw, image.as_ptr().cast()) })?;
        Ok(CudaHandle::new(raw))
    }

    /// The sizes of a kernel's arguments, if the driver reports them.
    fn argument_sizes(&self, site: CallSite<'_>, function: sys::CUfunction) -> Option<Box<[usize]>> {
        let info = self.api.func_get_param_info?;
        // The query may load the kernel, which captures forbid.
        let _relaxed = self.relax_capture_mode(site).ok()?;
        let mut sizes = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function is live; CUDA writes one number each to `offset` and `bytes`.
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
pub(crate) fn check_shape(site: CallSite<'_>, shape: LaunchShape) -> Result<()> {
    if shape.grid.contains(&0) || shape.block.contains(&0) {
        return Err(site.explain(ErrorCode::InvalidValue, "the shape has no threads"));
    }
    Ok(())
}

/// The arguments as an array of pointers to them.
fn with_pointers(arguments: &mut [Argument], call: impl FnOnce(*mut *mut c_void) -> u32) -> u32 {
    let (mut few, mut many) = ([ptr::null_mut::<c_void>(); FEW], Vec::new());
    let pointers = if arguments.len() <= FEW {
        &mut few[..]
    } else {
        many.resize(arguments.len(), ptr::null_mut());
        &mut many[..]
    };
    for (pointer, argument) in pointers.iter_mut().zip(arguments) {
        *pointer = (&raw mut argument.bits).cast();
    }
    call(pointers.as_mut_ptr())
}

/// The arguments of a kernel whose arguments' sizes are unknown, in one buffer. CUDA gets its length, so it reads
/// nothing beyond them even if they are wrong.
fn with_packed(arguments: &[Argument], call: impl FnOnce(*mut *mut c_void) -> u32) -> u32 {
    // `CU_LAUNCH_PARAM_END`, `…_BUFFER_POINTER` and `…_BUFFER_SIZE`: tags, not addresses.
    let [end, buffer_pointer, buffer_size] = [0, 1, 2].map(ptr::without_provenance_mut::<c_void>);
    let mut buffer = pack(arguments);
    let mut bytes = buffer.len();
    let mut extra = [buffer_pointer, buffer.as_mut_ptr().cast(), buffer_size, (&raw mut bytes).cast::<c_void>(), end];
    call(extra.as_mut_ptr())
}

/// `InvalidValue` if the kernel takes arguments of other sizes.
fn check_arguments(site: CallSite<'_>, name: &str, sizes: &[usize], arguments: &[Argument]) -> Result<()> {
    if sizes.len() != arguments.len() {
        let detail = format!("{name} takes {} arguments, {} are given", sizes.len(), arguments.len());
        return Err(site.explain(ErrorCode::InvalidValue, detail));
    }
    for (index, (&expected, argument)) in sizes.iter().zip(arguments).enumerate() {
        if expected != argument.bytes {
            let detail = format!("argument {index} of {name} has {expected} bytes, {} are given", argument.bytes);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
    }
    Ok(())
}

/// The arguments in one buffer, each at a multiple of its size: the layout of the kernel's parameters.
fn pack(arguments: &[Argument]) -> Vec<u8> {
    let mut buffer = Vec::with_capacity(arguments.len() * 8);
    for argument in arguments {
        buffer.resize(buffer.len().next_multiple_of(argument.bytes), 0);
        buffer.extend_from_slice(&argument.bits.to_le_bytes()[..argument.bytes]);
    }
    buffer
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use warpool_driver::{CaptureMode, Captures, Graphs, StreamOptions, Streams};

    use super::*;
    use crate::api::Api;
    use crate::fake_cuda;

    #[test]
    fn arguments_are_checked_by_number_and_size() {
        let driver = fake_cuda::driver();
        let site = driver.enter(Call::KernelLaunch).expect("not in a callback");
        let check = |sizes: &[usize], arguments: &[Argument]| {
            check_arguments(site, "add", sizes, arguments)
                .map_err(|error| error.detail.expect("a detail").into_string())
        };
        let arguments = [Argument::wide(1), Argument::narrow(2)];
        assert_eq!(check(&[8, 4], &arguments), Ok(()));
        assert_eq!(check(&[8], &arguments), Err("add takes 1 arguments, 2 are given".to_owned()));
        assert_eq!(check(&[8, 8], &arguments), Err("argument 1 of add has 8 bytes, 4 are given".to_owned()));
    }

    thread_local! {
        /// The arguments of this thread's last launch, as bytes.
        static ARGUMENTS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    /// Launches a kernel whose arguments, unless they are packed, are numbers of 8 bytes, one per block of the grid.
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
        // SAFETY: as many arguments as blocks, or the five entries that describe a buffer.
        let pointers = unsafe { std::slice::from_raw_parts(from, count) };
        let read = |pointer: *mut c_void, bytes| {
            // SAFETY: every pointer points to that many bytes.
            unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), bytes) }.to_vec()
        };
        ARGUMENTS.set(if bytes == 8 {
            pointers.iter().flat_map(|&pointer| read(pointer, bytes)).collect()
        } else {
            let size = read(pointers[3], 8).try_into().map(usize::from_le_bytes);
            read(pointers[1], size.expect("8 bytes"))
        });
        0
    }

    #[test]
    fn few_and_many_arguments_are_passed_completely() -> Result<()> {
        let driver = fake_cuda::driver_with(Api { launch_kernel: launch, ..fake_cuda::api() });
        let stream = driver.stream_create(fake_cuda::DEVICE, StreamOptions::default())?;
        for count in [1, 2, FEW, FEW + 1, 40] {
            let args: Vec<_> = (0..count as u64).map(|n| KernelArg::U64(n * 0x0101_0101_0101)).collect();
            let expected: Vec<u8> = (0..count as u64).flat_map(|n| (n * 0x0101_0101_0101).to_le_bytes()).collect();
            let shape = LaunchShape { grid: [count as u32, 1, 1], ..LaunchShape::ONE };
            for sizes in [Some(&vec![8; count][..]), None] {
                let function = Function::fake(ModuleId(1), sizes, Arc::default());
                let function = driver.functions.insert(function);
                fake_cuda::launch(&driver, FunctionId(function), shape, &args, stream)?;
                assert_eq!(ARGUMENTS.take(), expected, "{count} arguments");
                let fewer = fake_cuda::launch(&driver, FunctionId(function), shape, &args[1..], stream);
                let known = driver.functions.get(function).is_some_and(|function| function.sizes.is_some());
                assert_eq!(fewer.is_err(), known);
            }
        }
        Ok(())
    }

    #[test]
    fn an_empty_shape_is_refused_and_a_large_one_is_left_to_cuda() -> Result<()> {
        let driver = fake_cuda::driver();
        let stream = driver.stream_create(fake_cuda::DEVICE, StreamOptions::default())?;
        let function = fake_cuda::kernel(&driver, &[]);
        let code = |grid, block| {
            let shape = LaunchShape { grid, block, shared_bytes: 0 };
            fake_cuda::launch(&driver, function, shape, &[], stream).err().map(|error| error.code)
        };
        assert_eq!(code([1, 0, 1], [1; 3]), Some(ErrorCode::InvalidValue));
        assert_eq!(code([1; 3], [1, 1, 0]), Some(ErrorCode::InvalidValue));
        assert_eq!(code([u32::MAX; 3], [u32::MAX; 3]), None);
        Ok(())
    }

    #[test]
    fn packed_arguments_are_at_multiples_of_their_sizes() {
        assert_eq!(pack(&[]), []);
        let packed =
            pack(&[Argument::narrow(0x0403_0201), Argument::wide(0x55), Argument::narrow(7), Argument::narrow(8)]);
        assert_eq!(packed, [1, 2, 3, 4, 0, 0, 0, 0, 0x55, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0]);
    }

    #[test]
    fn a_module_stays_loaded_while_graphs_use_it() -> Result<()> {
        let driver = fake_cuda::driver();
        let (module, function) = fake_cuda::module_with_kernel(&driver);
        let (unused, _) = fake_cuda::module_with_kernel(&driver);
        let stream = driver.stream_create(fake_cuda::DEVICE, StreamOptions::default())?;
        driver.capture_begin(stream, CaptureMode::Global)?;
        fake_cuda::launch(&driver, function, LaunchShape::ONE, &[], stream)?;

        // Captures allow it, and the module that no graph uses is unloaded at once.
        let [used, other] = [module, unused].map(|module| fake_cuda::is_loaded(&driver, module));
        driver.module_unload(unused)?;
        driver.module_unload(module)?;
        assert_eq!(driver.module_unload(module).err().map(|error| error.code), Some(ErrorCode::InvalidHandle));
        assert_eq!((used(), other()), (true, false));
        let graph = driver.capture_end(stream)?;
        let exec = driver.graph_instantiate(graph, Default::default())?;
        fake_cuda::launch_graph(&driver, exec, stream)?;
        driver.graph_destroy(graph)?;
        let next = || driver.module_unload(fake_cuda::module_with_kernel(&driver).0);
        next()?;
        assert!(used(), "the executable exists");
        driver.graph_exec_destroy(exec)?;
        next()?;
        assert!(!used());
        Ok(())
    }
}
