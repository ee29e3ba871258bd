//! What windows in a run of free addresses need at least, without a look at every slot: most runs then need none.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Wanted;
use crate::memory::paged::heap::FreeRun;

/// Driver calls, pages, and an address: no window of a run has less, in this order.
pub(super) type Least = (u32, u32, u64);

/// So many runs are looked at before more is found out about the others. In tests there are few.
const LOOKED_AT_FIRST: usize = if cfg!(test) { 1 } else { 4 };

/// The runs that are still to be looked at.
pub(super) struct Bounds<'a> {
    wanted: Wanted<'a>,
    /// What each needs at least, and its position among all runs.
    left: BinaryHeap<Reverse<(Least, usize)>>,
    looked_at: usize,
}

impl<'a> Bounds<'a> {
    pub(super) fn new(wanted: Wanted<'a>) -> Self {
        let least = |run: &FreeRun| (0, least_pages(wanted, run), run.start);
        Self { wanted, left: wanted.runs.iter().map(least).zip(0..).map(Reverse).collect(), looked_at: 0 }
    }

    /// Nothing is known of the runs: all are looked at.
    pub(super) fn unknown(wanted: Wanted<'a>) -> Self {
        let left = (0..wanted.runs.len()).map(|position| Reverse(((0, 0, 0), position))).collect();
        Self { wanted, left, looked_at: 0 }
    }

    /// The run that could be the best of those that are left, if it could have a window that needs less than the best
    /// so far.
    pub(super) fn next_below(&mut self, best: Option<Least>) -> Option<&'a FreeRun> {
        if self.looked_at == LOOKED_AT_FIRST && best.is_some_and(|(calls, ..)| calls > 0) {
            self.raise();
        }
        self.looked_at += 1;
        let Reverse((least, position)) = self.left.pop()?;
        best.is_none_or(|best| least < best).then(|| self.wanted.runs.get(position))
    }

    /// Finds out how many driver calls windows of the runs need at least: every page that they need is mapped, unless
    /// it is one that may be taken back.
    fn raise(&mut self) {
        let Wanted { table, runs, takeable, .. } = self.wanted;
        let mut taken_back = vec![0; runs.len()];
        for page in takeable.iter().map(|page| table.page(page)) {
            for &slot in page.mapped.iter().filter(|&&slot| page.home != Some(slot)) {
                // All slots of a page that does not belong there are in holes, side by side.
                if let Some(position) = runs.position_at(table.addr(slot)) {
                    taken_back[position] += page.slots;
                }
            }
        }
        let raised = |Reverse(((_, pages, start), position)): Reverse<(Least, usize)>| {
            Reverse(((pages.saturating_sub(taken_back[position]), pages, start), position))
        };
        self.left = self.left.drain().map(raised).collect();
    }
}

/// No window of the run needs fewer pages: as many slots as it has outside of its holes have one.
fn least_pages(wanted: Wanted<'_>, run: &FreeRun) -> u32 {
    let holes: u64 = wanted.runs.holes_of(run).iter().map(|hole| hole.end - hole.start).sum();
    let in_holes = wanted.bytes.saturating_sub(run.end - run.start - holes);
    u32::try_from(in_holes.div_ceil(wanted.table.slot_bytes)).unwrap_or(u32::MAX)
}
