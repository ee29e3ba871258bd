//! Host memory to be pinned in place: pages mapped for that purpose, and ranges whose owner keeps them valid.
//!
//! Pinning itself is the driver's ([`crate::HostMemory::host_register`]). The invariant here: while a driver has pages
//! pinned they stay mapped, and no other driver pins them, whatever their owner does.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io, thread};

use crate::HostPtr;
use crate::platform::Mapping;

/// The page size that sizes are rounded to. Where the system's pages are larger, some are touched more than once.
const PAGE: u64 = 4096;

/// The size of a huge page. Each thread prefaults whole huge pages, so that no two threads fault in the same page.
const HUGE: u64 = 2 << 20;

/// Page-aligned, zeroed memory of this process that can be pinned in place.
///
/// It gives no references to its contents: the host accesses it through the driver that pinned it, or through raw
/// pointers (its provenance is exposed). It is unmapped once its owner and the driver have dropped it.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool_driver::sim::{SimConfig, SimDriver};
/// use warpool_driver::{ClaimedRange, DeviceId, HostMemory, HostOptions, HostPages, HostRange};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let gpu = SimDriver::new(SimConfig::default());
/// let pages = HostPages::map(2 << 20, true)?;
/// pages.prefault(4); // by four threads
/// gpu.host_register(DeviceId(0), HostRange::of_pages(&pages), HostOptions::default())?;
///
/// // A driver claims what it pins, and nobody else can until it drops that.
/// let refused: Option<ClaimedRange> = HostRange::of_pages(&pages).claim();
/// assert!(refused.is_none());
/// gpu.host_unregister(pages.ptr())?;
/// # Ok(())
/// # }
/// ```
pub struct HostPages {
    /// The whole mapping: with huge pages longer than the pages, so that they can be aligned.
    map: Mapping,
    /// Where the pages begin in the mapping.
    offset: usize,
    bytes: u64,
    /// Whether a driver has claimed them. Locked while pages are prefaulted, so that none claims them meanwhile.
    claimed: Mutex<bool>,
}

impl HostPages {
    /// Maps `bytes` bytes, rounded up to whole pages. No page is touched, so the system provides no memory yet.
    ///
    /// With `huge` they are aligned to 2 MiB and huge pages are requested from the system, which are faster to touch
    /// and to pin. It is not an error if the system has none.
    ///
    /// # Errors
    /// `InvalidInput` for 0 bytes or more than the address space; otherwise the system's error.
    pub fn map(bytes: u64, huge: bool) -> io::Result<Arc<Self>> {
        let align = if huge { HUGE } else { PAGE };
        let bytes = bytes.checked_next_multiple_of(PAGE).filter(|&bytes| bytes > 0);
        // The system aligns to its own page size, so more is mapped to align to ours. Untouched, it costs nothing.
        let mapped = bytes.and_then(|bytes| bytes.checked_add(align - PAGE));
        let mapped =
            mapped.and_then(|mapped| usize::try_from(mapped).ok()).filter(|&mapped| isize::try_from(mapped).is_ok());
        let (Some(bytes), Some(mapped)) = (bytes, mapped) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let map = Mapping::new(mapped)?;
        let address = map.as_mut_ptr().expose_provenance();
        let offset = address.next_multiple_of(align as usize) - address;
        let pages = Self { map, offset, bytes, claimed: Mutex::new(false) };
        if huge {
            pages.map.advise_huge(pages.offset, pages.bytes as usize);
        }
        Ok(Arc::new(pages))
    }

    /// Makes the system provide all the memory now, with `threads` threads, the caller's included. Pinning is much
    /// faster afterwards.
    ///
    /// The contents do not change. Does nothing while a driver has the pages pinned, since they are resident then. If
    /// the system does not have the memory, pinning will fail.
    pub fn prefault(&self, threads: usize) {
        let claimed = self.lock();
        if *claimed {
            return;
        }
        let share = self.bytes.div_ceil(threads.max(1) as u64).next_multiple_of(HUGE);
        thread::scope(|scope| {
            let mut shares = (0..self.bytes).step_by(share as usize).map(|from| (from, share.min(self.bytes - from)));
            let own = shares.next();
            for (from, bytes) in shares {
                // If no thread can be started, this one does its share.
                if thread::Builder::new().spawn_scoped(scope, move || self.touch(from, bytes)).is_err() {
                    self.touch(from, bytes);
                }
            }
            if let Some((from, bytes)) = own {
                self.touch(from, bytes);
            }
        });
    }

    /// The address.
    #[must_use]
    pub fn ptr(&self) -> HostPtr {
        HostPtr((self.map.as_mut_ptr().addr() + self.offset) as u64)
    }

    /// The size: whole pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Touches one thread's share: writes back a byte of each page. Only while `claimed` is locked and false.
    ///
    /// `MADV_POPULATE_WRITE` over the whole share would do the same, but no other thread can be started until it is
    /// done, since its stack must be mapped. For 64 MiB and eight threads on the host of an H200 it took 5.4 ms, this
    /// 2.0 ms (measured with a small program that is not part of the repository).
    fn touch(&self, from: u64, bytes: u64) {
        for offset in (from..from + bytes).step_by(PAGE as usize) {
            // SAFETY: the offset is within the pages, which are within the mapping.
            let byte = unsafe { self.map.as_mut_ptr().add(self.offset + offset as usize) };
            // SAFETY: the byte is mapped and only this thread accesses it: there are no references to pages, shares do
            // not overlap, and no driver has the pages or can claim them before `claimed` is unlocked.
            let value = unsafe { byte.read_volatile() };
            // SAFETY: as above. Volatile, so that the write is not optimised away.
            unsafe { byte.write_volatile(value) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for HostPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPages({}, {} bytes)", self.ptr(), self.bytes)
    }
}

/// A range of host memory that its owner keeps valid, so that it can be pinned in place.
#[derive(Clone, Debug)]
pub struct HostRange {
    ptr: HostPtr,
    bytes: u64,
    /// The pages that it consists of; `None` where the caller of [`HostRange::new`] guarantees the memory.
    pages: Option<Arc<HostPages>>,
}

impl HostRange {
    /// `bytes` bytes at `ptr`.
    ///
    /// # Safety
    /// The range must be readable and writable memory of this process, and stay so until it has been unregistered from
    /// every driver that it was registered with. The pointer that the address was taken from must allow writing, and
    /// its provenance must be exposed (`expose_provenance`, or an `as` cast). While the range is registered there may
    /// be no Rust reference into it across a call that lets the device access it.
    #[must_use]
    pub const unsafe fn new(ptr: HostPtr, bytes: u64) -> Self {
        Self { ptr, bytes, pages: None }
    }

    /// All of these pages. Safe: a driver keeps them mapped while it has them pinned.
    #[must_use]
    pub fn of_pages(pages: &Arc<HostPages>) -> Self {
        Self { ptr: pages.ptr(), bytes: pages.bytes(), pages: Some(Arc::clone(pages)) }
    }

    /// The address.
    #[must_use]
    pub const fn ptr(&self) -> HostPtr {
        self.ptr
    }

    /// The size.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// For drivers: claims the memory in order to pin it. `None` if another driver has claimed its pages.
    #[must_use]
    pub fn claim(&self) -> Option<ClaimedRange> {
        if let Some(pages) = &self.pages {
            let mut claimed = pages.lock();
            if *claimed {
                return None;
            }
            *claimed = true;
        }
        Some(ClaimedRange(self.clone()))
    }
}

/// A range that a driver has pinned, or is about to pin. Until this is dropped its pages stay mapped, and no other
/// driver can claim them.
///
/// A driver drops it once the range is unpinned, not before: not if unpinning failed, and not when the driver object is
/// dropped while the system below still has the range pinned.
#[derive(Debug)]
pub struct ClaimedRange(HostRange);

impl ClaimedRange {
    /// The address.
    #[must_use]
    pub const fn ptr(&self) -> HostPtr {
        self.0.ptr
    }

    /// The size.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.0.bytes
    }
}

impl Drop for ClaimedRange {
    fn drop(&mut self) {
        if let Some(pages) = &self.0.pages {
            *pages.lock() = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The byte at `offset`, as a driver would access it.
    fn byte(pages: &HostPages, offset: u64) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut((pages.ptr().0 + offset) as usize)
    }

    #[test]
    fn pages_are_whole_aligned_and_zero() {
        for (requested, huge, bytes, align) in [
            (1, false, 4096, 4096),
            (4096, false, 4096, 4096),
            (4097, true, 8192, HUGE),
            (5 << 20, true, 5 << 20, HUGE),
        ] {
            let pages = HostPages::map(requested, huge).expect("a few megabytes");
            assert_eq!((pages.bytes(), pages.ptr().0 % align), (bytes, 0), "{requested} bytes");
            // SAFETY: the last byte is mapped, and nothing else accesses it.
            assert_eq!(unsafe { byte(&pages, bytes - 1).read() }, 0, "{requested} bytes");
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for bytes in [0, u64::MAX, u64::MAX - 4095, 1 << 63, i64::MAX as u64 - 4095] {
            assert!(HostPages::map(bytes, true).is_err(), "{bytes} bytes");
        }
    }

    /// How many bytes the system has provided memory for.
    #[cfg(target_os = "linux")]
    fn bytes_present(pages: &HostPages) -> u64 {
        use std::io::{Read, Seek, SeekFrom};
        // One number per page of this process; its highest bit says whether the page is present.
        let mut map = std::fs::File::open("/proc/self/pagemap").expect("Linux has it");
        map.seek(SeekFrom::Start(pages.ptr().0 / PAGE * 8)).expect("a file");
        let mut entries = vec![0; (pages.bytes / PAGE * 8) as usize];
        map.read_exact(&mut entries).expect("every page has an entry");
        entries.chunks_exact(8).filter(|entry| entry[7] >> 7 == 1).count() as u64 * PAGE
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "reads /proc/self/pagemap, which only the real system has")]
    fn prefaulted_pages_are_present() {
        for threads in [0, 1, 3] {
            for huge in [false, true] {
                let bytes = (9 << 20) + 4096;
                let pages = HostPages::map(bytes, huge).expect("nine megabytes");
                assert_eq!(bytes_present(&pages), 0, "{threads} threads, huge: {huge}");
                pages.prefault(threads);
                assert_eq!(bytes_present(&pages), bytes, "{threads} threads, huge: {huge}");
            }
        }
    }

    #[test]
    fn prefaulting_changes_no_contents() {
        let bytes = if cfg!(miri) { 5 * 4096 } else { 7 << 20 };
        for threads in [1, 2, 7, 10_000] {
            let pages = HostPages::map(bytes, true).expect("a few megabytes");
            for offset in (0..bytes).step_by(4096) {
                // SAFETY: the byte is mapped, and nothing else accesses it.
                unsafe { byte(&pages, offset).write((offset >> 12) as u8 | 1) };
            }
            pages.prefault(threads);
            for offset in (0..bytes).step_by(4096) {
                // SAFETY: as above.
                assert_eq!(unsafe { byte(&pages, offset).read() }, (offset >> 12) as u8 | 1, "{threads} threads");
            }
        }
    }

    #[test]
    fn pages_have_one_claim_and_outlive_their_owner() {
        let pages = HostPages::map(4096, false).expect("a page");
        let alive = Arc::downgrade(&pages);
        let range = HostRange::of_pages(&pages);
        let claimed = range.claim().expect("not claimed yet");
        assert!(range.claim().is_none() && HostRange::of_pages(&pages).claim().is_none());
        pages.prefault(1);
        drop(claimed);
        let claimed = HostRange::of_pages(&pages).claim().expect("not claimed any more");
        drop((pages, range));
        assert!(alive.upgrade().is_some());
        drop(claimed);
        assert!(alive.upgrade().is_none());
    }
}
