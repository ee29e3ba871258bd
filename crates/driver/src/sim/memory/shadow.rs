//! Shadow memory: for every byte the last write and the reads since, so that the next access can be checked against
//! them, and what an allocator reported about the byte.
//!
//! Bytes with the same history share a cell. A cell keeps only the reads that no later read is ordered after.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::sim::order::{Accessor, Epoch, HappensBefore, Operation, VectorClock};

/// What an allocator reported about a range.
#[derive(Clone, Debug)]
pub enum Suballocation {
    /// Allocated by call number `at` for work ordered after `epoch` and `clock`, after call number `freed_at` freed it.
    Allocated { at: u64, clock: Arc<VectorClock>, epoch: Epoch, freed_at: u64 },
    /// Freed by call number `at`.
    Freed { at: u64 },
}

/// An allocator's report that a range was allocated.
pub struct NewSuballocation<'a> {
    /// The number of the call.
    pub at: u64,
    /// The new work is ordered after these.
    pub clock: &'a Arc<VectorClock>,
    pub epoch: Epoch,
    /// Whether work that was captured before may use the range.
    pub in_place: bool,
}

/// Why an access is not protected.
#[derive(Clone, Debug)]
pub enum Conflict {
    /// Unordered with that earlier access.
    Unordered(Accessor),
    /// These bytes were never written.
    Uninitialized,
    /// An allocator reused the bytes for other work meanwhile.
    Reused,
    /// An allocator freed the bytes before this work was queued.
    Freed,
    /// An allocator freed the bytes after this work was captured, and reused them before it was launched.
    FreedSinceCapture,
}

#[derive(Clone, Debug, Default)]
struct Cell {
    end: u64,
    write: Option<Accessor>,
    reads: Vec<Accessor>,
}

impl Cell {
    /// Reports the accesses in this cell that conflict with a new one.
    fn conflicts(&self, write: bool, before: &HappensBefore<'_>, report: &mut impl FnMut(Conflict)) {
        if let Some(earlier) = &self.write
            && !before.includes(earlier)
        {
            report(Conflict::Unordered(*earlier));
        }
        if write {
            for earlier in self.reads.iter().filter(|earlier| !before.includes(earlier)) {
                report(Conflict::Unordered(*earlier));
            }
        }
    }

    /// Whether these bytes have no value yet. An allocation is recorded as a write, but gives them none.
    fn is_uninitialized(&self) -> bool {
        self.write.is_none_or(|earlier| earlier.operation == Operation::PoolAlloc)
    }

    fn set_written(&mut self, by: &Accessor) {
        self.write = Some(*by);
        self.reads.clear();
    }

    fn add_read(&mut self, by: &Accessor, before: &HappensBefore<'_>) {
        // What is ordered after this read is ordered after the reads before it.
        self.reads.retain(|earlier| !before.includes(earlier));
        self.reads.push(*by);
    }
}

/// The access history of backing memory.
#[derive(Debug, Default)]
pub struct Shadow {
    /// By first offset; without overlaps.
    cells: BTreeMap<u64, Cell>,
    /// By first offset, with the end; without overlaps.
    suballocations: BTreeMap<u64, (u64, Suballocation)>,
}

impl Shadow {
    /// Checks an access to `[start, end)` against the history, reports every conflict with its bytes, and adds the
    /// access to the history.
    pub fn access(
        &mut self,
        (start, end): (u64, u64),
        write: bool,
        by: &Accessor,
        before: &HappensBefore<'_>,
        report: &mut impl FnMut(Conflict, u64, u64),
    ) {
        let has_suballocations = !self.suballocations.is_empty();
        if start == end || (has_suballocations && self.conflicts_with_suballocations(start, end, by, report)) {
            // A conflict with the allocator explains all that would follow from it.
            return;
        }
        if let Some(cell) = self.cells.get_mut(&start)
            && cell.end == end
        {
            cell.conflicts(write, before, &mut |conflict| report(conflict, start, end));
            if write {
                cell.set_written(by);
            } else {
                if cell.is_uninitialized() {
                    report(Conflict::Uninitialized, start, end);
                }
                cell.add_read(by, before);
            }
            return;
        }
        self.split(start);
        self.split(end);
        if write { self.write(start, end, by, before, report) } else { self.read(start, end, by, before, report) }
    }

    fn write(
        &mut self,
        start: u64,
        end: u64,
        by: &Accessor,
        before: &HappensBefore<'_>,
        report: &mut impl FnMut(Conflict, u64, u64),
    ) {
        while let Some((&at, _)) = self.cells.range(start..end).next() {
            let cell = self.cells.remove(&at).expect("a key that was just found");
            cell.conflicts(true, before, &mut |conflict| report(conflict, at, cell.end));
        }
        self.cells.insert(start, Cell { end, write: Some(*by), reads: Vec::new() });
    }

    fn read(
        &mut self,
        start: u64,
        end: u64,
        by: &Accessor,
        before: &HappensBefore<'_>,
        report: &mut impl FnMut(Conflict, u64, u64),
    ) {
        let mut gaps = Vec::new();
        let mut from = start;
        for (&at, cell) in self.cells.range_mut(start..end) {
            if from < at {
                gaps.push((from, at));
            }
            from = cell.end;
            cell.conflicts(false, before, &mut |conflict| report(conflict, at, from));
            if cell.is_uninitialized() {
                report(Conflict::Uninitialized, at, from);
            }
            cell.add_read(by, before);
        }
        if from < end {
            gaps.push((from, end));
        }
        for (at, end) in gaps {
            report(Conflict::Uninitialized, at, end);
            self.cells.insert(at, Cell { end, write: None, reads: vec![*by] });
        }
    }

    /// Makes `at` a border between two cells, if it lies within one.
    fn split(&mut self, at: u64) {
        if let Some((_, cell)) = self.cells.range_mut(..at).next_back()
            && cell.end > at
        {
            let rest = cell.clone();
            cell.end = at;
            self.cells.insert(at, rest);
        }
    }

    /// An allocator allocated `[start, end)`. Reports the accesses that the new work is not ordered after.
    pub fn suballocate(
        &mut self,
        (start, end): (u64, u64),
        new: &NewSuballocation<'_>,
        before: &HappensBefore<'_>,
        report: &mut impl FnMut(&Accessor, u64, u64),
    ) {
        self.split(start);
        self.split(end);
        let mut reported = false;
        for (&at, cell) in self.cells.range(start..end) {
            for earlier in cell.write.iter().chain(&cell.reads).filter(|earlier| !before.includes(earlier)) {
                report(earlier, at, cell.end);
                reported = true;
            }
        }
        if reported {
            // The accesses of the new work would only repeat the report.
            self.forget_accesses(start, end);
        }
        // The bytes may have been freed by several calls.
        let mut from = start;
        let frees = if new.in_place { vec![(end, 0)] } else { self.frees_within(start, end) };
        for (until, freed_at) in frees {
            let clock = Arc::clone(new.clock);
            let allocated = Suballocation::Allocated { at: new.at, clock, epoch: new.epoch, freed_at };
            self.set_suballocation(from, until, allocated);
            from = until;
        }
    }

    /// Divides `[start, end)` into parts that were freed by one call each: the end of the part, and the number of the
    /// call; 0 if none freed it.
    fn frees_within(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (mut parts, mut from) = (Vec::new(), start);
        for (at, until, suballocation) in self.suballocations_within(start, end) {
            if from < at {
                parts.push((at, 0));
            }
            from = until.min(end);
            let (Suballocation::Allocated { freed_at, .. } | Suballocation::Freed { at: freed_at }) = *suballocation;
            parts.push((from, freed_at));
        }
        if from < end {
            parts.push((end, 0));
        }
        // Merges neighbours that the same call freed.
        parts.dedup_by(|next, part| {
            let same = next.1 == part.1;
            if same {
                part.0 = next.0;
            }
            same
        });
        parts
    }

    /// The suballocations that overlap `[start, end)`, each with its first and last offset.
    fn suballocations_within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, &Suballocation)> {
        let first = self.suballocations.range(..=start).next_back().map_or(start, |(&at, _)| at);
        let all = self.suballocations.range(first..end).map(|(&at, (until, reported))| (at, *until, reported));
        all.filter(move |&(_, until, _)| until > start)
    }

    /// An allocator freed `[start, end)` by call number `at`.
    pub fn free_suballocation(&mut self, start: u64, end: u64, at: u64) {
        self.set_suballocation(start, end, Suballocation::Freed { at });
    }

    fn set_suballocation(&mut self, start: u64, end: u64, suballocation: Suballocation) {
        self.forget_suballocations(start, end);
        self.suballocations.insert(start, (end, suballocation));
    }

    /// Forgets what an allocator reported about `[start, end)`.
    pub fn forget_suballocations(&mut self, start: u64, end: u64) {
        if let Some((_, (until, old))) = self.suballocations.range_mut(..start).next_back()
            && *until > start
        {
            let rest = (*until, old.clone());
            *until = start;
            self.suballocations.insert(start, rest);
        }
        while let Some((&at, _)) = self.suballocations.range(start..end).next() {
            let (until, old) = self.suballocations.remove(&at).expect("a key that was just found");
            if until > end {
                self.suballocations.insert(end, (until, old));
            }
        }
    }

    fn conflicts_with_suballocations(
        &self,
        start: u64,
        end: u64,
        by: &Accessor,
        report: &mut impl FnMut(Conflict, u64, u64),
    ) -> bool {
        let mut found = false;
        for (at, until, suballocation) in self.suballocations_within(start, end) {
            let conflict = match suballocation {
                Suballocation::Allocated { at, freed_at, .. } if by.queued_at >= *at => {
                    let stale = by.node.is_some_and(|instance| instance.captured_at < *freed_at);
                    stale.then_some(Conflict::FreedSinceCapture)
                }
                Suballocation::Allocated { clock, epoch, .. } => {
                    let same_timeline = epoch.timeline == by.epoch.timeline && by.epoch.seq <= epoch.seq;
                    (!same_timeline && !clock.covers(by.epoch)).then_some(Conflict::Reused)
                }
                Suballocation::Freed { at } => (by.queued_at > *at).then_some(Conflict::Freed),
            };
            if let Some(conflict) = conflict {
                report(conflict, at.max(start), until.min(end));
                found = true;
            }
        }
        found
    }

    fn forget_accesses(&mut self, start: u64, end: u64) {
        while let Some((&at, _)) = self.cells.range(start..end).next() {
            self.cells.remove(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StreamId;
    use crate::sim::order::TimelineId;

    fn epoch((timeline, seq): (u32, u64)) -> Epoch {
        Epoch { timeline: TimelineId(timeline), seq }
    }

    /// An access of operation `own`, which is ordered after `waited`.
    fn access(
        shadow: &mut Shadow,
        range: (u64, u64),
        write: bool,
        own: (u32, u64),
        waited: &[(u32, u64)],
    ) -> Vec<String> {
        let mut clock = VectorClock::default();
        for &other in waited {
            clock.add(epoch(other));
        }
        let by = Accessor {
            operation: Operation::Fill,
            epoch: epoch(own),
            number: own.1,
            node: None,
            stream: StreamId(u64::from(own.0)),
            queued_at: own.1 + 100 * u64::from(own.0),
        };
        let before = HappensBefore { epoch: by.epoch, clock: &clock, graph: None };
        let mut conflicts = Vec::new();
        shadow.access(range, write, &by, &before, &mut |conflict, from, to| {
            conflicts.push(match conflict {
                Conflict::Unordered(Accessor { epoch: Epoch { timeline, seq }, .. }) => {
                    format!("{}.{seq} {from}..{to}", timeline.0)
                }
                other => format!("{other:?} {from}..{to}"),
            });
        });
        conflicts
    }

    #[test]
    fn unordered_writes_conflict_where_they_overlap() {
        let mut shadow = Shadow::default();
        assert!(access(&mut shadow, (0, 100), true, (1, 1), &[]).is_empty());
        assert_eq!(access(&mut shadow, (50, 150), true, (2, 1), &[]), ["1.1 50..100"]);
        assert!(access(&mut shadow, (0, 150), true, (1, 2), &[(2, 1)]).is_empty());
    }

    #[test]
    fn reads_conflict_with_the_next_write_but_not_with_reads() {
        let mut shadow = Shadow::default();
        access(&mut shadow, (0, 10), true, (1, 1), &[]);
        assert!(access(&mut shadow, (0, 10), false, (2, 1), &[(1, 1)]).is_empty());
        assert!(access(&mut shadow, (0, 10), false, (3, 1), &[(1, 1)]).is_empty());
        assert_eq!(access(&mut shadow, (4, 6), true, (2, 2), &[(1, 1)]), ["3.1 4..6"]);
    }

    #[test]
    fn a_later_read_of_a_timeline_replaces_the_earlier() {
        let mut shadow = Shadow::default();
        for seq in 1..100 {
            access(&mut shadow, (0, 8), false, (1, seq), &[]);
        }
        assert_eq!(shadow.cells[&0].reads.len(), 1);
    }

    #[test]
    fn reads_of_unwritten_bytes_are_reported() {
        let mut shadow = Shadow::default();
        access(&mut shadow, (10, 20), true, (1, 1), &[]);
        assert_eq!(access(&mut shadow, (5, 25), false, (1, 2), &[]), ["Uninitialized 5..10", "Uninitialized 20..25"]);
    }

    #[test]
    fn reuse_conflicts_with_work_that_the_new_work_is_not_behind() {
        let mut shadow = Shadow::default();
        let clock = Arc::new(VectorClock::default());
        let allocated = Suballocation::Allocated { at: 500, clock, epoch: epoch((1, 3)), freed_at: 0 };
        shadow.set_suballocation(0, 64, allocated);
        assert!(access(&mut shadow, (0, 64), true, (1, 2), &[]).is_empty(), "queued before in the same stream");
        assert_eq!(access(&mut shadow, (0, 64), true, (2, 1), &[]), ["Reused 0..64"]);
        shadow.free_suballocation(16, 32, 0);
        assert_eq!(access(&mut shadow, (0, 64), false, (1, 2), &[]), ["Freed 16..32"]);
    }
}
