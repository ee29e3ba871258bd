//! What a request for pages (`fill/`) works with. Kept from one to the next: allocating it took a tenth of a request.

use std::ops::Range;

use super::heap::{FreeBlock, FreeRuns};
use super::page_set::{PageId, PageSet};
use super::slot::Slot;
use super::supply::Supply;
use super::window::Search;

#[derive(Debug, Default)]
pub(super) struct FillMemory {
    pub(super) search: Search,
    /// Where the window may be.
    pub(super) runs: FreeRuns,
    /// The pages that may be taken for it.
    pub(super) takeable: PageSet,
    /// Those of them that are in free blocks of other heaps.
    pub(super) free_elsewhere: PageSet,
    /// Those that are taken back.
    pub(super) taken_back: PageSet,
    pub(super) take_lists: TakeLists,
    /// What the window is filled with.
    pub(super) supply: Supply,
    /// Old mappings in the window, and where their pages belong.
    pub(super) old: Vec<(Slot, PageId)>,
    pub(super) wanted: Vec<InHeap>,
    /// Free blocks with those pages, and which they are.
    pub(super) wanted_in: Vec<(u32, Range<usize>)>,
}

/// For taking pages from free blocks.
#[derive(Debug, Default)]
pub(super) struct TakeLists {
    pub(super) blocks: Vec<FreeBlock>,
    /// Those that are wholly in a block.
    pub(super) pages: Vec<(Slot, PageId)>,
    /// Those of them that are taken.
    pub(super) taken: Vec<(Slot, PageId)>,
}

/// A page that belongs to a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct InHeap {
    pub(super) heap: u32,
    pub(super) home: Slot,
    pub(super) page: PageId,
}
