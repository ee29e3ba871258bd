//! Where a request goes that no free block can hold: the window of free addresses of least cost. The cost of a window
//! is its driver calls, plus [`SLOT_WORTH`] for each slot that nothing else is in; of equal ones, the window that needs
//! the fewest pages, then the lowest. For a request that would otherwise fail the slots count before the calls.
//!
//! A slot that nothing else is in counts whether or not its page is free: the page could be taken elsewhere. What is
//! free beside other blocks in a slot can be used nowhere else.
//!
//! In some of the addresses pages may be mapped that were taken from there. A page that is free elsewhere is taken
//! back; a mapping of one that is in use is undone, if the stream has passed. Addresses that were never used need no
//! such call, so old mappings are left for as long as there are others: a program that comes back to the same sizes
//! finds its pages there.

mod costs;
mod scratch;

use self::costs::{Costs, Sums};
use super::heap::FreeRuns;
use super::page_set::PageSet;
use super::pages::PageTable;

/// Free addresses that are to be filled with pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Where the block will be.
    pub(super) addr: u64,
    /// What of the run is filled: the block, and in holes whole slots.
    pub(super) start: u64,
    pub(super) end: u64,
    /// The number of its range.
    pub(super) range: u32,
    /// The first block of its run.
    pub(super) anchor: u32,
}

/// What a search keeps from one to the next, for its memory.
#[derive(Debug, Default)]
pub(super) struct Search {
    sums: Sums,
}

/// How many driver calls a slot is worth that nothing else is in.
const SLOT_WORTH: u32 = 8;

/// A search: for what, and where.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) table: &'a PageTable,
    /// Where it may be.
    pub(super) runs: &'a FreeRuns,
    pub(super) bytes: u64,
    /// Holes are filled in units of so many slots.
    pub(super) unit: u32,
    /// Whether the slots that nothing else is in count before driver calls.
    pub(super) memory_first: bool,
    /// The pages that may be taken from where they belong.
    pub(super) takeable: &'a PageSet,
}

impl Search {
    #[inline(never)]
    pub(super) fn choose(&mut self, wanted: Wanted<'_>) -> Option<Window> {
        let mut best: Option<((u32, u32, u64), Window)> = None;
        for run in wanted.runs.iter() {
            let costs = Costs::new(wanted, run, &mut self.sums);
            costs.candidates(|candidate, cursor| {
                let Some(fit) = costs.fit(candidate, cursor) else { return };
                let slots = costs.whole_slots(&fit);
                let (first, second) = if wanted.memory_first {
                    (slots, fit.calls)
                } else {
                    (fit.calls.saturating_add(SLOT_WORTH.saturating_mul(slots)), fit.pages)
                };
                let key = (first, second, candidate.addr);
                if best.is_none_or(|(other, _)| key < other) && !costs.cuts_page(&fit) {
                    best = Some((key, costs.window(candidate, &fit)));
                }
            });
        }
        best.map(|(_, window)| window)
    }
}
