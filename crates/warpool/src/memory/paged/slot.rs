//! Slots: what addresses are divided into, and what is mapped in each.

use super::page_set::{PageId, PageSet};

/// A slot: a range by its number, and the number of the slot in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot {
    pub(super) range: u32,
    pub(super) index: u32,
}

/// The number of the slot of an address, in a range that begins at `base`. The size of a slot is a power of two: a
/// division takes as long as ten shifts, and thousands are needed.
#[inline]
pub(super) fn index_of(addr: u64, base: u64, slot_bytes: u64) -> u32 {
    u32::try_from((addr - base) >> slot_bytes.trailing_zeros()).expect("fewer than 2^32 slots")
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
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotState {
    /// The page that is mapped here, or [`NOTHING`] or [`BROKEN`].
    page: PageId,
    part: u8,
    slots: u8,
    is_home: bool,
    /// When the page was taken from here, in takes from the heap; 0 if it was not.
    taken: u64,
}

/// Not the number of a page: nothing is mapped. It is a low number, so that sets of pages need no branch for it.
const NOTHING: PageId = 0;
/// Not the number of a page: a mapping could not be undone.
const BROKEN: PageId = 1;
/// The lowest number of a page.
pub(super) const FIRST_PAGE: PageId = 2;

const _: () = assert!(size_of::<SlotState>() == 16);

impl Default for SlotState {
    fn default() -> Self {
        Self { page: NOTHING, part: 0, slots: 0, is_home: false, taken: 0 }
    }
}

impl SlotState {
    pub(super) fn new(mapping: Mapping) -> Self {
        match mapping {
            Mapping::Nothing => Self::default(),
            Mapping::Broken => Self { page: BROKEN, ..Self::default() },
            Mapping::Page(PagePart { page, part, slots, is_home }) => Self { page, part, slots, is_home, taken: 0 },
        }
    }

    #[inline]
    pub(super) fn mapping(&self) -> Mapping {
        let &Self { page, part, slots, is_home, .. } = self;
        match page {
            NOTHING => Mapping::Nothing,
            BROKEN => Mapping::Broken,
            _ => Mapping::Page(PagePart { page, part, slots, is_home }),
        }
    }

    #[inline]
    pub(super) fn is_unmapped(&self) -> bool {
        self.page == NOTHING
    }

    /// 1 if the page that is mapped here is one of these, else 0.
    #[inline]
    pub(super) fn has_one_of(&self, pages: &PageSet) -> u64 {
        // What is no page is in no set.
        pages.bit(self.page)
    }

    /// The page that belongs here.
    #[inline]
    pub(super) fn own_page(&self) -> Option<PageId> {
        self.is_home.then_some(self.page)
    }

    /// The number of the page that is mapped here, where one is known to be.
    #[inline]
    pub(super) fn page_number(&self) -> PageId {
        self.page
    }

    /// The page that belongs here and begins here.
    #[inline]
    pub(super) fn own_page_begins(&self) -> Option<PageId> {
        self.own_page().filter(|_| self.part == 0)
    }

    /// How many slots from this one on are of a page that began before it.
    #[inline]
    pub(super) fn slots_to_next_page(&self) -> usize {
        if self.part == 0 { 0 } else { usize::from(self.slots - self.part) }
    }

    /// How many slots up to this one are of a page that ends behind it.
    #[inline]
    pub(super) fn slots_of_cut_page(&self) -> usize {
        if self.part + 1 < self.slots { usize::from(self.part) + 1 } else { 0 }
    }

    /// The page that is mapped here belongs here from now on.
    pub(super) fn set_home(&mut self) {
        self.is_home = true;
    }

    /// The page that is mapped here was taken.
    pub(super) fn set_taken(&mut self, taken: u64) {
        (self.is_home, self.taken) = (false, taken);
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
        if crate::defect::Defect::UnmapsTooEarly.is_on() {
            return matches!(slot.mapping(), Mapping::Page(part) if !part.is_home);
        }
        // From 1 up to that number, without a branch.
        slot.taken.wrapping_sub(1) < self.0
    }
}
