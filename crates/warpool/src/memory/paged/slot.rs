//! Slots: what addresses are divided into, and what is mapped in each.

use super::ids::{PageId, RangeId};
use crate::defect::Defect;

/// A slot: a range, and the number of the slot in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot {
    pub(super) range: RangeId,
    pub(super) index: u32,
}

/// The number of the slot of an address, in a range that begins at `base`. The size of a slot is a power of two: a
/// division takes as long as ten shifts, and thousands are needed.
#[inline]
pub(super) fn index_of(addr: u64, base: u64, slot_bytes: u64) -> u32 {
    u32::try_from((addr - base) >> slot_bytes.trailing_zeros()).expect("fewer than 2^32 slots")
}

/// What is mapped in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mapping {
    #[default]
    Nothing,
    /// A part of a page.
    Page(PagePart),
    /// A mapping could not be undone; it is retried, and the slot not used before that.
    Broken,
}

/// A slot's worth of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PagePart {
    pub(super) page: PageId,
    /// Which part of it, in slots.
    pub(super) part: u8,
    /// The size of the page in slots.
    pub(super) slots: u8,
    /// Whether the page belongs here.
    pub(super) is_home: bool,
}

impl PagePart {
    /// The first slot of the page, if this part is in `slot`.
    pub(super) fn first_slot(self, slot: Slot) -> Slot {
        Slot { index: slot.index - u32::from(self.part), ..slot }
    }

    /// How many slots of the page there are from this part on.
    pub(super) fn slots_left(self) -> u32 {
        u32::from(self.slots - self.part)
    }
}

/// One slot of a range.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotState {
    pub(super) mapping: Mapping,
    /// When the page was taken from here, in takes from the heap; 0 if it was not.
    pub(super) taken: u64,
}

impl SlotState {
    pub(super) fn part(&self) -> Option<PagePart> {
        if let Mapping::Page(part) = self.mapping { Some(part) } else { None }
    }

    /// The part of the page that belongs here.
    pub(super) fn own(&self) -> Option<PagePart> {
        self.part().filter(|part| part.is_home)
    }

    /// The part of a page that is mapped here and belongs elsewhere.
    pub(super) fn old(&self) -> Option<PagePart> {
        self.part().filter(|part| !part.is_home)
    }

    /// Whether an old mapping may be undone: no work uses it any more. `passed` is the highest number of a take from
    /// the heap that its stream has passed.
    pub(super) fn has_passed(&self, passed: u64) -> bool {
        self.old().is_some() && ((1..=passed).contains(&self.taken) || Defect::UnmapsTooEarly.is_on())
    }
}
