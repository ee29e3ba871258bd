//! The bytes of simulated memory. Device memory exists page by page, once written; pinned memory is real memory of this
//! process. The only unsafe code of the simulated device is here: reading and writing host memory at addresses that
//! were pinned.

use rustc_hash::FxHashMap;

use crate::ClaimedRange;

const PAGE: usize = 4096;

/// Where a piece of memory keeps its contents.
#[derive(Debug)]
pub enum Bytes {
    /// Device memory: pages that were written; all others read as zero.
    Pages(FxHashMap<u64, Box<[u8; PAGE]>>),
    /// Pinned host memory that starts at this address.
    Host(HostBytes),
}

impl Bytes {
    pub fn device() -> Self {
        Self::Pages(FxHashMap::default())
    }

    pub fn read(&self, offset: u64, into: &mut [u8]) {
        match self {
            Self::Host(host) => host.read(offset, into),
            Self::Pages(pages) => {
                for_each_page(offset, into.len(), |page, at, range| match pages.get(&page) {
                    Some(bytes) => into[range.clone()].copy_from_slice(&bytes[at..at + range.len()]),
                    None => into[range].fill(0),
                });
            }
        }
    }

    pub fn write(&mut self, offset: u64, from: &[u8]) {
        match self {
            Self::Host(host) => host.write(offset, from),
            Self::Pages(pages) => for_each_page(offset, from.len(), |page, at, range| {
                let bytes = pages.entry(page).or_insert_with(|| Box::new([0; PAGE]));
                bytes[at..at + range.len()].copy_from_slice(&from[range]);
            }),
        }
    }
}

/// Walks over the pages that a range touches: the page, where in it, and which part of the range.
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

/// Host memory that is pinned: either ours, or somebody's who promised to keep it ([`crate::HostRange`]).
#[derive(Debug)]
pub struct HostBytes {
    start: u64,
    /// Keeps the memory for as long as it is pinned.
    _owner: Owner,
}

/// Whose memory is pinned.
#[derive(Debug)]
enum Owner {
    Ours(#[expect(dead_code, reason = "held, not read")] Vec<u8>),
    Theirs(#[expect(dead_code, reason = "held, not read")] ClaimedRange),
}

impl HostBytes {
    /// New memory, zeroed, aligned to a page. Nothing is touched, so a large piece costs nothing before it is used.
    pub fn allocate(bytes: u64) -> Option<Self> {
        let size = usize::try_from(bytes).ok()?.checked_add(PAGE)?;
        // Asked for first in a way that may fail; zeroed memory, which costs nothing, can only be had in one that
        // aborts.
        Vec::<u8>::new().try_reserve_exact(size).ok()?;
        let owned = vec![0; size];
        let start = (owned.as_ptr().expose_provenance() as u64).next_multiple_of(PAGE as u64);
        Some(Self { start, _owner: Owner::Ours(owned) })
    }

    /// Somebody's memory, pinned where it is.
    pub fn borrowed(range: ClaimedRange) -> Self {
        Self { start: range.ptr().0, _owner: Owner::Theirs(range) }
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let from = std::ptr::with_exposed_provenance::<u8>((self.start + offset) as usize);
        // SAFETY: callers check that the range lies in this pinned piece, which is either owned or kept by `self`, or
        // was promised to stay valid while it is pinned (`HostRange::new`). No reference into it exists on our side.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        let to = std::ptr::with_exposed_provenance_mut::<u8>((self.start + offset) as usize);
        // SAFETY: as in `read`; and the owned buffer is never read or written through the `Vec` again.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_across_pages_and_untouched_ones_are_zero() {
        let data: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
        for mut bytes in [Bytes::device(), Bytes::Host(HostBytes::allocate(1 << 20).expect("a megabyte"))] {
            bytes.write(4_000, &data);
            let mut back = vec![9; 10_010];
            bytes.read(3_995, &mut back);
            assert_eq!(back[..5], [0; 5]);
            assert_eq!(back[5..10_005], data);
            assert_eq!(back[10_005..], [0; 5]);
        }
    }
}
