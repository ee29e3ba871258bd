//! Kernels: CUDA C++ text compiled by NVRTC, loaded as modules, launched.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use warpool_driver::{
    Call, DeviceId, ErrorCode, FunctionId, KernelArg, KernelSource, Kernels, LaunchShape, ModuleId, Result, StreamId,
};

use crate::CudaDriver;
use crate::context::Context;
use crate::error::{Site, enter};
use crate::nvrtc::{Nvrtc, Target, Unavailable};
use crate::table::Handle;

/// Loaded code behind its id.
#[derive(Clone, Copy)]
pub(crate) struct Module {
    raw: Handle<sys::CUmod_st>,
    context: Context,
}

/// A kernel behind its id.
#[derive(Clone)]
pub(crate) struct Function {
    raw: Handle<sys::CUfunc_st>,
    module: ModuleId,
    name: Arc<str>,
    /// The sizes of its arguments; drivers before CUDA 12.4 do not tell.
    sizes: Option<Arc<[usize]>>,
}

impl Kernels for CudaDriver {
    fn module_load(&self, device: DeviceId, source: &KernelSource) -> Result<ModuleId> {
        let site = enter(Call::ModuleLoad)?;
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
        let site = enter(Call::ModuleUnload)?;
        let row = self.modules.remove(module.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let unloaded = self.make_current(site, row.context).and_then(|_current| {
            // SAFETY: `raw` came from cuModuleLoadData, and its row is out of the table: nobody else unloads it.
            site.check(unsafe { (self.api.module_unload)(row.raw.raw()) })
        });
        match &unloaded {
            Ok(()) => self.functions.retain(|function| function.module != module),
            Err(_) => self.modules.put_back(module.0, row),
        }
        unloaded
    }

    fn function_get(&self, module: ModuleId, name: &str) -> Result<FunctionId> {
        let site = enter(Call::FunctionGet)?;
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

    fn kernel_launch(
        &self,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
        stream: StreamId,
    ) -> Result<()> {
        let site = enter(Call::KernelLaunch)?;
        let function = self.functions.get(function.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let stream = self.stream(site, stream)?;
        if shape.threads() == 0 {
            return Err(site.explain(ErrorCode::InvalidValue, "the shape has no threads"));
        }
        let mut slots = args.iter().map(|&arg| self.slot(site, arg)).collect::<Result<Vec<_>>>()?;
        check_arguments(site, &function, &slots)?;
        let mut pointers: Vec<*mut c_void> = slots.iter_mut().map(|slot| (&raw mut slot.bits).cast()).collect();
        let _current = self.on_stream(site, &stream)?;
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        // SAFETY: function and stream are live. CUDA reads as many pointers as the kernel has arguments, and from each
        // as many bytes; where the driver tells these they were compared above, and where it does not the contract
        // leaves them to the caller.
        site.check(unsafe {
            (self.api.launch_kernel)(
                function.raw.raw(),
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shape.shared_bytes,
                stream.raw.raw(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
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
    const fn wide(bits: u64) -> Self {
        Self { bits, bytes: 8 }
    }

    /// The machine is little-endian, so the low half comes first.
    const fn narrow(bits: u32) -> Self {
        Self { bits: bits as u64, bytes: 4 }
    }
}

impl CudaDriver {
    fn slot(&self, site: Site, arg: KernelArg) -> Result<Slot> {
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

    /// The compiler, loaded if it is not yet.
    fn nvrtc(&self, site: Site) -> Result<&Nvrtc> {
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
    fn load_image(&self, site: Site, image: &[u8]) -> Result<Handle<sys::CUmod_st>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the image came from NVRTC, whole and ending with a 0; `raw` takes the handle.
        site.check(unsafe { (self.api.module_load_data)(&raw mut raw, image.as_ptr().cast()) })?;
        Ok(Handle::new(raw))
    }

    /// The sizes of a kernel's arguments, if the driver tells.
    fn argument_sizes(&self, site: Site, function: sys::CUfunction) -> Option<Arc<[usize]>> {
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

/// `InvalidValue` if the kernel takes other arguments, as far as their sizes tell.
fn check_arguments(site: Site, function: &Function, slots: &[Slot]) -> Result<()> {
    let Some(sizes) = &function.sizes else { return Ok(()) };
    let name = &function.name;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_checked_by_number_and_size() {
        let site = enter(Call::KernelLaunch).expect("no callback runs here");
        let function = |sizes: Option<&[usize]>| Function {
            raw: Handle::from_number(0),
            module: ModuleId(1),
            name: "add".into(),
            sizes: sizes.map(Into::into),
        };
        let check = |sizes, slots: &[Slot]| {
            check_arguments(site, &function(sizes), slots)
                .map_err(|error| error.detail.expect("it says why").into_string())
        };
        let slots = [Slot::wide(1), Slot::narrow(2)];
        assert_eq!(check(Some(&[8, 4]), &slots), Ok(()));
        assert_eq!(check(None, &slots), Ok(()), "an old driver does not tell");
        assert_eq!(check(Some(&[8]), &slots), Err("add takes 1 arguments, 2 are given".to_owned()));
        assert_eq!(check(Some(&[8, 8]), &slots), Err("argument 1 of add has 8 bytes, 4 are given".to_owned()));
    }
}
