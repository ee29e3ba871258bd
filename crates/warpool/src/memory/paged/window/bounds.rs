//! What windows in a run of free addresses need at least, without sums over its slots: most runs then need none.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Wanted;
use super::costs::{index, used_slots};
use crate::memory::paged::heap::FreeRun;
use crate::memory::paged::slot::{Mapping, SlotState};

/// Driver calls, pages, and an address: no window of a run has less, in this order.
pub(super) type Least = (u32, u32, u64);

/// The runs that are still to be looked at.
pub(super) struct Bounds<'a> {
    wanted: Wanted<'a>,
    /// What each needs at least, and its position among all runs.
    left: BinaryHeap<Reverse<(Least, usize)>>,
    /// Whether anything is known of them.
    are_known: bool,
}

impl<'a> Bounds<'a> {
    pub(super) fn new(wanted: Wanted<'a>) -> Self {
        let least = |run: &FreeRun| (0, least_pages(wanted, run), run.start);
        let left = wanted.runs.iter().map(least).zip(0..).map(Reverse).collect();
        Self { wanted, left, are_known: true }
    }

    /// Nothing is known of the runs: all are looked at.
    pub(super) fn unknown(wanted: Wanted<'a>) -> Self {
        let left = (0..wanted.runs.len()).map(|position| Reverse(((0, 0, 0), position))).collect();
        Self { wanted, left, are_known: false }
    }

    /// The run that could be the best of those that are left, if it could have a window that needs less than the best
    /// so far.
    pub(super) fn next_below(&mut self, best: Option<Least>) -> Option<&'a FreeRun> {
        while let Some(Reverse((least, position))) = self.left.pop() {
            let run = self.wanted.runs.get(position);
            let Some(best) = best.filter(|_| self.are_known) else { return Some(run) };
            if least >= best {
                return None;
            }
            let (_, pages, start) = least;
            if (self.least_calls(run, pages), pages, start) < best {
                return Some(run);
            }
        }
        None
    }

    /// How many driver calls windows of a run need at least: every page that they need is mapped, unless it is one that
    /// may be taken back.
    fn least_calls(&self, run: &FreeRun, pages: u32) -> u32 {
        let Wanted { table, runs, takeable, .. } = self.wanted;
        let (slots, base) = (table.slots(run.range), table.range(run.range).base);
        let is_takeable =
            |state: &SlotState| matches!(state.mapping, Mapping::Page(part) if takeable.contains(part.page));
        let mut needed = pages;
        for hole in runs.holes_of(run) {
            let [first, behind] = [hole.start, hole.end].map(|addr| index(base, table.slot_bytes, addr));
            let takeable: u32 =
                used_slots(slots, first, behind).iter().map(|state| u32::from(is_takeable(state))).sum();
            needed = needed.saturating_sub(takeable);
            if needed == 0 {
                break;
            }
        }
        needed
    }
}

/// No window of the run needs fewer pages: as many slots as it has outside of its holes have one.
fn least_pages(wanted: Wanted<'_>, run: &FreeRun) -> u32 {
    let holes: u64 = wanted.runs.holes_of(run).iter().map(|hole| hole.end - hole.start).sum();
    let in_holes = wanted.bytes.saturating_sub(run.end - run.start - holes);
    u32::try_from(in_holes.div_ceil(wanted.table.slot_bytes)).unwrap_or(u32::MAX)
}
