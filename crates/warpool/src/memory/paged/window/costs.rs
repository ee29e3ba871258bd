//! What the windows of one run cost: pages and driver calls.

use super::scratch::Scratch;
use super::{Wanted, Window};
use crate::memory::paged::heap::{FreeRun, Hole};
use crate::memory::paged::page_set::PageSet;
use crate::memory::paged::slot::{Mapping, PagePart, PassedTakes, SlotState, index_of};

/// What must be done to use slots in holes, beside getting a page for each. In one word, since thousands are added up:
/// driver calls (mappings that are made, and old ones that are undone for them; each costs about as much), and above
/// them slots in which another page is mapped that is in use elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost(u64);

impl Cost {
    const BLOCKED: Self = Self(1 << 32);

    const fn calls(calls: u32) -> Self {
        Self(calls as u64)
    }
}

/// The slots of a hole: from `first` up to `behind`, which is not in it.
#[derive(Debug)]
struct HoleSlots {
    first: u32,
    behind: u32,
    /// How many slots in holes there are before it.
    before: u32,
}

/// A slot that costs something else than the one before, or that the run begins with or ends before.
#[derive(Clone, Copy, Debug, Default)]
struct Edge {
    index: u32,
    /// Whether it costs more. What is behind the run costs more than all, and so does what is before it.
    rises: bool,
}

/// Costs of the slots of a run, kept from one run to the next for their memory. Only slots in holes cost something.
#[derive(Debug, Default)]
pub(super) struct Sums {
    holes: Vec<HoleSlots>,
    /// The cost of all slots in holes before each; at last of all.
    before: Scratch<Cost>,
    edges: Scratch<Edge>,
}

impl Sums {
    fn clear(&mut self) {
        self.holes.clear();
        self.edges.clear();
        self.before.clear();
        self.before.push(Cost::default());
    }

    fn begin_hole(&mut self, first: u32, behind: u32) {
        self.holes.push(HoleSlots { first, behind, before: self.before.len() as u32 - 1 });
    }

    fn add_edge(&mut self, index: u32, rises: bool) {
        self.edges.push(Edge { index, rises });
    }

    /// Adds slots of a hole, the first of which is an edge already. Returns the cost of the last. Thousands in a
    /// search: nothing else is in this function that needs registers, and there is no branch on what a slot costs,
    /// which cannot be predicted.
    #[inline(never)]
    fn add_used(&mut self, first: u32, slots: &[SlotState], takeable: &PageSet, passed: PassedTakes) -> Option<Cost> {
        let cost = |state: &SlotState| cost(state, takeable, passed).0;
        let (mut sum, mut previous) = (self.before.last()?.0, cost(slots.first()?));
        let (sums, edges) = (self.before.room(slots.len()), self.edges.room(slots.len()));
        let mut edge = 0;
        for ((state, before), index) in slots.iter().zip(sums).zip(first..) {
            let cost = cost(state);
            // Written in any case: if it is no edge, the next one takes its place.
            edges[edge] = Edge { index, rises: cost > previous };
            edge += usize::from(cost != previous);
            previous = cost;
            sum += cost;
            *before = Cost(sum);
        }
        self.before.grow(slots.len());
        self.edges.grow(edge);
        Some(Cost(previous))
    }

    /// Adds slots of a hole that were never used, behind those that were.
    fn add_unused(&mut self, first: u32, end: u32, last_used: Option<Cost>) {
        let (Cost(sum), Cost(each)) = (self.before.last().copied().unwrap_or_default(), Cost::calls(1));
        if let Some(Cost(last)) = last_used.filter(|&Cost(last)| first < end && last != each) {
            self.add_edge(first, each > last);
        }
        let slots = (end - first) as usize;
        (1..).zip(self.before.room(slots)).for_each(|(slots, before)| *before = Cost(sum + slots * each));
        self.before.grow(slots);
    }
}

/// Where a block could be: its address, and the slots of its first and of its last byte.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub(super) addr: u64,
    first: u32,
    last: u32,
}

/// The first holes that end behind the first and behind the last slot of a candidate. Candidates come by ascending
/// address, so these are found from those of the one before.
#[derive(Default)]
pub(super) struct Cursor {
    first: usize,
    last: usize,
}

/// What the window of a candidate needs, and where it is.
pub(super) struct Fit {
    pub(super) pages: u32,
    pub(super) calls: u32,
    /// Its first and its last slot.
    first: u32,
    last: u32,
    /// Whether it begins and ends with whole slots, in holes. Otherwise it begins and ends with the block.
    whole: (bool, bool),
}

/// Sums over the slots of a run, so that the cost of a window is a difference. Slots are numbered from the start of the
/// range, and holes and candidates given by them.
pub(super) struct Costs<'a> {
    slots: &'a [SlotState],
    passed: PassedTakes,
    run: &'a FreeRun,
    bytes: u64,
    slot: u64,
    /// How many slots are filled together: a power of two.
    unit: u32,
    base: u64,
    /// Where the run ends, as far as it is looked at.
    end: u64,
    /// The first slot that is not wholly before that end.
    behind: u32,
    sums: &'a mut Sums,
}

impl<'a> Costs<'a> {
    pub(super) fn new(wanted: Wanted<'a>, run: &'a FreeRun, sums: &'a mut Sums) -> Self {
        let Wanted { table, runs, bytes, unit, takeable, .. } = wanted;
        let (slot, base) = (table.slot_bytes, table.range(run.range).base);
        // Behind the last slot that was ever used, all windows cost the same.
        let used = base + u64::from(table.slots_used(run.range)) * slot;
        let looked_at = used.max(run.start) + bytes + slot - base;
        let looked_at = looked_at.next_multiple_of(u64::from(unit) * slot);
        let end = run.end.min(looked_at + base);
        let (slots, passed) = (table.slots(run.range), table.passed_takes(run.range));
        let behind = index_of(end, base, slot);
        let costs = Self { slots, passed, run, bytes, slot, unit, base, end, behind, sums };
        costs.sum(runs.holes_of(run), takeable)
    }

    /// Sums up the costs.
    fn sum(self, holes: &[Hole], takeable: &PageSet) -> Self {
        let (start, stop) = (self.run.start, self.index(self.end - 1) + 1);
        self.sums.clear();
        if holes.first().is_none_or(|hole| start < hole.start) {
            self.sums.add_edge(self.index(start), false);
        }
        for hole in holes.iter().take_while(|hole| hole.start < self.end) {
            let (first, behind) = (self.index(hole.start), self.index(hole.end));
            let end = behind.min(stop);
            let used = used_slots(self.slots, first, end);
            self.sums.begin_hole(first, behind);
            self.sums.add_edge(first, start < hole.start);
            let last = self.sums.add_used(first, used, takeable, self.passed);
            self.sums.add_unused(first + used.len() as u32, end, last);
            if behind < stop {
                self.sums.add_edge(behind, false);
            }
        }
        self.sums.add_edge(stop, true);
        self
    }

    fn index(&self, addr: u64) -> u32 {
        index_of(addr, self.base, self.slot)
    }

    /// The first slot of the unit that a slot is in.
    fn unit_at(&self, index: u32) -> u32 {
        index & !(self.unit - 1)
    }

    /// Windows that begin or end with the run, begin where slots begin to cost less, or end where they begin to cost
    /// more. Of the windows between two of them, none is better than both: as one moves on, its cost changes steadily.
    pub(super) fn candidates(&self, mut consider: impl FnMut(Candidate, &mut Cursor)) {
        let (start, end, bytes) = (self.run.start, self.end, self.bytes);
        if end - start < bytes {
            return;
        }
        let at = |addr: u64| Candidate { addr, first: self.index(addr), last: self.index(addr + bytes - 1) };
        let (mut beginning, mut ending) = (Cursor::default(), Cursor::default());
        consider(at(start), &mut beginning);
        let slots = u32::try_from(bytes.div_ceil(self.slot)).expect("fewer than 2^32 slots");
        let boundaries = |from: u64, to: u64| self.index(from + self.slot - 1)..=self.index(to);
        let (begins, ends) = (boundaries(start, end - bytes), boundaries(start + bytes, end));
        // What comes before was considered: to begin there, and to end there.
        let mut considered = [0; 2];
        for edge in self.sums.edges.iter() {
            let mut consider_at = |boundary: u32| {
                let considered = &mut considered[usize::from(edge.rises)];
                if boundary < *considered {
                    return;
                }
                *considered = boundary + 1;
                let addr = self.base + u64::from(boundary) * self.slot;
                if !edge.rises && begins.contains(&boundary) {
                    consider(Candidate { addr, first: boundary, last: boundary + slots - 1 }, &mut beginning);
                } else if edge.rises && ends.contains(&boundary) {
                    let candidate = Candidate { addr: addr - bytes, first: boundary - slots, last: boundary - 1 };
                    consider(candidate, &mut ending);
                }
            };
            consider_at(self.unit_at(edge.index));
            consider_at(self.unit_at(edge.index + self.unit - 1));
        }
        if end == self.run.end {
            consider(at(end - bytes), &mut ending);
        }
    }

    /// What a candidate needs; `None` if it cannot be used, but for [`cuts_page`](Self::cuts_page).
    #[inline]
    pub(super) fn fit(&self, candidate: Candidate, cursor: &mut Cursor) -> Option<Fit> {
        let Candidate { mut first, mut last, .. } = candidate;
        let (begins_in, mut from) = self.hole_at(first, &mut cursor.first);
        if let Some(hole) = begins_in {
            first = self.unit_at(first).max(hole.first);
            from += first - hole.first;
        }
        let (ends_in, mut to) = self.hole_at(last, &mut cursor.last);
        if let Some(hole) = ends_in {
            last = (self.unit_at(last) + self.unit).min(hole.behind) - 1;
            if last >= self.behind {
                return None;
            }
            to += last + 1 - hole.first;
        }
        let cost = self.sums.before[to as usize].0 - self.sums.before[from as usize].0;
        // More than that many calls: a slot is blocked.
        let calls = u32::try_from(cost).ok()?;
        Some(Fit { pages: to - from, calls, first, last, whole: (begins_in.is_some(), ends_in.is_some()) })
    }

    pub(super) fn window(&self, candidate: Candidate, fit: &Fit) -> Window {
        let (range, anchor, addr) = (self.run.range, self.run.first, candidate.addr);
        let at = |index: u32| self.base + u64::from(index) * self.slot;
        let start = if fit.whole.0 { at(fit.first) } else { addr };
        let end = if fit.whole.1 { at(fit.last + 1) } else { addr + self.bytes };
        Window { addr, start, end, range, anchor }
    }

    /// The hole that a slot is in, and how many slots in holes there are before that, or else before the slot. `cursor`
    /// is the first hole that ends behind an earlier slot, and then behind this one.
    #[inline]
    fn hole_at(&self, slot: u32, cursor: &mut usize) -> (Option<&HoleSlots>, u32) {
        let holes = &self.sums.holes;
        while let Some(hole) = holes.get(*cursor) {
            if hole.behind > slot {
                return ((hole.first <= slot).then_some(hole), hole.before);
            }
            *cursor += 1;
        }
        (None, self.sums.before.len() as u32 - 1)
    }

    /// How many slots of a window no other block shares, nor a page of which one has a part.
    pub(super) fn whole_slots(&self, fit: &Fit) -> u32 {
        let part_of = |index: u32| {
            let Mapping::Page(part) = self.slots.get(index as usize)?.mapping() else { return None };
            part.is_home.then(|| (u32::from(part.part), u32::from(part.slots - part.part)))
        };
        let (mut first, mut behind) = (self.index(self.run.start + self.slot - 1), self.index(self.run.end));
        if let Some((1.., slots)) = part_of(first) {
            first += slots;
        }
        if let Some((before, 2..)) = behind.checked_sub(1).and_then(part_of) {
            behind -= before + 1;
        }
        (fit.last + 1).min(behind).saturating_sub(fit.first.max(first))
    }

    /// Whether a page that would have to be taken back is only partly in the window, and its mapping cannot be undone.
    pub(super) fn cuts_page(&self, fit: &Fit) -> bool {
        let part_of = |index: u32| {
            let state = self.slots.get(index as usize)?;
            let Mapping::Page(PagePart { part, slots, is_home, .. }) = state.mapping() else { return None };
            let stays = !is_home && !self.passed.has_passed(state);
            stays.then_some((part, slots))
        };
        part_of(fit.first).is_some_and(|(part, _)| part > 0)
            || part_of(fit.last).is_some_and(|(part, slots)| part + 1 < slots)
    }
}

/// Those of the slots from `first` up to `behind` that were ever used.
fn used_slots(slots: &[SlotState], first: u32, behind: u32) -> &[SlotState] {
    slots.get(first as usize..slots.len().min(behind as usize)).unwrap_or_default()
}

/// The cost of a slot in a hole. From a table, since which it is cannot be predicted.
#[inline(always)]
fn cost(state: &SlotState, takeable: &PageSet, passed: PassedTakes) -> Cost {
    const MAP: Cost = Cost::calls(1);
    const UNDO_AND_MAP: Cost = Cost::calls(2);
    const TAKE_BACK: Cost = Cost::calls(0);
    const COSTS: [Cost; 8] = [Cost::BLOCKED, UNDO_AND_MAP, MAP, MAP, TAKE_BACK, TAKE_BACK, TAKE_BACK, TAKE_BACK];
    let bits = [state.has_one_of(takeable), state.is_unmapped().into(), passed.has_passed(state).into()];
    COSTS[(bits[0] << 2 | bits[1] << 1 | bits[2]) as usize % COSTS.len()]
}
