//! The contents of simulated memory. Device memory exists page by page, once written; pinned memory is real memory of
//! this process. The simulation's unsafe code is here: reading and writing pinned host memory.

use std::ptr::{self, NonNull};

use rustc_hash::FxHashMap;

use crate::ClaimedRange;
use crate::platform::Mapping;

const PAGE: usize = 4096;

/// Where memory keeps its contents.
#[derive(Debug)]
pub enum Bytes {
    /// Device memory: the pages that were written. What was not reads as the byte of fresh memory.
    Pages(FxHashMap<u64, Box<[u8; PAGE]>>, u8),
    /// Pinned host memory.
    Host(HostBytes),
}

impl Bytes {
    /// Device memory that contains `fresh` in every byte.
    pub fn device(fresh: u8) -> Self {
        Self::Pages(FxHashMap::default(), fresh)
    }

    pub fn read(&self, offset: u64, into: &mut [u8]) {
        match self {
            Self::Host(host) => host.read(offset, into),
            Self::Pages(pages, fresh) => {
                for_each_page(offset, into.len(), |page, at, range| match pages.get(&page) {
                    Some(bytes) => into[range.clone()].copy_from_slice(&bytes[at..at + range.len()]),
                    None => into[range].fill(*fresh),
                });
            }
        }
    }

    pub fn write(&mut self, offset: u64, from: &[u8]) {
        match self {
            Self::Host(host) => host.write(offset, from),
            Self::Pages(pages, fresh) => for_each_page(offset, from.len(), |page, at, range| {
                let bytes = pages.entry(page).or_insert_with(|| Box::new([*fresh; PAGE]));
                bytes[at..at + range.len()].copy_from_slice(&from[range]);
            }),
        }
    }
}

/// Visits the pages of a range: the page, the offset in it, and the part of the range.
fn for_each_page(offset: u64, len: usize, mut visit: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let here = offset + done as u64;
        let at = (here % PAGE as u64) as usize;
        let n = (PAGE - at).min(len - done);
        visit(here / PAGE as u64, at, done..done + n);
        done += n;
    }
}

/// Pinned host memory: mapped here, or registered by the caller, who keeps it valid ([`crate::HostRange`]).
///
/// It is only accessed through the raw pointer, never by reference: host code may hold pointers into it too.
#[derive(Debug)]
pub struct HostBytes {
    start: NonNull<u8>,
    bytes: u64,
    /// Keeps the memory valid while it is pinned.
    _owner: Owner,
}

// SAFETY: the memory is valid until `_owner` is dropped, on whichever thread this is, and this type accesses it only
// through `&self` (reads) and `&mut self` (writes). Accesses of host code through pointers of its own are that code's
// responsibility, as with memory that a device writes.
unsafe impl Send for HostBytes {}

#[derive(Debug)]
enum Owner {
    Mapped(#[expect(dead_code, reason = "held until the memory is unpinned")] Mapping),
    Registered(#[expect(dead_code, reason = "held until the memory is unpinned")] ClaimedRange),
}

impl HostBytes {
    /// Maps zeroed memory, aligned to a page. The system provides a page when it is first accessed, so an allocation
    /// takes no memory before it is used. (The global allocator would write zeros to memory that it has had before.)
    /// `None` if the host does not have that much.
    pub fn allocate(bytes: u64) -> Option<Self> {
        let size = usize::try_from(bytes).ok().filter(|&size| size <= isize::MAX as usize)?;
        let map = Mapping::new(size).ok()?;
        let start = NonNull::new(map.as_mut_ptr())?;
        // Host code makes pointers of the address, as it does with real pinned memory.
        start.as_ptr().expose_provenance();
        Some(Self { start, bytes, _owner: Owner::Mapped(map) })
    }

    /// The caller's memory, pinned in place.
    pub fn registered(range: ClaimedRange) -> Self {
        let start = ptr::with_exposed_provenance_mut::<u8>(range.ptr().0 as usize);
        let start = NonNull::new(start).expect("host memory is not at address 0");
        Self { start, bytes: range.bytes(), _owner: Owner::Registered(range) }
    }

    /// The address.
    pub fn start(&self) -> u64 {
        self.start.addr().get() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: `at` checked that the range lies in this memory, which `_owner` keeps valid. The target is a Rust
        // slice, so it does not overlap memory that is only reached through raw pointers.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: as in `read`. `start` may be written through: it comes from a writable mapping, or from a range that
        // was promised to be writable and exposed (`HostRange`).
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) }
    }

    /// The address of `len` bytes at `offset`.
    fn at(&self, offset: u64, len: usize) -> NonNull<u8> {
        let end = offset.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "{len} bytes at {offset} are outside {} bytes", self.bytes);
        // SAFETY: the offset is within the memory at `start`, which is `bytes` long.
        unsafe { self.start.add(offset as usize) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostPages, HostRange};

    fn registered(bytes: u64) -> HostBytes {
        let pages = HostPages::map(bytes, false).expect("a few pages");
        HostBytes::registered(HostRange::of_pages(&pages).claim().expect("not claimed yet"))
    }

    #[test]
    fn contents_survive_across_pages_and_unwritten_bytes_are_zero() {
        let data: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
        let allocated = HostBytes::allocate(1 << 16).expect("64 KiB");
        for mut bytes in [Bytes::device(0), Bytes::Host(allocated), Bytes::Host(registered(1 << 16))] {
            bytes.write(4_000, &data);
            let mut back = vec![9; 10_010];
            bytes.read(3_995, &mut back);
            assert_eq!(back[..5], [0; 5]);
            assert_eq!(back[5..10_005], data);
            assert_eq!(back[10_005..], [0; 5]);
        }
    }

    #[test]
    fn allocated_host_memory_is_page_aligned_and_shared_with_host_code() {
        let mut bytes = HostBytes::allocate(4096).expect("a page");
        assert_eq!(bytes.start() % PAGE as u64, 0);
        let host = ptr::with_exposed_provenance_mut::<u8>(bytes.start() as usize);
        // SAFETY: the memory is allocated, and no other access is under way.
        unsafe { host.write(7) };
        let mut back = [0];
        bytes.read(0, &mut back);
        assert_eq!(back, [7]);
        bytes.write(0, &[8]);
        // SAFETY: as above.
        assert_eq!(unsafe { host.read() }, 8);
    }

    #[test]
    #[should_panic(expected = "are outside")]
    fn access_beyond_the_end_is_an_assertion() {
        HostBytes::allocate(16).expect("16 bytes").read(10, &mut [0; 7]);
    }
}
