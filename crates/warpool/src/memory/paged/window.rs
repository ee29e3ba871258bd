//! Where a request goes that no free block can hold: the window of free addresses that needs the fewest driver calls;
//! of those, the one that needs the fewest further pages; of those, the lowest. A request that would run out of memory
//! otherwise needs the fewest further pages first.
//!
//! In some of the addresses pages may be mapped that were taken from there. A page that is free elsewhere is taken
//! back; a mapping of one that is in use is undone, if the stream has passed. Addresses that were never used need no
//! such call, so old mappings are left for as long as there are others: a program that comes back to the same sizes
//! finds its pages there.

use super::heap::{FreeRun, FreeRuns, Hole};
use super::pages::{Mapping, PageId, PageTable, PassedTakes, SlotState};

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

/// One slot of a run, as far as it matters here.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Cost {
    /// Pages that do not belong to it yet.
    pages: u32,
    /// Driver calls: mappings that are made, and old ones that are undone for them. Each costs about as much.
    calls: u32,
    /// Slots in which another page is mapped that is in use elsewhere.
    blocked: u32,
}

/// The best window for `bytes` in these runs. Holes are filled in units of `grid` bytes. `takeable` says whether a page
/// may be taken from where it belongs. `tightest`: pages count before driver calls.
pub(super) fn choose(
    table: &PageTable,
    runs: &FreeRuns,
    bytes: u64,
    grid: u64,
    tightest: bool,
    takeable: impl Fn(PageId) -> bool,
) -> Option<Window> {
    let key = |pages: u32, calls: u32, addr: u64| if tightest { (pages, calls, addr) } else { (calls, pages, addr) };
    let mut best: Option<((u32, u32, u64), Window)> = None;
    let with_least = |run| (least_pages(run, runs.holes_of(run), bytes, table), run);
    let mut by_least: Vec<(u32, &FreeRun)> = runs.iter().map(with_least).collect();
    // The best one is then found early, and the runs that cannot be better are not looked at.
    by_least.sort_unstable_by_key(|&(least, run)| (least, run.start));
    let mut sums = Sums::default();
    for (least, run) in by_least {
        if best.is_some_and(|(best, _)| key(least, 0, run.start) > best) {
            continue;
        }
        let costs = Costs::new(table, run, runs.holes_of(run), (bytes, grid), &takeable, &mut sums);
        costs.candidates(|addr| {
            let Some((cost, window)) = costs.of(addr) else { return };
            let key = key(cost.pages, cost.calls, addr);
            if best.is_none_or(|(other, _)| key < other) {
                best = Some((key, window));
            }
        });
    }
    best.map(|(_, window)| window)
}

/// No window of the run needs fewer pages: as many slots as it has outside of its holes have one.
fn least_pages(run: &FreeRun, holes: &[Hole], bytes: u64, table: &PageTable) -> u32 {
    let without: u64 = holes.iter().map(|hole| hole.end - hole.start).sum();
    // A block before, between and behind the holes has parts of two slots beside whole ones.
    let own = (run.end - run.start - without) / table.slot_bytes + 2 * (holes.len() as u64 + 1);
    u32::try_from((bytes / table.slot_bytes).saturating_sub(own)).unwrap_or(u32::MAX)
}

/// Costs by slot, kept from one run to the next for their memory. Only slots in holes cost something.
#[derive(Default)]
struct Sums {
    /// Of all slots in holes before each; at last of all.
    before: Vec<Cost>,
    /// How many slots in holes there are before each hole.
    slots_before: Vec<u32>,
    /// Slots that cost something else than the one before.
    edges: Vec<u32>,
}

/// Sums over the slots of a run, so that the cost of a window is a difference.
struct Costs<'a> {
    slots: &'a [SlotState],
    /// The sizes of pages are looked up in it.
    table: &'a PageTable,
    passed: PassedTakes,
    run: &'a FreeRun,
    /// Its holes, as far as it is looked at.
    holes: &'a [Hole],
    bytes: u64,
    slot: u64,
    grid: u64,
    base: u64,
    /// Where the run ends, as far as it is looked at.
    end: u64,
    sums: &'a mut Sums,
}

impl<'a> Costs<'a> {
    fn new(
        table: &'a PageTable,
        run: &'a FreeRun,
        holes: &'a [Hole],
        (bytes, grid): (u64, u64),
        takeable: &impl Fn(PageId) -> bool,
        sums: &'a mut Sums,
    ) -> Self {
        let (slot, base) = (table.slot_bytes, table.range(run.range).base);
        // Behind the last slot that was ever used, all windows cost the same.
        let used = base + u64::from(table.slots_used(run.range)) * slot;
        let end = run.end.min((used.max(run.start) + bytes + slot - base).next_multiple_of(grid) + base);
        let holes = &holes[..holes.partition_point(|hole| hole.start < end)];
        let (slots, passed) = (table.slots(run.range), table.passed_takes(run.range));
        let costs = Self { slots, table, passed, run, holes, bytes, slot, grid, base, end, sums };
        costs.sum(takeable)
    }

    /// Sums up the costs.
    fn sum(self, takeable: &impl Fn(PageId) -> bool) -> Self {
        let Sums { before, slots_before, edges } = &mut *self.sums;
        before.clear();
        slots_before.clear();
        edges.clear();
        let (base, slot, end) = (self.base, self.slot, self.end);
        let index = |addr: u64| u32::try_from((addr - base) / slot).expect("fewer than 2^32 slots");
        let mut sum = Cost::default();
        before.push(sum);
        if self.holes.first().is_none_or(|hole| self.run.start < hole.start) {
            edges.push(index(self.run.start));
        }
        for hole in self.holes {
            let mut previous = (self.run.start < hole.start).then(Cost::default);
            slots_before.push(u32::try_from(before.len() - 1).expect("fewer than 2^32 slots"));
            let behind = index(hole.end.min(end) - 1) + 1;
            for index in index(hole.start)..behind {
                let state = self.slots.get(index as usize).copied().unwrap_or_default();
                let cost = match state.mapping {
                    Mapping::Nothing => Cost { pages: 1, calls: 1, blocked: 0 },
                    Mapping::Page { page, .. } if takeable(page) => Cost { pages: 1, calls: 0, blocked: 0 },
                    Mapping::Page { .. } if self.passed.has_passed(&state) => Cost { pages: 1, calls: 2, blocked: 0 },
                    Mapping::Page { .. } | Mapping::Broken => Cost { pages: 1, calls: 0, blocked: 1 },
                };
                if previous.replace(cost) != Some(cost) {
                    edges.push(index);
                }
                sum.pages += cost.pages;
                sum.calls += cost.calls;
                sum.blocked += cost.blocked;
                before.push(sum);
            }
            if hole.end < end {
                edges.push(behind);
            }
        }
        edges.push(index(end - 1) + 1);
        self
    }

    fn index(&self, addr: u64) -> u32 {
        u32::try_from((addr - self.base) / self.slot).expect("fewer than 2^32 slots")
    }

    /// Windows that begin or end with the run or where the cost changes: moved from one such place towards the next, a
    /// window's cost changes steadily.
    fn candidates(&self, mut consider: impl FnMut(u64)) {
        let (start, end, bytes) = (self.run.start, self.end, self.bytes);
        if end - start < bytes {
            return;
        }
        consider(start);
        if end == self.run.end {
            consider(end - bytes);
        }
        for &edge in &self.sums.edges {
            let offset = u64::from(edge) * self.slot;
            let below = offset / self.grid * self.grid;
            let above = (below < offset).then_some(below + self.grid);
            for boundary in std::iter::once(below).chain(above) {
                let at = self.base + boundary;
                if (start..=end - bytes).contains(&at) {
                    consider(at);
                }
                if (start + bytes..=end).contains(&at) {
                    consider(at - bytes);
                }
            }
        }
    }

    /// The window of a block at `addr`, and its cost; `None` if it cannot be used.
    fn of(&self, addr: u64) -> Option<(Cost, Window)> {
        let down = |at: u64| self.base + (at - self.base) / self.grid * self.grid;
        // The first hole that ends behind an address, if that is in it, and how many slots in holes are before it.
        let hole_at = |at: u64| {
            let behind = self.holes.partition_point(|hole| hole.end <= at);
            let before = self.sums.slots_before.get(behind).copied();
            let before = before.unwrap_or_else(|| (self.sums.before.len() - 1) as u32);
            (self.holes.get(behind).filter(|hole| hole.start <= at), before)
        };
        let slots_in = |hole: &Hole, end: u64| ((end - hole.start) / self.slot) as u32;
        let (mut start, mut end) = (addr, addr + self.bytes);
        let (hole, mut from) = hole_at(start);
        if let Some(hole) = hole {
            start = down(start).max(hole.start);
            from += slots_in(hole, start);
        }
        let (hole, mut to) = hole_at(end - 1);
        if let Some(hole) = hole {
            end = (down(end - 1) + self.grid).min(hole.end);
            if end > self.end {
                return None;
            }
            to += slots_in(hole, end);
        }
        let (from, to) = (self.sums.before[from as usize], self.sums.before[to as usize]);
        let cost =
            Cost { pages: to.pages - from.pages, calls: to.calls - from.calls, blocked: to.blocked - from.blocked };
        let can_be_used = cost.blocked == 0 && !self.cuts_page(self.index(start), self.index(end - 1));
        can_be_used.then_some((cost, Window { addr, start, end, range: self.run.range, anchor: self.run.first }))
    }

    /// Whether a page that would have to be taken back is only partly in the window, and its mapping cannot be undone.
    fn cuts_page(&self, first: u32, last: u32) -> bool {
        let part_of = |index: u32| {
            let state = self.slots.get(index as usize)?;
            let Mapping::Page { page, part } = state.mapping else { return None };
            let stays = !state.is_home && !self.passed.has_passed(state);
            stays.then(|| (part, self.table.page(page).slots))
        };
        part_of(first).is_some_and(|(part, _)| part > 0) || part_of(last).is_some_and(|(part, slots)| part + 1 < slots)
    }
}
