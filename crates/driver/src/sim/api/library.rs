//! The simulated libraries: handles that keep their settings, and a cuBLAS that multiplies matrices.
//!
//! A product is work like a kernel: it is queued in the handle's stream, can be captured, takes time, and accesses its
//! matrices and its workspace when it runs. cuBLAS's own workspace, which a handle has until another is set, takes no
//! memory here.

use std::sync::Arc;

use super::range_check::{RangeUse, check_range};
use crate::sim::driver::SimDriver;
use crate::sim::objects::sgemm::{self, SGEMM};
use crate::sim::objects::{Handle, LibraryCall};
use crate::sim::order::Operation;
use crate::sim::refuse::refuse;
use crate::sim::state::SimState;
use crate::sim::work::{KernelWork, Work};
use crate::{
    BlasMath, Call, DeviceId, DevicePtr, ErrorCode, HandleId, Libraries, Library, RawHandle, Result, Sgemm, StreamId,
};

const WORKSPACE_ALIGNMENT: u64 = 256;

impl SimDriver {
    /// The calls made on a handle, oldest first, without those that failed. The last 1,024 of each handle are kept,
    /// also after it is destroyed; of destroyed handles, the last 256.
    #[must_use]
    pub fn library_calls(&self, handle: HandleId) -> Vec<LibraryCall> {
        self.lock().libraries.calls(handle)
    }
}

impl Libraries for SimDriver {
    fn library_create(&self, library: Library, device: DeviceId) -> Result<HandleId> {
        self.call(Call::LibraryCreate, |state| {
            state.use_device(device)?;
            if state.config.missing_libraries.contains(&library) {
                return refuse(ErrorCode::SharedObjectInitFailed, format!("{library} is not installed"));
            }
            let stream = state.scheduler.streams.legacy(device);
            Ok(state.libraries.create(library, device, stream))
        })
    }

    fn library_destroy(&self, handle: HandleId) -> Result<()> {
        self.call(Call::LibraryDestroy, |state| {
            let device = use_handle(state, handle)?.device;
            if !state.captures.on_device(device).is_empty() {
                let why = format!("{handle} cannot be destroyed while a stream of {device} captures");
                return refuse(ErrorCode::StreamCaptureUnsupported, why);
            }
            state.libraries.destroy(handle);
            Ok(())
        })
    }

    fn library_set_stream(&self, handle: HandleId, stream: StreamId) -> Result<()> {
        self.call(Call::LibrarySetStream, |state| {
            let Handle { library, device, .. } = *use_handle(state, handle)?;
            if library == Library::BlasLt {
                return refuse(ErrorCode::NotSupported, format!("handles of {library} have no stream"));
            }
            let own = state.live_stream(stream)?;
            let stream_device = state.scheduler.streams.get(own).device;
            if stream_device != device {
                let why = format!("{handle} is on {device}, {stream} on {stream_device}");
                return refuse(ErrorCode::InvalidValue, why);
            }
            let settings = use_handle(state, handle)?;
            (settings.stream, settings.workspace) = (stream, None);
            state.libraries.log(handle, LibraryCall::SetStream(stream));
            Ok(())
        })
    }

    fn library_raw(&self, handle: HandleId) -> Result<RawHandle> {
        self.call(Call::LibraryRaw, |state| {
            use_handle(state, handle)?;
            Ok(RawHandle(0x8000_0000 + handle.0 * 0x40))
        })
    }

    fn blas_set_workspace(&self, handle: HandleId, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call(Call::BlasSetWorkspace, |state| {
            let settings = use_blas(state, handle)?;
            if !ptr.0.is_multiple_of(WORKSPACE_ALIGNMENT) {
                let why = format!("{ptr} is not a multiple of {WORKSPACE_ALIGNMENT}");
                return refuse(ErrorCode::InvalidValue, why);
            }
            let (device, stream) = (settings.device, settings.stream);
            check_product_memory(state, device, stream, (ptr, bytes), true)?;
            use_blas(state, handle)?.workspace = (bytes != 0).then_some((ptr, bytes));
            state.libraries.log(handle, LibraryCall::SetWorkspace { ptr, bytes });
            Ok(())
        })
    }

    fn blas_set_math(&self, handle: HandleId, math: BlasMath) -> Result<()> {
        self.call(Call::BlasSetMath, |state| {
            use_blas(state, handle)?.math = math;
            state.libraries.log(handle, LibraryCall::SetMath(math));
            Ok(())
        })
    }

    fn blas_set_atomics(&self, handle: HandleId, allowed: bool) -> Result<()> {
        self.call(Call::BlasSetAtomics, |state| {
            // Without effect: the product uses no atomic operations.
            use_blas(state, handle)?;
            state.libraries.log(handle, LibraryCall::SetAtomics(allowed));
            Ok(())
        })
    }

    fn blas_sgemm(&self, handle: HandleId, product: &Sgemm) -> Result<()> {
        self.waiting_call(Call::BlasSgemm, |mut state| {
            let Handle { device, stream, math, workspace, .. } = *use_blas(&mut state, handle)?;
            let stream = state.live_stream(stream)?;
            if let Err(why) = product.check() {
                return refuse(ErrorCode::InvalidValue, why);
            }
            if product.m != 0 && product.n != 0 {
                state.forbid_implicit_wait(stream)?;
                for range in product.ranges() {
                    check_product_memory(&mut state, device, stream, range, range.0 == product.c.ptr)?;
                }
                if let Some(workspace) = workspace {
                    check_product_memory(&mut state, device, stream, workspace, true)?;
                }
                let args = sgemm::arguments(product, math, workspace);
                let kernel = KernelWork { function: None, host: SGEMM, shape: sgemm::shape(product), args };
                let nanos = state.config.work.product_nanos(product.m, product.n, product.k);
                state = self.wait_for_queue(state, stream)?;
                state.submit(stream, Work::Kernel(Arc::new(kernel)), nanos)?;
            }
            state.libraries.log(handle, LibraryCall::Sgemm(*product));
            Ok(())
        })
    }
}

/// Checks memory that a product is to access.
fn check_product_memory(
    state: &mut SimState,
    device: DeviceId,
    stream: StreamId,
    range: (DevicePtr, u64),
    write: bool,
) -> Result<()> {
    check_range(state, range, RangeUse { device, write, stream, operation: Operation::Kernel(SGEMM.name) })
}

/// A handle whose device works.
fn use_handle(state: &mut SimState, handle: HandleId) -> Result<&mut Handle> {
    let device = match state.libraries.get(handle) {
        Ok(settings) => settings.device,
        Err(why) => return Err(state.missing(why, handle)),
    };
    state.use_device(device)?;
    Ok(state.libraries.get_mut(handle))
}

/// The same, for calls of cuBLAS.
fn use_blas(state: &mut SimState, handle: HandleId) -> Result<&mut Handle> {
    let settings = use_handle(state, handle)?;
    if settings.library != Library::Blas {
        let why = format!("{handle} is a handle of {}, not of {}", settings.library, Library::Blas);
        return refuse(ErrorCode::InvalidHandle, why);
    }
    Ok(settings)
}
