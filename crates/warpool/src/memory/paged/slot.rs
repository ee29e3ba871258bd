//! Slots: what addresses are divided into, and what is mapped in each.

use super::page_set::PageId;

/// A slot: a range by its number, and the number of the slot in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot {
    pub(super) range: u32,
    pub(super) index: u32,
}

/// Neighbouring slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotRange {
    pub(super) start: Slot,
    /// The number of the slot behind them.
    pub(super) behind: u32,
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
    /// Of a page that does not belong there yet.
    #[expect(clippy::cast_possible_truncation, reason = "a page has at most four slots")]
    pub(super) fn new(page: PageId, part: u32, slots: u32) -> Self {
        Self { page, part: part as u8, slots: slots as u8, is_home: false }
    }

    /// The first slot of the page, if this part is in `slot`.
    pub(super) fn first_slot(self, slot: Slot) -> Slot {
        Slot { index: slot.index - u32::from(self.part), ..slot }
    }
}

/// One slot of a range. A search for a window looks at thousands, so it is small, and all that they need is in it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotState {
    pub(super) mapping: Mapping,
    /// When the page was taken from here, in takes from the heap; 0 if it was not.
    taken: u64,
}

const _: () = assert!(size_of::<SlotState>() == 16);

impl SlotState {
    pub(super) fn new(mapping: Mapping) -> Self {
        Self { mapping, taken: 0 }
    }

    /// The page that belongs here.
    pub(super) fn own_page(&self) -> Option<PageId> {
        match self.mapping {
            Mapping::Page(PagePart { page, is_home: true, .. }) => Some(page),
            _ => None,
        }
    }

    /// The page that is mapped here belongs here from now on.
    pub(super) fn set_home(&mut self) {
        if let Mapping::Page(part) = &mut self.mapping {
            part.is_home = true;
        }
    }

    /// The page that is mapped here was taken.
    pub(super) fn set_taken(&mut self, taken: u64) {
        if let Mapping::Page(part) = &mut self.mapping {
            part.is_home = false;
        }
        self.taken = taken;
    }

    /// Whether the page was taken from here before the take of that number.
    pub(super) fn was_taken_before(&self, number: u64) -> bool {
        self.taken < number
    }
}

/// The highest number of a take that the stream of a heap has passed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassedTakes(pub(super) u64);

impl PassedTakes {
    /// Whether no work uses what is mapped in a slot of the heap any more, and its page was taken from there.
    #[inline]
    pub(super) fn has_passed(self, slot: &SlotState) -> bool {
        #[cfg(test)]
        if super::defect::Defect::UnmapsTooEarly.is_on() {
            return slot.own_page().is_none();
        }
        (1..=self.0).contains(&slot.taken)
    }
}
