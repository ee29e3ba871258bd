//! Pinned host memory.
//! The book of pinned ranges is what keeps safe callers honest: only addresses in it are read, written or copied.

use std::ffi::{c_uint, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use warpool_driver::{
    Call, ClaimedRange, DeviceId, DevicePtr, ErrorCode, HostMemory, HostOptions, HostPtr, HostRange, Result,
};

use crate::CudaDriver;
use crate::context::Context;
use crate::error::Site;
use crate::ranges::HeldRanges;
use crate::table::{read, write};

/// `CU_MEMHOSTALLOC_…`; for registering, the first two are the same.
const PORTABLE: c_uint = 1;
const DEVICE_MAP: c_uint = 2;
const WRITE_COMBINED: c_uint = 4;

/// What is known about a pinned range.
pub(crate) struct Pinned {
    context: Context,
    how: How,
}

/// How a range came to be pinned, which decides how it is let go.
enum How {
    Allocated,
    /// The range is kept for as long as CUDA has it pinned, which it goes on doing if the driver here is dropped: then
    /// nobody unmaps it.
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
            // CUDA calls that a success and gives no memory.
            return Err(site.error(ErrorCode::InvalidValue));
        }
        let _current = self.make_current(site, context)?;
        let mut pointer = ptr::null_mut();
        // SAFETY: `pointer` takes the address.
        site.check(unsafe { (self.api.mem_host_alloc)(&raw mut pointer, bytes as usize, flags(options)) })?;
        let address = pointer.expose_provenance() as u64;
        self.pinned.insert(address, bytes, Pinned { context, how: How::Allocated });
        Ok(HostPtr(address))
    }

    fn host_free(&self, ptr: HostPtr) -> Result<()> {
        let site = self.enter(Call::HostFree)?;
        let range = self.pinned.remove_if(ptr.0, |pinned| matches!(pinned.how, How::Allocated));
        let range = range.ok_or_else(|| site.error(ErrorCode::InvalidValue))?;
        let freed = self.make_current(site, range.what.context).and_then(|_current| {
            // SAFETY: cuMemHostAlloc gave the address, and it is out of the book: nobody frees, reads or copies it any
            // more.
            site.check(unsafe { (self.api.mem_free_host)(pointer_to(ptr)) })
        });
        if freed.is_err() {
            self.pinned.insert(ptr.0, range.bytes, range.what);
        }
        freed
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
        let Some(kept) = range.claim() else {
            let detail = format!("the pages at {start} are pinned already");
            return Err(site.explain(ErrorCode::HostMemoryAlreadyRegistered, detail));
        };
        // SAFETY: whoever made the `HostRange` vouches for the memory until it is unregistered, or `kept` keeps it
        // until then.
        site.check(unsafe { (self.api.mem_host_register)(pointer_to(start), bytes as usize, flags(options)) })?;
        self.pinned.insert(start.0, bytes, Pinned { context, how: How::Registered(ManuallyDrop::new(kept)) });
        Ok(())
    }

    fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        let site = self.enter(Call::HostUnregister)?;
        let Some(range) = self.pinned.remove_if(ptr.0, |pinned| matches!(pinned.how, How::Registered(_))) else {
            let inside = self.pinned.hold().containing(ptr.0, 0).is_some();
            let code = if inside { ErrorCode::InvalidValue } else { ErrorCode::HostMemoryNotRegistered };
            return Err(site.error(code));
        };
        let unpinned = self.make_current(site, range.what.context).and_then(|_current| {
            // SAFETY: cuMemHostRegister pinned the range, and it is out of the book: nobody unpins, reads or copies it
            // any more.
            site.check(unsafe { (self.api.mem_host_unregister)(pointer_to(ptr)) })
        });
        if let Err(error) = unpinned {
            self.pinned.insert(ptr.0, range.bytes, range.what);
            return Err(error);
        }
        if let How::Registered(kept) = range.what.how {
            drop(ManuallyDrop::into_inner(kept));
        }
        Ok(())
    }

    fn host_device_ptr(&self, device: DeviceId, ptr: HostPtr) -> Result<DevicePtr> {
        let site = self.enter(Call::HostDevicePtr)?;
        let context = self.context_of(site, device)?;
        let pinned = self.pinned.hold();
        check_pinned(site, &pinned, ptr, 0)?;
        let _current = self.make_current(site, context)?;
        let mut address = 0;
        // SAFETY: the address is pinned and stays so for the call; `address` takes the number; the flags must be 0.
        site.check(unsafe { (self.api.mem_host_get_device_pointer)(&raw mut address, pointer_to(ptr), 0) })?;
        Ok(DevicePtr(address))
    }

    fn host_read(&self, ptr: HostPtr, into: &mut [u8]) -> Result<()> {
        let site = self.enter(Call::HostRead)?;
        let _bytes = read(&self.pinned_bytes);
        let pinned = self.pinned.hold();
        check_pinned(site, &pinned, ptr, into.len() as u64)?;
        // SAFETY: the range is pinned, so it is memory of this process, and stays so while `pinned` is held; no
        // `host_write` runs meanwhile.
        unsafe { ptr::copy(pointer_to(ptr).cast_const().cast::<u8>(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn host_write(&self, ptr: HostPtr, bytes: &[u8]) -> Result<()> {
        let site = self.enter(Call::HostWrite)?;
        let _bytes = write(&self.pinned_bytes);
        let pinned = self.pinned.hold();
        check_pinned(site, &pinned, ptr, bytes.len() as u64)?;
        // SAFETY: the range is pinned, so it is memory of this process, and stays so while `pinned` is held; nobody
        // else is in `host_read` or `host_write` meanwhile.
        unsafe { ptr::copy(bytes.as_ptr(), pointer_to(ptr).cast::<u8>(), bytes.len()) };
        Ok(())
    }
}

/// `InvalidValue` unless the whole range is pinned.
pub(crate) fn check_pinned(site: Site<'_>, pinned: &HeldRanges<'_, Pinned>, ptr: HostPtr, bytes: u64) -> Result<()> {
    match pinned.containing(ptr.0, bytes) {
        Some(_) => Ok(()),
        None => Err(site.explain(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not pinned"))),
    }
}

/// The address as a pointer. Following it is the caller's business.
pub(crate) fn pointer_to(ptr: HostPtr) -> *mut c_void {
    ptr::with_exposed_provenance_mut(ptr.0 as usize)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use warpool_driver::HostPages;

    use super::*;
    use crate::api::Api;
    use crate::fake::{self, DEVICE};

    thread_local! {
        /// What CUDA says to registering and unregistering on this thread.
        static ANSWER: Cell<u32> = const { Cell::new(0) };
    }

    extern "C" fn register(_: *mut c_void, _: usize, _: c_uint) -> u32 {
        ANSWER.get()
    }

    extern "C" fn unregister(_: *mut c_void) -> u32 {
        ANSWER.get()
    }

    #[test]
    fn pages_stay_until_cuda_has_let_them_go() {
        let driver =
            fake::driver_with(Api { mem_host_register: register, mem_host_unregister: unregister, ..fake::api() });
        let pages = HostPages::map(4096, false).expect("a page");
        let (ptr, alive) = (pages.ptr(), Arc::downgrade(&pages));
        let register = || driver.host_register(DEVICE, HostRange::of_pages(&pages), HostOptions::default());

        ANSWER.set(2);
        assert_eq!(register().map_err(|error| error.code), Err(ErrorCode::OutOfMemory));
        assert_eq!(alive.strong_count(), 1, "a failed registration keeps nothing");
        ANSWER.set(0);
        assert_eq!(register(), Ok(()));
        assert_eq!(register().map_err(|error| error.code), Err(ErrorCode::HostMemoryAlreadyRegistered));

        ANSWER.set(1);
        assert!(driver.host_unregister(ptr).is_err());
        assert_eq!(alive.strong_count(), 2, "CUDA still has them");
        assert_eq!(driver.host_read(ptr, &mut [0; 16]), Ok(()));
        ANSWER.set(0);
        assert_eq!(driver.host_unregister(ptr), Ok(()));
        assert_eq!(alive.strong_count(), 1);

        assert_eq!(register(), Ok(()));
        drop(pages);
        drop(driver);
        assert_eq!(alive.strong_count(), 1, "CUDA still has them, though nobody can tell it so any more");
    }

    #[test]
    fn options_become_cudas_flags() {
        assert_eq!(flags(HostOptions::default()), 3);
        assert_eq!(flags(HostOptions { portable: false, mapped: false, write_combined: true }), 4);
    }
}
