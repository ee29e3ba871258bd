//! Handles of NVIDIA's libraries: made, pointed at streams, taken away. What only cuBLAS can do is in `blas.rs`.
//!
//! A handle is one thread's at a time, so whoever uses one has its row alone. A library never holds a stream that is
//! gone: before that, the handle is pointed elsewhere (`holders.rs`), and can do no work until it is given another.

use std::ffi::c_void;
use std::ptr;

use warpool_driver::{
    BlasMath, Call, DeviceId, DevicePtr, ErrorCode, HandleId, Libraries, Library, RawHandle, Result, Sgemm, StreamId,
};

use crate::CudaDriver;
use crate::context::Context;
use crate::error::Site;
use crate::holders::{Holder, may_go};
use crate::status;
use crate::stream::PER_THREAD;
use crate::table::{Alone, Handle, lock};
use crate::vendor::Vendor;

/// A handle behind its id.
pub(crate) struct LibraryHandle {
    /// Whose it is.
    pub(crate) library: Library,
    /// The library's name for it.
    pub(crate) raw: Handle<c_void>,
    device: DeviceId,
    /// The context that it was made in.
    pub(crate) context: Context,
    /// The stream that it works on. None for libraries without, and if it is gone.
    pub(crate) stream: Option<StreamId>,
}

impl Libraries for CudaDriver {
    fn library_create(&self, library: Library, device: DeviceId) -> Result<HandleId> {
        let site = self.enter(Call::LibraryCreate)?;
        let default = self.device(site, device)?.stream_default;
        let vendor = self.vendors.get(site, library)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        // Captures forbid what the libraries do to make a handle; the contract allows it.
        let _relaxed = self.relax(site)?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` takes the handle; the context is current.
        let status = unsafe { (vendor.create)(&raw mut raw) };
        if status != 0 {
            let (code, mut detail) = status::meaning(library, status);
            if code == ErrorCode::NotInitialized {
                detail.push_str(", as it also does when the device has no memory left");
            }
            return Err(site.explain(code, detail));
        }
        let stream = vendor.set_stream.map(|_| default);
        Ok(HandleId(self.handles.insert(LibraryHandle { library, raw: Handle::new(raw), device, context, stream })))
    }

    fn library_destroy(&self, handle: HandleId) -> Result<()> {
        let site = self.enter(Call::LibraryDestroy)?;
        let row = self.handles.alone(handle.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let vendor = self.vendors.get(site, row.library)?;
        let _current = self.make_current(site, row.context)?;
        // It would break captures of the device in every mode, even where it succeeds.
        if lock(&self.origins).values().any(|origin| origin.is_of(row.context)) {
            return Err(site.explain(ErrorCode::StreamCaptureUnsupported, "a stream of the handle's device captures"));
        }
        // Captures of other devices would mind, too, if they are global.
        let _relaxed = self.relax(site)?;
        // SAFETY: `raw` came from the library's own function, nobody else can use it, and its stream is not gone.
        check_status(site, row.library, unsafe { (vendor.destroy)(row.raw.raw()) })?;
        self.holders.went(Holder::Handle(handle), row.stream, None);
        row.remove();
        Ok(())
    }

    fn library_set_stream(&self, handle: HandleId, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::LibrarySetStream)?;
        let (mut row, vendor) = self.handle(site, handle)?;
        let library = row.library;
        let Some(set_stream) = vendor.set_stream else {
            return Err(site.explain(ErrorCode::NotSupported, format!("handles of {library} have no stream")));
        };
        let target = self.stream(site, stream)?;
        if target.device != row.device {
            let detail = format!("the handle is of {}, the stream of {}", row.device, target.device);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        // Default streams are those of whichever context is current.
        if may_go(&target) && self.context_of_stream(site, &target)? != row.context {
            let detail = format!("handle and stream were made in different contexts of {}", row.device);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let _current = self.make_current(site, row.context)?;
        // cuBLAS's is legal in captures; of the others nobody says.
        let _relaxed = if library == Library::Blas { None } else { Some(self.relax(site)?) };
        // SAFETY: the handle is ours alone, the stream is live, and the one that it leaves is not gone.
        check_status(site, library, unsafe { set_stream(row.raw.raw(), target.raw.raw()) })?;
        let before = row.stream.replace(stream);
        if before != Some(stream) {
            self.holders.went(Holder::Handle(handle), before, may_go(&target).then_some(stream));
        }
        Ok(())
    }

    fn library_raw(&self, handle: HandleId) -> Result<RawHandle> {
        let site = self.enter(Call::LibraryRaw)?;
        Ok(self.handle(site, handle)?.0.raw.exposed())
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
    /// The handle behind an id, ours alone as long as it is held, and its library.
    pub(crate) fn handle(&self, site: Site<'_>, handle: HandleId) -> Result<(Alone<'_, LibraryHandle>, &Vendor)> {
        let row = self.handles.turn(handle.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let vendor = self.vendors.get(site, row.library)?;
        Ok((row, vendor))
    }

    /// Points a handle away from a stream that is about to go.
    pub(crate) fn handle_leaves(&self, site: Site<'_>, handle: HandleId, stream: StreamId) -> Result<()> {
        // Waits for whoever takes the handle away. One that is gone has left.
        let Some(mut row) = self.handles.turn(handle.0).filter(|row| row.stream == Some(stream)) else { return Ok(()) };
        let Some(set_stream) = self.vendors.get(site, row.library)?.set_stream else { return Ok(()) };
        let _current = self.make_current(site, row.context)?;
        let _relaxed = self.relax(site)?;
        // Each thread's own default stream is always there, and unlike the legacy one has nothing to do with the
        // captures of others. SAFETY: the handle is ours alone; both streams are live.
        let status = unsafe { set_stream(row.raw.raw(), ptr::without_provenance_mut(PER_THREAD as usize)) };
        check_status(site, row.library, status)?;
        row.stream = None;
        Ok(())
    }
}

/// Takes the status that a library's function returned.
pub(crate) fn check_status(site: Site<'_>, library: Library, status: u32) -> Result<()> {
    match status {
        0 => Ok(()),
        status => {
            let (code, detail) = status::meaning(library, status);
            Err(site.explain(code, detail))
        }
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::{BlasMatrix, CaptureMode, Captures, ForeignStream, Streams};

    use super::*;
    use crate::api::Api;
    use crate::fake::{self, DEVICE, Given, OTHER_DEVICE, given_here, stream_of};

    fn code<T>(result: Result<T>) -> Option<ErrorCode> {
        result.err().map(|error| error.code)
    }

    /// CUDA's number of the stream that the library holds.
    fn held(driver: &CudaDriver, handle: HandleId) -> Option<u64> {
        let (row, _) = driver.handle(driver.site(Call::LibraryRaw), handle).expect("it is there");
        stream_of(row.raw.raw())
    }

    fn serial(driver: &CudaDriver, stream: StreamId) -> Option<u64> {
        driver.streams.get(stream.0).map(|row| row.serial)
    }

    #[test]
    fn a_handle_of_every_library_comes_and_goes() -> Result<()> {
        let driver = fake::driver();
        for library in Library::ALL {
            let handle = driver.library_create(library, DEVICE)?;
            assert_ne!(driver.library_raw(handle)?, RawHandle(0));
            driver.library_destroy(handle)?;
            assert_eq!(given_here(), [Given::Create, Given::Destroy]);
            assert_eq!(code(driver.library_destroy(handle)), Some(ErrorCode::InvalidHandle));
            assert_eq!(code(driver.library_raw(handle)), Some(ErrorCode::InvalidHandle));
        }
        assert_eq!(code(driver.library_create(Library::Dnn, DeviceId(2))), Some(ErrorCode::InvalidDevice));
        Ok(())
    }

    #[test]
    fn a_handle_takes_streams_of_its_own_device_and_context() -> Result<()> {
        let driver = fake::driver();
        let handle = driver.library_create(Library::Solver, DEVICE)?;
        let [own, other] = [DEVICE, OTHER_DEVICE].map(|device| driver.stream_create(device, Default::default()));
        let (own, other) = (own?, other?);
        driver.library_set_stream(handle, own)?;
        for other in [other, driver.stream_default(OTHER_DEVICE)?] {
            assert_eq!(code(driver.library_set_stream(handle, other)), Some(ErrorCode::InvalidValue));
        }
        assert_eq!(code(driver.library_set_stream(handle, StreamId(99))), Some(ErrorCode::InvalidHandle));
        // A handle that is made in another context of the device.
        // SAFETY: the fake driver follows no context.
        unsafe { driver.adopt_context(DEVICE, RawHandle(0xAD)) }?;
        let adopted = driver.library_create(Library::Solver, DEVICE)?;
        assert_eq!(code(driver.library_set_stream(adopted, own)), Some(ErrorCode::InvalidValue));
        driver.library_set_stream(adopted, driver.stream_default(DEVICE)?)?;
        assert_eq!(held(&driver, handle), serial(&driver, own));
        let light = driver.library_create(Library::BlasLt, DEVICE)?;
        assert_eq!(code(driver.library_set_stream(light, own)), Some(ErrorCode::NotSupported));
        Ok(())
    }

    #[test]
    fn a_stream_that_goes_is_held_by_no_library() -> Result<()> {
        let driver = fake::driver();
        let handles = [Library::Blas, Library::Dnn, Library::Sparse].map(|which| driver.library_create(which, DEVICE));
        let [a, b, c] = handles.map(|handle| handle.expect("it is made"));
        let [gone, stays] = [(); 2].map(|()| driver.stream_create(DEVICE, Default::default()).expect("it is made"));
        let raw = driver.stream_handle(gone)?.raw;
        for (handle, stream) in [(a, gone), (b, gone), (c, gone), (c, stays)] {
            driver.library_set_stream(handle, stream)?;
        }
        driver.stream_destroy(gone)?;
        assert_eq!([a, b, c].map(|handle| held(&driver, handle)), [None, None, serial(&driver, stays)]);
        // They work again with another, which may be one of others.
        // SAFETY: the fake driver follows handles of streams that are gone, too.
        let foreign = unsafe { ForeignStream::new(raw) };
        assert!(driver.stream_adopt(DEVICE, foreign).is_err(), "this one is gone");
        driver.library_set_stream(a, stays)?;
        assert_eq!(held(&driver, a), serial(&driver, stays));
        driver.library_destroy(b)?;
        driver.stream_destroy(stays)?;
        assert_eq!(driver.holders.count(), 0);
        Ok(())
    }

    #[test]
    fn a_stream_that_stays_after_all_must_be_set_again() -> Result<()> {
        extern "C" fn refuse(_: cudarc::driver::sys::CUstream) -> u32 {
            ErrorCode::IllegalState.number()
        }
        let driver = fake::driver_with(Api { stream_destroy: refuse, ..fake::api() });
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.library_set_stream(handle, stream)?;
        assert_eq!(code(driver.stream_destroy(stream)), Some(ErrorCode::IllegalState));
        let matrix = BlasMatrix { ptr: DevicePtr(0), stride: 1, transposed: false };
        let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix, b: matrix, beta: 0.0, c: matrix };
        // Not on another stream than it was told.
        assert_eq!(code(driver.blas_sgemm(handle, &product)), Some(ErrorCode::InvalidHandle));
        driver.library_set_stream(handle, stream)?;
        driver.blas_sgemm(handle, &product)
    }

    #[test]
    fn handles_come_while_a_stream_captures_and_go_afterwards() -> Result<()> {
        let driver = fake::driver();
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.capture_begin(stream, CaptureMode::Global)?;
        let handles = Library::ALL.map(|library| driver.library_create(library, DEVICE).expect("it is made"));
        given_here();
        for handle in handles {
            assert_eq!(code(driver.library_destroy(handle)), Some(ErrorCode::StreamCaptureUnsupported));
        }
        assert_eq!(given_here(), [], "the libraries were not even asked");
        // Captures of other devices have nothing against it.
        driver.library_destroy(driver.library_create(Library::Blas, OTHER_DEVICE)?)?;
        assert_eq!(driver.capture_mode_exchange(CaptureMode::Global), Ok(CaptureMode::Global));
        driver.capture_end(stream)?;
        handles.into_iter().try_for_each(|handle| driver.library_destroy(handle))
    }

    #[test]
    fn a_status_is_named_and_a_missing_library_too() {
        let driver = fake::driver();
        let site = driver.site(Call::LibraryCreate);
        let error = check_status(site, Library::Solver, 2).expect_err("it is not 0");
        assert_eq!(error.code, ErrorCode::OutOfMemory);
        assert_eq!(error.detail.as_deref(), Some("cuSOLVER says CUSOLVER_STATUS_ALLOC_FAILED (2)"));

        // Nothing is loaded here yet. Where the library is installed, that is all that can be asked.
        let fresh = crate::vendor::Vendors::default();
        if let Err(error) = fresh.get(site, Library::Sparse) {
            assert_eq!(error.code, ErrorCode::SharedObjectInitFailed);
            assert!(error.to_string().contains("libcusparse could not be loaded; tried libcusparse.so.12"), "{error}");
        }
    }
}
