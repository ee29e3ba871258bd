//! The pages that a window is filled with, and where in it each goes.

use super::ids::PageId;
use super::slot::Slot;

/// Slots of a window that have no page yet: neighbours.
#[derive(Clone, Copy, Debug)]
struct Gap {
    first: Slot,
    slots: u32,
}

/// A page that was got for a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Supplied {
    pub(super) page: PageId,
    /// The slot that it was taken from, if it belonged to one.
    pub(super) from: Option<Slot>,
    pub(super) to: Slot,
}

/// Pages that were got for a window, and the slots that still need some.
#[derive(Clone, Debug, Default)]
pub(super) struct Supply {
    gaps: Vec<Gap>,
    pub(super) pages: Vec<Supplied>,
    /// Those of them that are new.
    pub(super) created: Vec<PageId>,
    /// Free pages that are too large for the gaps and leave in exchange for those, and where they were taken from.
    pub(super) exchanged: Vec<(PageId, Option<Slot>)>,
    pub(super) slots_needed: u32,
}

impl Supply {
    /// For these slots, which are sorted. No page lies across a multiple of `unit` slots.
    pub(super) fn new(slots: impl Iterator<Item = Slot>, unit: u32) -> Self {
        let mut supply = Self::default();
        for slot in slots {
            supply.slots_needed += 1;
            match supply.gaps.last_mut() {
                Some(gap) if gap.first.index + gap.slots == slot.index && !slot.index.is_multiple_of(unit) => {
                    gap.slots += 1;
                }
                _ => supply.gaps.push(Gap { first: slot, slots: 1 }),
            }
        }
        supply
    }

    /// How many slots the next page may have; 0 if none is needed.
    pub(super) fn next_max(&self) -> u32 {
        self.gaps.iter().map(|gap| gap.slots).max().unwrap_or(0)
    }

    /// Puts a page that has at most [`next_max`](Self::next_max) slots at the end of the last gap that has room for it.
    pub(super) fn add(&mut self, page: PageId, slots: u32, from: Option<Slot>) {
        let at = self.gaps.iter().rposition(|gap| gap.slots >= slots).expect("a gap that is large enough");
        let gap = &mut self.gaps[at];
        gap.slots -= slots;
        self.pages.push(Supplied { page, from, to: Slot { index: gap.first.index + gap.slots, ..gap.first } });
        if gap.slots == 0 {
            self.gaps.remove(at);
        }
        self.slots_needed -= slots;
    }
}
