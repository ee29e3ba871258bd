//! Pinned host memory.
//!
//! Only addresses in the map of pinned ranges are read, written and copied, so callers need no unsafe code. Nothing
//! here makes a reference to pinned memory: a device may write it at any time.

use std::ffi::{c_uint, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use warpool_driver::{
    Call, ClaimedRange, DeviceId, DevicePtr, ErrorCode, HostMemory, HostOptions, HostPtr, HostRange, Result,
};

use crate::CudaDriver;
use crate::error::CallSite;
use crate::handle::Context;
use crate::host_bytes;
use crate::range_map::Range;
use crate::sync::{read, write};

/// `CU_MEMHOSTALLOC_…`; for registration, the first two are the same.
const PORTABLE: c_uint = 1;
const DEVICE_MAP: c_uint = 2;
const WRITE_COMBINED: c_uint = 4;

/// A pinned range.
pub(crate) struct Pinned {
    context: Context,
    source: Source,
}

/// How a range was pinned, which determines how it is unpinned.
enum Source {
    Allocated,
    /// The range is kept for as long as CUDA has it pinned. That includes the time after this driver is dropped: it is
    /// then never unmapped.
    Registered(ManuallyDrop<ClaimedRange>),
}

/// CUDA's flags for pinned memory.
const fn flags(options: HostOptions) -> c_uint {
    let mut flags = 0;
    if options.portable {
        flags |= PORTABLE;
    }
    if options.mapped {
        flags |= DEVICE_MAP;
    }
    if options.write_combined {
        flags |= WRITE_COMBINED;
    }
    flags
}

impl HostMemory for CudaDriver {
    fn host_alloc(&self, device: DeviceId, bytes: u64, options: HostOptions) -> Result<HostPtr> {
        let site = self.enter(Call::HostAlloc)?;
        let context = self.context_of(site, device)?;
        if bytes == 0 {
            // CUDA returns success and no memory.
            return Err(site.error(ErrorCode::InvalidValue));
        }
        let _current = self.make_current(site, context)?;
        let mut pointer = ptr::null_mut();
        // SAFETY: CUDA writes the address to `pointer`.
        site.check(unsafe { (self.api.mem_host_alloc)(&raw mut pointer, bytes as usize, flags(options)) })?;
        let address = pointer.expose_provenance() as u64;
        write(&self.pinned).insert(address, bytes, Pinned { context, source: Source::Allocated });
        Ok(HostPtr(address))
    }

    fn host_free(&self, ptr: HostPtr) -> Result<()> {
        let site = self.enter(Call::HostFree)?;
        let range = write(&self.pinned).remove_if(ptr.0, |pinned| matches!(pinned.source, Source::Allocated));
        let range = range.ok_or_else(|| site.error(ErrorCode::InvalidValue))?;
        self.unpin(site, ptr, range, self.api.mem_free_host).map(drop)
    }

    fn host_register(&self, device: DeviceId, range: HostRange, options: HostOptions) -> Result<()> {
        let site = self.enter(Call::HostRegister)?;
        let context = self.context_of(site, device)?;
        if options.write_combined {
            let detail = "memory that exists already cannot become write-combined";
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let _current = self.make_current(site, context)?;
        let (start, bytes) = (range.ptr(), range.bytes());
        let Some(claimed) = range.claim() else {
            let detail = format!("the pages at {start} are pinned already");
            return Err(site.explain(ErrorCode::HostMemoryAlreadyRegistered, detail));
        };
        // SAFETY: the memory exists until it is unregistered: the maker of the `HostRange` promises it, or `claimed`
        // keeps the pages.
        site.check(unsafe { (self.api.mem_host_register)(pointer_to(start), bytes as usize, flags(options)) })?;
        let source = Source::Registered(ManuallyDrop::new(claimed));
        write(&self.pinned).insert(start.0, bytes, Pinned { context, source });
        Ok(())
    }

    fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        let site = self.enter(Call::HostUnregister)?;
        let removed = write(&self.pinned).remove_if(ptr.0, |pinned| matches!(pinned.source, Source::Registered(_)));
        let Some(range) = removed else {
            let is_inside = read(&self.pinned).at(ptr.0).is_some();
            let code = if is_inside { ErrorCode::InvalidValue } else { ErrorCode::HostMemoryNotRegistered };
            return Err(site.error(code));
        };
        if let Source::Registered(claimed) = self.unpin(site, ptr, range, self.api.mem_host_unregister)?.source {
            drop(ManuallyDrop::into_inner(claimed));
        }
        Ok(())
    }

    fn host_device_ptr(&self, device: DeviceId, ptr: HostPtr) -> Result<DevicePtr> {
        let site = self.enter(Call::HostDevicePtr)?;
        let context = self.context_of(site, device)?;
        let mut checked = self.check_ranges(site);
        checked.host(ptr, 1)?;
        let _current = self.make_current(site, context)?;
        let mut address = 0;
        // SAFETY: the address is pinned and stays so for the call; CUDA writes to `address`; the flags must be 0.
        site.check(unsafe { (self.api.mem_host_get_device_pointer)(&raw mut address, pointer_to(ptr), 0) })?;
        Ok(DevicePtr(address))
    }

    fn host_read(&self, ptr: HostPtr, into: &mut [u8]) -> Result<()> {
        let site = self.enter(Call::HostRead)?;
        let _no_writes = read(&self.pinned_access);
        let mut checked = self.check_ranges(site);
        checked.host(ptr, into.len() as u64)?;
        // SAFETY: the range is pinned, so it is memory of this process, and stays so while `checked` exists; no
        // `host_write` runs meanwhile.
        unsafe { host_bytes::read(pointer_to(ptr).cast_const().cast(), into) };
        Ok(())
    }

    fn host_write(&self, ptr: HostPtr, bytes: &[u8]) -> Result<()> {
        let site = self.enter(Call::HostWrite)?;
        let _no_access = write(&self.pinned_access);
        let mut checked = self.check_ranges(site);
        checked.host(ptr, bytes.len() as u64)?;
        // SAFETY: the range is pinned, so it is memory of this process, and stays so while `checked` exists; no other
        // `host_read` or `host_write` runs meanwhile.
        unsafe { host_bytes::write(pointer_to(ptr).cast(), bytes) };
        Ok(())
    }
}

impl CudaDriver {
    /// Unpins a range with CUDA's function for it, after the work that may use it. The range was removed from the map,
    /// so no call can use it; on failure it is put back.
    fn unpin(
        &self,
        site: CallSite<'_>,
        ptr: HostPtr,
        range: Range<Pinned>,
        function: unsafe extern "C" fn(*mut c_void) -> u32,
    ) -> Result<Pinned> {
        // CUDA's functions wait for all work of the device, too (seen on an H200): also for that of streams that were
        // adopted or destroyed, or that capture now. But its documentation does not promise it.
        let unpinned = self.wait_for_streams(site).and_then(|()| {
            let _current = self.make_current(site, range.value.context)?;
            // SAFETY: cuMemHostAlloc or cuMemHostRegister pinned the range, and it is not in the map any more.
            site.check(unsafe { function(pointer_to(ptr)) })
        });
        match unpinned {
            Ok(()) => Ok(range.value),
            Err(error) => {
                write(&self.pinned).insert(ptr.0, range.bytes, range.value);
                Err(error)
            }
        }
    }
}

/// The address as a pointer.
pub(crate) fn pointer_to(ptr: HostPtr) -> *mut c_void {
    ptr::with_exposed_provenance_mut(ptr.0 as usize)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::sync::{Arc, Mutex, Weak};

    use cudarc::driver::sys::CUstream;
    use warpool_driver::{CaptureMode, Captures, HostPages, StreamOptions, Streams};

    use super::*;
    use crate::api::Api;
    use crate::fake_cuda::{self, DEVICE};
    use crate::sync::lock;

    thread_local! {
        /// What CUDA returns for registration and unregistration on this thread.
        static RESULT: Cell<u32> = const { Cell::new(0) };
        /// The calls of this thread that wait for a stream, and those that unpin: the stream's handle, or 0.
        static CALLS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    }

    extern "C" fn register(_: *mut c_void, _: usize, _: c_uint) -> u32 {
        RESULT.get()
    }

    extern "C" fn unregister(_: *mut c_void) -> u32 {
        CALLS.with_borrow_mut(|calls| calls.push(0));
        RESULT.get()
    }

    extern "C" fn synchronize(stream: CUstream) -> u32 {
        // The legacy stream is null.
        CALLS.with_borrow_mut(|calls| calls.push(stream.addr().max(1)));
        0
    }

    fn driver() -> CudaDriver {
        let pinning = Api { mem_host_register: register, mem_host_unregister: unregister, ..fake_cuda::api() };
        fake_cuda::driver_with(Api { stream_synchronize: synchronize, ..pinning })
    }

    #[test]
    fn pages_are_kept_until_cuda_has_unpinned_them() {
        let driver = driver();
        let pages = HostPages::map(4096, false).expect("a page");
        let (ptr, alive) = (pages.ptr(), Arc::downgrade(&pages));
        let register = || driver.host_register(DEVICE, HostRange::of_pages(&pages), HostOptions::default());

        RESULT.set(2);
        assert_eq!(register().map_err(|error| error.code), Err(ErrorCode::OutOfMemory));
        assert_eq!(alive.strong_count(), 1, "a failed registration keeps nothing");
        RESULT.set(0);
        assert_eq!(register(), Ok(()));
        assert_eq!(register().map_err(|error| error.code), Err(ErrorCode::HostMemoryAlreadyRegistered));

        RESULT.set(1);
        assert!(driver.host_unregister(ptr).is_err());
        assert_eq!(alive.strong_count(), 2, "still pinned");
        assert_eq!(driver.host_read(ptr, &mut [0; 16]), Ok(()));
        RESULT.set(0);
        assert_eq!(driver.host_unregister(ptr), Ok(()));
        assert_eq!(alive.strong_count(), 1);

        assert_eq!(register(), Ok(()));
        drop(pages);
        drop(driver);
        assert_eq!(alive.strong_count(), 1, "still pinned, and never unpinned");
        // On purpose, so a leak detector must still see it.
        static NEVER_UNPINNED: Mutex<Vec<Weak<HostPages>>> = Mutex::new(Vec::new());
        lock(&NEVER_UNPINNED).push(alive);
    }

    #[test]
    fn unpinning_waits_for_streams_that_do_not_capture() -> Result<()> {
        let driver = driver();
        let pages = HostPages::map(4096, false).expect("a page");
        let streams = [(); 3].map(|()| driver.stream_create(DEVICE, StreamOptions::default()));
        let [first, second, capturing] = streams.map(|stream| stream.expect("a stream"));
        driver.capture_begin(capturing, CaptureMode::Relaxed)?;
        driver.host_register(DEVICE, HostRange::of_pages(&pages), HostOptions::default())?;
        CALLS.take();
        driver.host_unregister(pages.ptr())?;
        let mut calls = CALLS.take();
        assert_eq!(calls.pop(), Some(0), "unpinned last");
        for stream in [first, second] {
            let raw = driver.stream_handle(stream)?.raw.0 as usize;
            assert!(calls.contains(&raw));
        }
        assert!(calls.contains(&1), "the legacy stream, and with it the per-thread streams");
        assert!(!calls.contains(&(driver.stream_handle(capturing)?.raw.0 as usize)));
        Ok(())
    }

    #[test]
    fn options_become_flags() {
        assert_eq!(flags(HostOptions::default()), 3);
        assert_eq!(flags(HostOptions { portable: false, mapped: false, write_combined: true }), 4);
    }
}
