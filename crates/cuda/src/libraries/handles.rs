//! Handles of NVIDIA's libraries. What only cuBLAS has is in `blas.rs`.
//!
//! One thread at a time may use a handle, so a call that uses one holds it exclusively. No handle is set to a destroyed
//! stream: before that it is set to another (`stream_users.rs`), and does no work until it is set to a stream again.

use std::ffi::c_void;
use std::ptr;

use warpool_driver::{
    BlasMath, Call, DeviceId, DevicePtr, ErrorCode, HandleId, Libraries, Library, RawHandle, Result, Sgemm, StreamId,
};

use super::functions::LibraryFunctions;
use super::status;
use crate::CudaDriver;
use crate::error::CallSite;
use crate::handle::{Context, CudaHandle};
use crate::object_table::Exclusive;
use crate::stream::PER_THREAD;
use crate::stream_users::StreamUser;

/// A library handle in the object table.
pub(crate) struct LibraryHandle {
    pub(super) library: Library,
    /// The library's handle.
    pub(super) raw: CudaHandle<c_void>,
    device: DeviceId,
    /// The context that it was created in.
    pub(super) context: Context,
    /// The stream that it is set to. `None` for libraries without streams, and if the stream was destroyed.
    pub(super) stream: Option<StreamId>,
    /// The memory that a cuBLAS handle was given to work with.
    pub(super) workspace: Option<(DevicePtr, u64)>,
}

impl Libraries for CudaDriver {
    fn library_create(&self, library: Library, device: DeviceId) -> Result<HandleId> {
        let site = self.enter(Call::LibraryCreate)?;
        let default = self.device(site, device)?.stream_default;
        let functions = self.libraries.get(site, library)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        // Captures forbid what the libraries do to create a handle; the contract allows it.
        let _relaxed = self.relax_capture_mode(site)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is current; the library writes the handle to `raw`.
        let status = unsafe { (functions.create)(&raw mut raw) };
        if status != 0 {
            let (code, mut detail) = status::error_of(library, status);
            if code == ErrorCode::NotInitialized {
                detail.push_str(", as it also does if the device is out of memory");
            }
            return Err(site.explain(code, detail));
        }
        let stream = functions.set_stream.map(|_| default);
        let raw = CudaHandle::new(raw);
        let handle = LibraryHandle { library, raw, device, context, stream, workspace: None };
        Ok(HandleId(self.handles.insert(handle)))
    }

    fn library_destroy(&self, handle: HandleId) -> Result<()> {
        let site = self.enter(Call::LibraryDestroy)?;
        let object = self.handles.exclusive(handle.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let functions = self.libraries.get(site, object.library)?;
        let _current = self.make_current(site, object.context)?;
        // It would invalidate captures of the device in every mode, even if it succeeds.
        if self.captures.exist_in(object.context) {
            return Err(site.explain(ErrorCode::StreamCaptureUnsupported, "a stream of the handle's device captures"));
        }
        // Global captures of other devices would forbid it, too.
        let _relaxed = self.relax_capture_mode(site)?;
        // SAFETY: `raw` came from the library, no other call can use it, and its stream exists.
        check_status(site, object.library, unsafe { (functions.destroy)(object.raw.raw()) })?;
        self.stream_users.rebind(StreamUser::Handle(handle), object.stream, None);
        object.remove();
        Ok(())
    }

    fn library_set_stream(&self, handle: HandleId, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::LibrarySetStream)?;
        let (mut object, functions) = self.library_handle(site, handle)?;
        let library = object.library;
        let Some(set_stream) = functions.set_stream else {
            return Err(site.explain(ErrorCode::NotSupported, format!("handles of {library} have no stream")));
        };
        let target = self.stream(site, stream)?;
        if target.device != object.device {
            let detail = format!("the handle belongs to {}, the stream to {}", object.device, target.device);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        // Default streams are those of the current context.
        if target.is_destroyable() && self.context_of_stream(site, &target)? != object.context {
            let detail = format!("handle and stream were created in different contexts of {}", object.device);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let _current = self.make_current(site, object.context)?;
        // cuBLAS's function is legal in captures; for the others it is unknown.
        let _relaxed = if library == Library::Blas { None } else { Some(self.relax_capture_mode(site)?) };
        // SAFETY: the handle is held exclusively; its stream and the new one exist.
        check_status(site, library, unsafe { set_stream(object.raw.raw(), target.raw.raw()) })?;
        object.workspace = None;
        let before = object.stream.replace(stream);
        if before != Some(stream) {
            self.stream_users.rebind(StreamUser::Handle(handle), before, target.is_destroyable().then_some(stream));
        }
        Ok(())
    }

    fn library_raw(&self, handle: HandleId) -> Result<RawHandle> {
        let site = self.enter(Call::LibraryRaw)?;
        Ok(self.library_handle(site, handle)?.0.raw.exposed())
    }

    fn blas_set_workspace(&self, handle: HandleId, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.set_workspace(handle, ptr, bytes)
    }

    fn blas_set_math(&self, handle: HandleId, math: BlasMath) -> Result<()> {
        self.set_math(handle, math)
    }

    fn blas_set_atomics(&self, handle: HandleId, allowed: bool) -> Result<()> {
        self.set_atomics(handle, allowed)
    }

    fn blas_sgemm(&self, handle: HandleId, product: &Sgemm) -> Result<()> {
        self.sgemm(handle, product)
    }
}

impl CudaDriver {
    /// Looks up a handle by id, held exclusively while the result lives, and its library.
    pub(super) fn library_handle(
        &self,
        site: CallSite<'_>,
        handle: HandleId,
    ) -> Result<(Exclusive<'_, LibraryHandle>, &LibraryFunctions)> {
        let object = self.handles.wait_exclusive(handle.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let functions = self.libraries.get(site, object.library)?;
        Ok((object, functions))
    }

    /// Sets a handle to another stream than one that is about to be destroyed.
    pub(crate) fn unbind_handle(&self, site: CallSite<'_>, handle: HandleId, stream: StreamId) -> Result<()> {
        // Waits for a call that destroys the handle.
        let object = self.handles.wait_exclusive(handle.0).filter(|object| object.stream == Some(stream));
        let Some(mut object) = object else { return Ok(()) };
        let Some(set_stream) = self.libraries.get(site, object.library)?.set_stream else { return Ok(()) };
        let _current = self.make_current(site, object.context)?;
        let _relaxed = self.relax_capture_mode(site)?;
        // The per-thread default stream always exists, and unlike the legacy one is not affected by captures of other
        // streams. SAFETY: the handle is held exclusively; both streams exist.
        let status = unsafe { set_stream(object.raw.raw(), ptr::without_provenance_mut(PER_THREAD as usize)) };
        check_status(site, object.library, status)?;
        (object.stream, object.workspace) = (None, None);
        Ok(())
    }
}

/// Converts the status that a library's function returned.
pub(super) fn check_status(site: CallSite<'_>, library: Library, status: u32) -> Result<()> {
    match status {
        0 => Ok(()),
        status => {
            let (code, detail) = status::error_of(library, status);
            Err(site.explain(code, detail))
        }
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::{BlasMatrix, CaptureMode, Captures, ForeignStream, Memory, Streams};

    use super::*;
    use crate::api::Api;
    use crate::fake_cuda::{self, DEVICE, LibraryCall, OTHER_DEVICE, library_calls, stream_of};

    fn code<T>(result: Result<T>) -> Option<ErrorCode> {
        result.err().map(|error| error.code)
    }

    /// The serial of the stream that the library has set.
    fn set_to(driver: &CudaDriver, handle: HandleId) -> Option<u64> {
        let (object, _) = driver.library_handle(driver.site(Call::LibraryRaw), handle).expect("a handle");
        stream_of(object.raw.raw())
    }

    fn serial(driver: &CudaDriver, stream: StreamId) -> Option<u64> {
        driver.streams.get(stream.0).map(|stream| stream.serial)
    }

    #[test]
    fn handles_of_every_library_are_created_and_destroyed() -> Result<()> {
        let driver = fake_cuda::driver();
        for library in Library::ALL {
            let handle = driver.library_create(library, DEVICE)?;
            assert_ne!(driver.library_raw(handle)?, RawHandle(0));
            driver.library_destroy(handle)?;
            assert_eq!(library_calls(), [LibraryCall::Create, LibraryCall::Destroy]);
            assert_eq!(code(driver.library_destroy(handle)), Some(ErrorCode::InvalidHandle));
            assert_eq!(code(driver.library_raw(handle)), Some(ErrorCode::InvalidHandle));
        }
        assert_eq!(code(driver.library_create(Library::Dnn, DeviceId(2))), Some(ErrorCode::InvalidDevice));
        Ok(())
    }

    #[test]
    fn a_handle_takes_streams_of_its_device_and_context() -> Result<()> {
        let driver = fake_cuda::driver();
        let handle = driver.library_create(Library::Solver, DEVICE)?;
        let [own, other] = [DEVICE, OTHER_DEVICE].map(|device| driver.stream_create(device, Default::default()));
        let (own, other) = (own?, other?);
        driver.library_set_stream(handle, own)?;
        for other in [other, driver.stream_default(OTHER_DEVICE)?] {
            assert_eq!(code(driver.library_set_stream(handle, other)), Some(ErrorCode::InvalidValue));
        }
        assert_eq!(code(driver.library_set_stream(handle, StreamId(99))), Some(ErrorCode::InvalidHandle));
        // A handle in another context of the device.
        // SAFETY: the fake driver dereferences no context.
        unsafe { driver.adopt_context(DEVICE, RawHandle(0xAD)) }?;
        let adopted = driver.library_create(Library::Solver, DEVICE)?;
        assert_eq!(code(driver.library_set_stream(adopted, own)), Some(ErrorCode::InvalidValue));
        driver.library_set_stream(adopted, driver.stream_default(DEVICE)?)?;
        assert_eq!(set_to(&driver, handle), serial(&driver, own));
        let light = driver.library_create(Library::BlasLt, DEVICE)?;
        assert_eq!(code(driver.library_set_stream(light, own)), Some(ErrorCode::NotSupported));
        Ok(())
    }

    #[test]
    fn no_handle_is_set_to_a_destroyed_stream() -> Result<()> {
        let driver = fake_cuda::driver();
        let handles = [Library::Blas, Library::Dnn, Library::Sparse].map(|which| driver.library_create(which, DEVICE));
        let [a, b, c] = handles.map(|handle| handle.expect("a handle"));
        let [gone, stays] = [(); 2].map(|()| driver.stream_create(DEVICE, Default::default()).expect("a stream"));
        let raw = driver.stream_handle(gone)?.raw;
        for (handle, stream) in [(a, gone), (b, gone), (c, gone), (c, stays)] {
            driver.library_set_stream(handle, stream)?;
        }
        driver.stream_destroy(gone)?;
        assert_eq!([a, b, c].map(|handle| set_to(&driver, handle)), [None, None, serial(&driver, stays)]);
        // SAFETY: the fake driver never frees the memory behind a handle.
        let foreign = unsafe { ForeignStream::new(raw) };
        assert!(driver.stream_adopt(DEVICE, foreign).is_err(), "it is destroyed");
        driver.library_set_stream(a, stays)?;
        assert_eq!(set_to(&driver, a), serial(&driver, stays));
        driver.library_destroy(b)?;
        driver.stream_destroy(stays)?;
        assert_eq!(driver.stream_users.count(), 0);
        Ok(())
    }

    #[test]
    fn a_stream_that_is_not_destroyed_must_be_set_again() -> Result<()> {
        extern "C" fn refuse(_: cudarc::driver::sys::CUstream) -> u32 {
            ErrorCode::IllegalState.number()
        }
        let driver = fake_cuda::driver_with(Api { stream_destroy: refuse, ..fake_cuda::api() });
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.library_set_stream(handle, stream)?;
        assert_eq!(code(driver.stream_destroy(stream)), Some(ErrorCode::IllegalState));
        let matrix = BlasMatrix { ptr: driver.mem_alloc(DEVICE, 256)?, stride: 1, transposed: false };
        let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix, b: matrix, beta: 0.0, c: matrix };
        assert_eq!(code(driver.blas_sgemm(handle, &product)), Some(ErrorCode::InvalidHandle));
        driver.library_set_stream(handle, stream)?;
        driver.blas_sgemm(handle, &product)
    }

    #[test]
    fn handles_are_created_while_a_stream_captures_and_destroyed_afterwards() -> Result<()> {
        let driver = fake_cuda::driver();
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.capture_begin(stream, CaptureMode::Global)?;
        let handles = Library::ALL.map(|library| driver.library_create(library, DEVICE).expect("a stream"));
        library_calls();
        for handle in handles {
            assert_eq!(code(driver.library_destroy(handle)), Some(ErrorCode::StreamCaptureUnsupported));
        }
        assert_eq!(library_calls(), [], "the libraries were not called");
        // Captures of other devices do not forbid it.
        driver.library_destroy(driver.library_create(Library::Blas, OTHER_DEVICE)?)?;
        assert_eq!(driver.capture_mode_exchange(CaptureMode::Global), Ok(CaptureMode::Global));
        driver.capture_end(stream)?;
        handles.into_iter().try_for_each(|handle| driver.library_destroy(handle))
    }

    #[test]
    fn a_status_is_named_and_a_missing_library_too() {
        let driver = fake_cuda::driver();
        let site = driver.site(Call::LibraryCreate);
        let error = check_status(site, Library::Solver, 2).expect_err("it is not 0");
        assert_eq!(error.code, ErrorCode::OutOfMemory);
        assert_eq!(error.detail.as_deref(), Some("cuSOLVER returned CUSOLVER_STATUS_ALLOC_FAILED (2)"));

        // Where the library is installed, there is nothing to test.
        let fresh = crate::libraries::LoadedLibraries::default();
        if let Err(error) = fresh.get(site, Library::Sparse) {
            assert_eq!(error.code, ErrorCode::SharedObjectInitFailed);
            assert!(error.to_string().contains("libcusparse could not be loaded; tried libcusparse.so.12"), "{error}");
        }
    }
}
