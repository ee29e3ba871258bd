//! Where a request goes that no free block can hold: the window of free addresses that needs the fewest driver calls;
//! of those, the one that needs the fewest further pages; of those, the lowest. Once much is lost in free parts of
//! pages, a slot of memory is worth some calls: then few calls count, and few slots that nothing else is in.
//!
//! For a request that would run out of memory otherwise, or would need new pages, it is the window that leaves most for
//! others: the one with the fewest slots that nothing else is in. A page that is free within the window is no gain
//! then, since it could be taken to another one; what is free beside other blocks in a slot can be used nowhere else.
//!
//! If only large pages are free, it is the window that needs the fewest driver calls of those without gaps that these
//! do not fit into.
//!
//! In some of the addresses pages may be mapped that were taken from there. A page that is free elsewhere is taken
//! back; a mapping of one that is in use is undone, if the stream has passed. Addresses that were never used need no
//! such call, so old mappings are left for as long as there are others: a program that comes back to the same sizes
//! finds its pages there.

mod bounds;
mod costs;
mod scratch;

use self::bounds::{Bounds, BoundsMemory, Least};
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
    bounds: BoundsMemory,
}

/// Memory counts before driver calls.
pub(super) const MEMORY_FIRST: u32 = u32::MAX;

/// A search: for what, and where.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) table: &'a PageTable,
    /// Where it may be.
    pub(super) runs: &'a FreeRuns,
    pub(super) bytes: u64,
    /// Holes are filled in units of so many slots.
    pub(super) unit: u32,
    /// How many driver calls a slot is worth that nothing else is in; [`MEMORY_FIRST`]: more than all.
    pub(super) slot_worth: u32,
    /// Every gap, which is a row of slots that pages have to be got for, has a multiple of so many slots.
    pub(super) gap_slots: u32,
    /// The pages that may be taken from where they belong.
    pub(super) takeable: &'a PageSet,
}

impl Search {
    #[inline(never)]
    pub(super) fn choose(&mut self, wanted: Wanted<'_>) -> Option<Window> {
        // If memory counts, pages in free blocks count too; if gaps count, it can be any run.
        let chosen = self.best_of(wanted, wanted.slot_worth == 0 && wanted.gap_slots == 1);
        #[cfg(test)]
        assert_eq!(chosen, self.best_of(wanted, false), "a better one is in a run not looked at");
        chosen
    }

    fn best_of(&mut self, wanted: Wanted<'_>, has_bounds: bool) -> Option<Window> {
        let memory = &mut self.bounds;
        let mut bounds = if has_bounds { Bounds::new(wanted, memory) } else { Bounds::unknown(wanted, memory) };
        let mut best: Option<(Least, Window)> = None;
        while let Some(run) = bounds.next_below(best.map(|(least, _)| least)) {
            let costs = Costs::new(wanted, run, &mut self.sums);
            costs.candidates(|candidate, cursor| {
                let Some(fit) = costs.fit(candidate, cursor) else { return };
                let (first, second) = match wanted.slot_worth {
                    0 => (fit.calls, fit.pages),
                    MEMORY_FIRST => (costs.whole_slots(&fit), fit.calls),
                    worth => (fit.calls + worth * costs.whole_slots(&fit), fit.pages),
                };
                let key = (first, second, candidate.addr);
                if best.is_none_or(|(other, _)| key < other) && !costs.cuts_page(&fit) && costs.gaps_fit(&fit, wanted) {
                    best = Some((key, costs.window(candidate, &fit)));
                }
            });
        }
        best.map(|(_, window)| window)
    }
}
