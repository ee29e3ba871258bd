//! What counts in the choice of a window. New pages are the last resort: before them, windows are tried that need none.

use super::{Fill, Unfilled, find_free_pages};
use crate::memory::paged::page_sizes::PageSizes;
use crate::memory::paged::supply::Supply;
use crate::memory::paged::window::{MEMORY_FIRST, Window};

/// What counts in the choice of a window, and whether there may be new pages in it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Aim {
    /// Few driver calls. If it needs new pages then, another window may need none.
    FewCalls,
    /// Memory, without new pages.
    NoNewPages,
    /// Gaps that large pages fit into, without new pages: small ones are used up. All gaps have a multiple of so many
    /// slots.
    LargeGaps { slots: u32 },
    /// Few driver calls again, since there is no window without new pages.
    NewPages,
    /// Memory beside driver calls, with new pages that are small: much is lost in parts of pages already.
    FewNewPages,
    /// Memory: the request would run out of it otherwise.
    Fit,
}

impl Aim {
    /// Whether memory counts, before driver calls or beside them.
    pub(super) fn is_memory(self) -> bool {
        matches!(self, Self::NoNewPages | Self::FewNewPages | Self::Fit)
    }

    /// Whether there may be no new pages.
    pub(super) fn is_without_new(self) -> bool {
        matches!(self, Self::NoNewPages | Self::LargeGaps { .. })
    }

    /// Gaps have a multiple of so many slots.
    pub(super) fn gap_slots(self) -> u32 {
        if let Self::LargeGaps { slots } = self { slots } else { 1 }
    }
}

/// What was seen with the first window, the one with few calls, once it needs new pages.
#[derive(Clone, Copy, Default)]
pub(super) struct FirstWindow {
    /// Slots that it needs new pages for.
    slots_missing: u32,
    /// Slots without a page.
    holes: u32,
    /// All free slots that there were: a window without new pages may need as many.
    free_slots: u32,
    /// What is free is too large for its gaps: all gaps should have a multiple of so many slots.
    gap_slots: Option<u32>,
    /// Much memory is lost in free parts of pages, so that there should be few new ones.
    loses_much: bool,
}

/// So much of the reserved memory may be lost in free parts of pages, per mille, before new pages are small.
const LOST_PER_MILLE: u64 = 8;

/// And so many slots beside that: in a program that still grows, a few parts are no sign of what will be lost.
const LOST_SLOTS: u64 = 8;

/// A slot that nothing else is in is worth so many driver calls then.
const SLOT_WORTH_IF_LOST: u32 = 32;

/// A window without new pages may have so many holes more than the one that needs the fewest calls.
const HOLES_FOR_MEMORY: u32 = 32;

/// One with larger gaps may have so many: 8 GiB, for which some thousand pages are mapped.
const HOLES_FOR_LARGE_GAPS: u32 = 4096;

/// The pages that may be taken.
struct FreePages {
    slots: u32,
    /// The slots of the smallest.
    smallest: u32,
}

impl Fill<'_> {
    /// Whether another window is looked for, rather than new pages for what this one still needs.
    pub(super) fn other_window(&mut self, supply: &Supply) -> Option<Unfilled> {
        match self.aim {
            Aim::NewPages | Aim::Fit => return None,
            Aim::FewNewPages if supply.slots_needed <= self.first.slots_missing => return None,
            Aim::FewNewPages => {
                // Free pages that are too large for its gaps are left.
                self.first.loses_much = false;
                return Some(Unfilled::NeedsNewPages { gap_slots: None });
            }
            Aim::FewCalls => {
                self.first.slots_missing = supply.slots_needed;
                self.first.loses_much = self.takes_own() && self.bytes_in_parts() > self.may_be_lost();
            }
            Aim::NoNewPages | Aim::LargeGaps { .. } => {}
        }
        let free = self.free_pages();
        // For a request of a few slots, a large page would be too large.
        let gap_slots_max = (self.request.requested / self.table.slot_bytes / 4).min(PageSizes::SLOTS_MAX.into());
        let are_too_large = free.smallest > supply.next_max() && u64::from(free.smallest) <= gap_slots_max;
        let gap_slots = (are_too_large && free.slots >= supply.slots_needed).then_some(free.smallest);
        // Elsewhere a few slots less may do. Without any free page, also in this window, there is none for another one.
        let are_many = supply.slots_needed > PageSizes::SLOTS_MAX;
        let has_none = supply.pages.is_empty() && self.memory.takeable.is_empty();
        if self.aim == Aim::FewCalls && gap_slots.is_none() && (are_many || has_none) && !self.first.loses_much {
            return None;
        }
        Some(Unfilled::NeedsNewPages { gap_slots })
    }

    /// How much is free in pages that blocks have parts of, in this heap and in those that pages may be taken from.
    fn bytes_in_parts(&self) -> u64 {
        let counts = |number| number == self.request.heap || self.may_take_from(number);
        let private = self.table.index.parts_of_private().filter(|&(number, _)| counts(number));
        self.table.index.bytes_in_parts() + private.map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// How much of that there may be before a slot is worth some driver calls.
    fn may_be_lost(&self) -> u64 {
        let share = self.table.reserved_all().current / 1000 * LOST_PER_MILLE;
        // Pages that are small already need no reason to be.
        if self.unit() == 1 { share } else { share + LOST_SLOTS * self.table.slot_bytes }
    }

    /// How many driver calls a slot is worth that nothing else is in.
    pub(super) fn slot_worth(&self) -> u32 {
        match self.aim {
            Aim::NoNewPages | Aim::Fit => MEMORY_FIRST,
            Aim::FewNewPages => SLOT_WORTH_IF_LOST,
            Aim::FewCalls | Aim::LargeGaps { .. } | Aim::NewPages => 0,
        }
    }

    /// What counts if there are to be new pages.
    pub(super) fn with_new_pages(&self) -> Aim {
        if self.first.loses_much { Aim::FewNewPages } else { Aim::NewPages }
    }

    /// What counts in the choice of the next window: this one needs new pages, and was given up.
    pub(super) fn after_unfilled(&mut self, window: Window, gap_slots: Option<u32>) -> Aim {
        if self.aim == Aim::FewCalls {
            let (free_slots, holes) = (self.free_pages().slots, self.holes(window));
            self.first = FirstWindow { holes, free_slots, gap_slots, ..self.first };
        }
        self.next_aim(gap_slots)
    }

    /// What counts in the choice of the next window, after one that was refused.
    pub(super) fn after_refused(&self) -> Aim {
        self.next_aim(self.first.gap_slots)
    }

    fn next_aim(&self, gap_slots: Option<u32>) -> Aim {
        match (self.aim, gap_slots) {
            (Aim::FewCalls, _) => Aim::NoNewPages,
            (Aim::NoNewPages, Some(slots)) => Aim::LargeGaps { slots },
            (Aim::LargeGaps { slots: before }, Some(slots)) if slots > before => Aim::LargeGaps { slots },
            _ => self.with_new_pages(),
        }
    }

    /// Whether a window would need new pages, or too many driver calls to do without. There may be none.
    pub(super) fn is_refused(&self, window: Option<Window>) -> bool {
        let holes = match (self.aim, window) {
            (Aim::NoNewPages, _) => self.first.holes + HOLES_FOR_MEMORY,
            // Where there is none, addresses are reserved.
            (Aim::LargeGaps { .. }, Some(_)) => HOLES_FOR_LARGE_GAPS,
            _ => return false,
        };
        window.is_none_or(|window| self.whole_slots(window) > self.first.free_slots || self.holes(window) > holes)
    }

    /// Whether a window in addresses that were never used could be filled, as far as that is known.
    pub(super) fn could_fill_new(&self, bytes: u64) -> bool {
        let slots = bytes.div_ceil(self.table.slot_bytes).next_multiple_of(self.unit().into());
        let most = self.first.free_slots.min(HOLES_FOR_LARGE_GAPS);
        self.aim.gap_slots() == 1 || slots <= most.into()
    }

    /// All pages that may be taken, whether or not they were tried before.
    fn free_pages(&mut self) -> FreePages {
        let (takes_own, mut free) = (self.takes_own(), std::mem::take(&mut self.memory.free_anywhere));
        let mut heap = self.cell.lock();
        heap.merge_recent();
        find_free_pages(self.table, &heap, takes_own, &mut free);
        drop(heap);
        self.add_free_elsewhere(&mut free);
        let (mut slots, mut smallest) = (0, u32::MAX);
        free.for_each_in_both(&free, |page| {
            let page = self.table.page(page).slots;
            (slots, smallest) = (slots + page, smallest.min(page));
        });
        self.memory.free_anywhere = free;
        FreePages { slots, smallest }
    }
}
