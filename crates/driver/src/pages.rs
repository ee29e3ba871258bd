//! Memory of this process that is to be pinned where it is: pages made for that, and ranges that somebody else keeps.
//!
//! Not the pinning: a driver does that ([`crate::HostMemory::host_register`]). The rule kept here: pages stay mapped,
//! and belong to one driver at a time, for as long as a driver has them pinned, whatever their owner does meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io, ptr, thread};

use memmap2::{MmapOptions, MmapRaw};

use crate::HostPtr;

/// The pages that are counted in. Where the system's are larger, some are touched more than once.
const PAGE: u64 = 4096;

/// A huge page, and how shares of several threads are cut: two threads never fault in the same one.
const HUGE: u64 = 2 << 20;

/// Page-aligned memory of this process, zeroed, which was made to be pinned where it is.
///
/// Nobody here gives references into it: the host reads and writes it through the driver that pinned it.
/// It is unmapped when nobody has it any more, neither its owner nor a driver.
pub struct HostPages {
    /// Everything that was mapped: with huge pages, more than the pages, so that they can be aligned.
    map: MmapRaw,
    start: u64,
    bytes: u64,
    /// Whether a driver has pinned it. Locked while pages are touched, so that nobody pins and uses them meanwhile.
    claimed: Mutex<bool>,
}

impl HostPages {
    /// Maps `bytes` bytes, up to whole pages. Nothing is touched, so the system gives no memory yet.
    ///
    /// With `huge` they are aligned to 2 MiB and the system is asked for huge pages, which are faster to touch and to
    /// pin. It may have none; that is not an error.
    ///
    /// # Errors
    /// `InvalidInput` for 0 bytes or more than there are addresses; else what the system says.
    pub fn map(bytes: u64, huge: bool) -> io::Result<Arc<Self>> {
        let align = if huge { HUGE } else { PAGE };
        let bytes = bytes.checked_next_multiple_of(PAGE).filter(|&bytes| bytes > 0);
        // The system aligns to its own pages, so what is missing to ours is mapped besides. Untouched, it costs
        // nothing.
        let mapped = bytes.and_then(|bytes| bytes.checked_add(align - PAGE));
        let mapped =
            mapped.and_then(|mapped| usize::try_from(mapped).ok()).filter(|&mapped| isize::try_from(mapped).is_ok());
        let (Some(bytes), Some(mapped)) = (bytes, mapped) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let map = MmapRaw::from(MmapOptions::new().len(mapped).map_anon()?);
        let start = (map.as_mut_ptr().expose_provenance() as u64).next_multiple_of(align);
        let pages = Self { map, start, bytes, claimed: Mutex::new(false) };
        if huge {
            // Best effort: a system without huge pages says so here, and gives small ones.
            let _ = pages.ask_for_huge();
        }
        Ok(Arc::new(pages))
    }

    /// Makes the system give all the memory now, by the work of `threads` threads, the caller's among them. Pinning it
    /// is much faster then.
    ///
    /// Contents stay as they are. While a driver has the pages pinned this does nothing: they are there then. It
    /// promises nothing: what the system does not have will be missed when a driver pins the pages, and the driver says
    /// so.
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
                // A thread that cannot be had is done without.
                if thread::Builder::new().spawn_scoped(scope, move || self.touch_share(from, bytes)).is_err() {
                    self.touch_share(from, bytes);
                }
            }
            if let Some((from, bytes)) = own {
                self.touch_share(from, bytes);
            }
        });
    }

    /// Where it starts.
    #[must_use]
    pub fn ptr(&self) -> HostPtr {
        HostPtr(self.start)
    }

    /// How long it is: whole pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Touches one thread's share by writing into each page the byte that is there. Only while `claimed` is locked and
    /// false.
    ///
    /// Not by asking the system for all of it at once (`MADV_POPULATE_WRITE`): until that is done no other thread can
    /// be started, since its stack has to be mapped. On an H200's host 64 MiB took eight threads 5.4 ms that way, and
    /// 2.0 ms this way, by a small program that is not kept here.
    fn touch_share(&self, from: u64, bytes: u64) {
        for offset in (from..from + bytes).step_by(PAGE as usize) {
            let byte = ptr::with_exposed_provenance_mut::<u8>((self.start + offset) as usize);
            // SAFETY: the byte is mapped, and only this thread has it: nobody gives references into pages, shares do
            // not overlap, and no driver has the pages, nor gets them before `claimed` is unlocked.
            let now = unsafe { byte.read_volatile() };
            // SAFETY: as above. Volatile, so that it is not left out.
            unsafe { byte.write_volatile(now) };
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    fn ask_for_huge(&self) -> io::Result<()> {
        let before = self.start - self.map.as_ptr().addr() as u64;
        self.map.advise_range(memmap2::Advice::HugePage, before as usize, self.bytes as usize)
    }

    #[cfg(not(all(target_os = "linux", not(miri))))]
    fn ask_for_huge(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for HostPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({}, {} bytes)", self.ptr(), self.bytes)
    }
}

/// A stretch of host memory that somebody keeps alive, so that it can be pinned where it is.
#[derive(Clone, Debug)]
pub struct HostRange {
    ptr: HostPtr,
    bytes: u64,
    /// The pages that it lies in; `None` where whoever made it vouches for the memory.
    pages: Option<Arc<HostPages>>,
}

impl HostRange {
    /// Names `bytes` bytes at `ptr`.
    ///
    /// # Safety
    /// The range must be readable and writable memory of this process and stay so until it has been
    /// unregistered from every driver that it was registered with, and while it is registered nobody may
    /// hold a Rust reference into it across a call that lets the device touch it.
    #[must_use]
    pub const unsafe fn new(ptr: HostPtr, bytes: u64) -> Self {
        Self { ptr, bytes, pages: None }
    }

    /// All of these pages. Nothing is to be promised: a driver keeps them mapped while it has them pinned.
    #[must_use]
    pub fn of_pages(pages: &Arc<HostPages>) -> Self {
        Self { ptr: pages.ptr(), bytes: pages.bytes(), pages: Some(Arc::clone(pages)) }
    }

    /// Where it starts.
    #[must_use]
    pub const fn ptr(&self) -> HostPtr {
        self.ptr
    }

    /// How long it is.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// For drivers: keeps the memory for one that is about to pin it. `None` if another driver has its pages.
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

/// A range that a driver has pinned, or is about to pin. Its pages stay mapped, and no other driver gets them, until
/// this is dropped.
///
/// A driver drops it once the range is unpinned, and not before: not if unpinning failed, and not because the driver
/// itself is dropped, if what it stands for has the range still pinned.
#[derive(Debug)]
pub struct ClaimedRange(HostRange);

impl ClaimedRange {
    /// Where it starts.
    #[must_use]
    pub const fn ptr(&self) -> HostPtr {
        self.0.ptr
    }

    /// Its size.
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

    /// What a driver would do with the byte at `offset`.
    fn byte(pages: &HostPages, offset: u64) -> *mut u8 {
        ptr::with_exposed_provenance_mut((pages.ptr().0 + offset) as usize)
    }

    #[test]
    fn pages_are_whole_aligned_and_zero() {
        for (asked, huge, bytes, align) in [
            (1, false, 4096, 4096),
            (4096, false, 4096, 4096),
            (4097, true, 8192, HUGE),
            (5 << 20, true, 5 << 20, HUGE),
        ] {
            let pages = HostPages::map(asked, huge).expect("a few megabytes");
            assert_eq!((pages.bytes(), pages.ptr().0 % align), (bytes, 0), "{asked} bytes");
            // SAFETY: the last byte is mapped, and nobody else uses it.
            assert_eq!(unsafe { byte(&pages, bytes - 1).read() }, 0, "{asked} bytes");
        }
    }

    #[test]
    fn what_cannot_be_mapped_is_an_error() {
        for bytes in [0, u64::MAX, u64::MAX - 4095, 1 << 63, i64::MAX as u64 - 4095] {
            assert!(HostPages::map(bytes, true).is_err(), "{bytes} bytes");
        }
    }

    /// How many bytes the system has given memory for.
    #[cfg(all(target_os = "linux", not(miri)))]
    fn bytes_there(pages: &HostPages) -> u64 {
        use std::io::{Read, Seek, SeekFrom};
        // One number per page of this process; the highest bit says whether it is there.
        let mut map = std::fs::File::open("/proc/self/pagemap").expect("Linux has it");
        map.seek(SeekFrom::Start(pages.start / PAGE * 8)).expect("a file");
        let mut entries = vec![0; (pages.bytes / PAGE * 8) as usize];
        map.read_exact(&mut entries).expect("every page has an entry");
        entries.chunks_exact(8).filter(|entry| entry[7] >> 7 == 1).count() as u64 * PAGE
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn touched_pages_are_there() {
        for threads in [0, 1, 3] {
            for huge in [false, true] {
                let bytes = (9 << 20) + 4096;
                let pages = HostPages::map(bytes, huge).expect("nine megabytes");
                assert_eq!(bytes_there(&pages), 0, "{threads} threads, huge: {huge}");
                pages.prefault(threads);
                assert_eq!(bytes_there(&pages), bytes, "{threads} threads, huge: {huge}");
            }
        }
    }

    #[test]
    fn touching_changes_nothing() {
        let bytes = if cfg!(miri) { 5 * 4096 } else { 7 << 20 };
        for threads in [1, 2, 7, 10_000] {
            let pages = HostPages::map(bytes, true).expect("a few megabytes");
            for offset in (0..bytes).step_by(4096) {
                // SAFETY: the byte is mapped, and nobody else uses it.
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
    fn pages_have_one_keeper_and_outlive_their_owner() {
        let pages = HostPages::map(4096, false).expect("a page");
        let alive = Arc::downgrade(&pages);
        let range = HostRange::of_pages(&pages);
        let claimed = range.claim().expect("nobody has them");
        assert!(range.claim().is_none() && HostRange::of_pages(&pages).claim().is_none());
        pages.prefault(1);
        drop(claimed);
        let claimed = HostRange::of_pages(&pages).claim().expect("nobody has them any more");
        drop((pages, range));
        assert!(alive.upgrade().is_some());
        drop(claimed);
        assert!(alive.upgrade().is_none());
    }
}
