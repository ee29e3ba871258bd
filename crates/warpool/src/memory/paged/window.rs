//! Where a request goes that no free block can hold: the window of free addresses of least cost. The cost of a window
//! is its driver calls, plus [`SLOT_WORTH`] for each slot that nothing else is in; of equal ones, the window that needs
//! the fewest pages, then the lowest. For a request that would otherwise fail the slots count before the calls, and
//! those of pages that the window cuts count, too.
//!
//! A slot that nothing else is in counts whether or not its page is free: the page could be taken elsewhere. What is
//! free beside other blocks in a slot can be used nowhere else.

use std::ops::Range;

use super::heap::FreeRun;
use super::ids::{BlockId, PageId, RangeId};
use super::pages::PageTable;
use super::slot::{Mapping, SlotState, index_of};

/// How many driver calls a slot is worth that nothing else is in (docs/design/placement.md has the measurement).
const SLOT_WORTH: u32 = 8;

/// Free addresses that are to be filled with pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Where the block will be.
    pub(super) addr: u64,
    /// What of the run is filled: the block, and in holes whole slots.
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) range: RangeId,
    /// The first block of its run.
    pub(super) anchor: BlockId,
}

/// Pages, by number.
#[derive(Debug)]
pub(super) struct PageSet(Vec<bool>);

impl PageSet {
    pub(super) fn new(table: &PageTable) -> Self {
        Self(vec![false; table.pages_end()])
    }

    pub(super) fn set(&mut self, page: PageId, is_in: bool) {
        self.0[page.index()] = is_in;
    }

    pub(super) fn contains(&self, page: PageId) -> bool {
        self.0[page.index()]
    }
}

/// What a window is chosen for.
pub(super) struct Wanted<'a> {
    pub(super) table: &'a PageTable,
    pub(super) bytes: u64,
    /// The slots of a new page: windows begin and end within holes at multiples of it.
    pub(super) unit: u32,
    /// Whether the slots that nothing else is in count before driver calls.
    pub(super) memory_first: bool,
    /// The pages that may be taken from where they belong.
    pub(super) takeable: &'a PageSet,
}

/// Smaller is better: costs, and the address.
type Key = (u32, u32, u64);

/// The window of least cost in these runs of free addresses.
pub(super) fn choose(wanted: &Wanted<'_>, runs: &[FreeRun]) -> Option<Window> {
    let mut best = None;
    for run in runs {
        RunCosts::new(wanted, run).consider_all(&mut best);
    }
    best.map(|(_, window)| window)
}

/// What must be done to fill slots: pages that are needed, driver calls, and slots in which a page is mapped that can
/// neither be taken back nor unmapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    pages: u32,
    calls: u32,
    blocked: u32,
}

/// Sums over the slots of a run, so that the cost of a window is a difference. Slots are numbered as in the range.
struct RunCosts<'a> {
    wanted: &'a Wanted<'a>,
    run: &'a FreeRun,
    slots: &'a [SlotState],
    /// The highest number of a take from the heap that its stream has passed.
    passed: u64,
    base: u64,
    /// Where the run ends, as far as it is looked at.
    end: u64,
    holes: Vec<Range<u32>>,
    /// The first slot of the run.
    first: u32,
    /// The cost of all slots of the run before each; at last of all.
    sums: Vec<Cost>,
    /// The slots that no other block shares, nor a page of which one has a part.
    whole: Range<u32>,
}

impl<'a> RunCosts<'a> {
    fn new(wanted: &'a Wanted<'a>, run: &'a FreeRun) -> Self {
        let (table, slot) = (wanted.table, wanted.table.slot_bytes);
        let (slots, base) = (table.slots(run.range), table.range(run.range).base);
        let index = |addr: u64| index_of(addr, base, slot);
        // After the last slot that was ever used, all windows cost the same.
        let used = base + slots.len() as u64 * slot;
        let looked_at = used.max(run.start) + wanted.bytes + slot - base;
        let end = run.end.min(looked_at.next_multiple_of(u64::from(wanted.unit) * slot) + base);
        let own = |index: u32| slots.get(index as usize).and_then(SlotState::own);
        let (mut whole_first, mut whole_end) = (index(run.start + slot - 1), index(run.end));
        // A page whose other part is in use beside the run.
        if let Some(part) = own(whole_first).filter(|part| part.part > 0) {
            whole_first += part.slots_left();
        }
        if let Some(part) = whole_end.checked_sub(1).and_then(own).filter(|part| part.slots_left() > 1) {
            whole_end -= u32::from(part.part) + 1;
        }
        let holes = run.holes.iter().filter(|hole| hole.start < end);
        let holes = holes.map(|hole| index(hole.start)..index(hole.end.min(end))).collect();
        let passed = table.passed_takes(run.range);
        let (first, whole) = (index(run.start), whole_first..whole_end);
        let mut costs = Self { wanted, run, slots, passed, base, end, holes, first, sums: Vec::new(), whole };
        costs.sum(index(end - 1) + 1);
        costs
    }

    /// Sums up the costs of the slots before `end`. Only slots in holes cost something.
    fn sum(&mut self, end: u32) {
        let mut sum = Cost::default();
        self.sums.push(sum);
        let mut next = self.first;
        for hole in &self.holes {
            self.sums.extend((next..hole.start).map(|_| sum));
            for index in hole.clone() {
                let calls = self.calls(index);
                sum.pages += 1;
                sum.calls += calls.unwrap_or(0);
                sum.blocked += u32::from(calls.is_none());
                self.sums.push(sum);
            }
            next = hole.end;
        }
        self.sums.extend((next..end).map(|_| sum));
    }

    /// The driver calls to fill a slot of a hole: to map a page, and before that to undo an old mapping. `None` if a
    /// page is mapped there that can neither be taken back nor unmapped.
    fn calls(&self, index: u32) -> Option<u32> {
        let Some(state) = self.slots.get(index as usize) else { return Some(1) };
        match state.part() {
            Some(part) if self.wanted.takeable.contains(part.page) => Some(0),
            Some(_) => state.has_passed(self.passed).then_some(2),
            None => (state.mapping == Mapping::Nothing).then_some(1),
        }
    }

    fn index(&self, addr: u64) -> u32 {
        index_of(addr, self.base, self.wanted.table.slot_bytes)
    }

    fn addr(&self, index: u32) -> u64 {
        self.base + u64::from(index) * self.wanted.table.slot_bytes
    }

    /// Considers the windows that begin or end with the run, or where slots cost something else than the one before. Of
    /// the windows between two of them, none is better than both: as one moves on, its cost changes steadily.
    fn consider_all(&self, best: &mut Option<(Key, Window)>) {
        let (start, bytes, unit) = (self.run.start, self.wanted.bytes, self.wanted.unit);
        let Some(last) = self.end.checked_sub(bytes).filter(|&last| last >= start) else { return };
        self.consider(start, best);
        if self.end == self.run.end {
            self.consider(last, best);
        }
        let of = |at: usize| {
            let (sum, before) = (self.sums[at], self.sums[at - 1]);
            (sum.pages - before.pages, sum.calls - before.calls, sum.blocked - before.blocked)
        };
        let edges = (2..self.sums.len()).filter(|&at| of(at) != of(at - 1)).map(|at| self.first + at as u32 - 1);
        let mut before = None;
        for edge in edges.chain([self.first + self.sums.len() as u32 - 1]) {
            for boundary in [edge & !(unit - 1), edge.next_multiple_of(unit)] {
                if before.is_some_and(|before| boundary <= before) {
                    continue;
                }
                before = Some(boundary);
                let addr = self.addr(boundary);
                for addr in [Some(addr), addr.checked_sub(bytes)].into_iter().flatten() {
                    if (start..=last).contains(&addr) {
                        self.consider(addr, best);
                    }
                }
            }
        }
    }

    /// Considers the block at an address.
    fn consider(&self, addr: u64, best: &mut Option<(Key, Window)>) {
        let (unit, bytes) = (self.wanted.unit, self.wanted.bytes);
        let (mut first, mut last) = (self.index(addr), self.index(addr + bytes - 1));
        let (begins_in, ends_in) = (self.hole_with(first), self.hole_with(last));
        if let Some(hole) = begins_in {
            first = (first & !(unit - 1)).max(hole.start);
        }
        if let Some(hole) = ends_in {
            last = ((last & !(unit - 1)) + unit).min(hole.end) - 1;
        }
        let (before, all) = (self.sums[(first - self.first) as usize], self.sums[(last + 1 - self.first) as usize]);
        if all.blocked > before.blocked && !crate::defect::Defect::ImpossibleWindow.is_on() {
            return;
        }
        let (pages, calls) = (all.pages - before.pages, all.calls - before.calls);
        let key = if self.wanted.memory_first {
            let (before, after) = self.cut_off(first, last);
            (self.whole_slots(first - before, last + after), calls, addr)
        } else {
            let slots = self.whole_slots(first, last);
            (calls.saturating_add(SLOT_WORTH.saturating_mul(slots)), pages, addr)
        };
        if best.as_ref().is_some_and(|(other, _)| key >= *other) || self.cuts_page(first, last) {
            return;
        }
        let start = if begins_in.is_some() { self.addr(first) } else { addr };
        let end = if ends_in.is_some() { self.addr(last + 1) } else { addr + bytes };
        let (range, anchor) = (self.run.range, self.run.first);
        *best = Some((key, Window { addr, start, end, range, anchor }));
    }

    /// How many slots from `first` to `last` nothing else is in.
    fn whole_slots(&self, first: u32, last: u32) -> u32 {
        (last + 1).min(self.whole.end).saturating_sub(first.max(self.whole.start))
    }

    /// The slots before and after a window that belong to pages of which it takes a part: no other slot gets those
    /// pages.
    fn cut_off(&self, first: u32, last: u32) -> (u32, u32) {
        let own = |index: u32| self.slots.get(index as usize).and_then(SlotState::own);
        let before = own(first).map_or(0, |part| u32::from(part.part));
        let after = own(last).map_or(0, |part| part.slots_left() - 1);
        (before, after)
    }

    fn hole_with(&self, index: u32) -> Option<&Range<u32>> {
        let at = self.holes.partition_point(|hole| hole.end <= index);
        self.holes.get(at).filter(|hole| hole.contains(&index))
    }

    /// Whether a page that would have to be taken back is only partly in the window, and its mapping cannot be undone.
    fn cuts_page(&self, first: u32, last: u32) -> bool {
        let stays = |index: u32| {
            let state = self.slots.get(index as usize)?;
            state.old().filter(|_| !state.has_passed(self.passed))
        };
        stays(first).is_some_and(|part| part.part > 0) || stays(last).is_some_and(|part| part.slots_left() > 1)
    }
}
