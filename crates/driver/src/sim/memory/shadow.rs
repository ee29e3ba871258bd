//! What is remembered about who touched which bytes, so that the next one can be checked against them.
//!
//! Bytes with the same history form a cell: the last write, and the reads since that nobody has ordered themselves
//! behind. Cells belong to memory itself, not to addresses, so that one piece mapped twice has one history. Beside them
//! stand the marks of an allocator that keeps its own books.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::sim::order::{Actor, Frontier, Label, Order, Stamp};

/// What an allocator said about a range.
#[derive(Clone, Debug)]
pub enum Mark {
    /// Handed out by call number `at`, to work behind `frontier` and `stamp`, after call number `returned` took it
    /// back.
    HandedOut { at: u64, frontier: Arc<Frontier>, stamp: Stamp, returned: u64 },
    /// Taken back by call number `at`.
    Returned { at: u64 },
}

/// Why an access is not protected.
#[derive(Clone, Debug)]
pub enum Clash {
    /// No order with that earlier access.
    Unordered(Actor),
    /// Nobody has written these bytes.
    Unwritten,
    /// An allocator handed the bytes to somebody else meanwhile.
    HandedOut,
    /// An allocator took the bytes back before this work was queued.
    Returned,
    /// An allocator took the bytes back after this work was captured, and handed them out again before it was launched.
    ReturnedSinceCapture,
}

#[derive(Clone, Debug, Default)]
struct Cell {
    end: u64,
    write: Option<Actor>,
    reads: Vec<Actor>,
}

impl Cell {
    /// What in this cell clashes with an access.
    fn clashes(&self, write: bool, order: &Order<'_>, report: &mut impl FnMut(Clash)) {
        if let Some(earlier) = &self.write
            && !order.covers(earlier)
        {
            report(Clash::Unordered(*earlier));
        }
        if write {
            for earlier in self.reads.iter().filter(|earlier| !order.covers(earlier)) {
                report(Clash::Unordered(*earlier));
            }
        }
    }

    /// Whether nobody has given these bytes a value. An allocation comes first in their history, but gives them none.
    fn is_unwritten(&self) -> bool {
        self.write.is_none_or(|earlier| earlier.label == Label::PoolAlloc)
    }

    fn set_written(&mut self, who: &Actor) {
        self.write = Some(*who);
        self.reads.clear();
    }

    fn add_read(&mut self, who: &Actor, order: &Order<'_>) {
        // Whoever is ordered behind this read is ordered behind the reads that this one is behind.
        self.reads.retain(|earlier| !order.covers(earlier));
        self.reads.push(*who);
    }
}

/// The history of one piece of memory.
#[derive(Debug, Default)]
pub struct Shadow {
    cells: BTreeMap<u64, Cell>,
    marks: BTreeMap<u64, (u64, Mark)>,
}

impl Shadow {
    /// Checks an access to `[start, end)` against the history, reports every clash with its bytes, and adds it to the
    /// history.
    pub fn touch(
        &mut self,
        (start, end): (u64, u64),
        write: bool,
        who: &Actor,
        order: &Order<'_>,
        report: &mut impl FnMut(Clash, u64, u64),
    ) {
        if start == end || (!self.marks.is_empty() && self.clashes_with_marks(start, end, who, report)) {
            // A clash with the allocator's books explains all that would follow from it.
            return;
        }
        if let Some(cell) = self.cells.get_mut(&start)
            && cell.end == end
        {
            cell.clashes(write, order, &mut |clash| report(clash, start, end));
            if write {
                cell.set_written(who);
            } else {
                if cell.is_unwritten() {
                    report(Clash::Unwritten, start, end);
                }
                cell.add_read(who, order);
            }
            return;
        }
        self.split(start);
        self.split(end);
        if write { self.write(start, end, who, order, report) } else { self.read(start, end, who, order, report) }
    }

    fn write(
        &mut self,
        start: u64,
        end: u64,
        who: &Actor,
        order: &Order<'_>,
        report: &mut impl FnMut(Clash, u64, u64),
    ) {
        while let Some((&at, _)) = self.cells.range(start..end).next() {
            let cell = self.cells.remove(&at).expect("a key that was just found");
            cell.clashes(true, order, &mut |clash| report(clash, at, cell.end));
        }
        self.cells.insert(start, Cell { end, write: Some(*who), reads: Vec::new() });
    }

    fn read(&mut self, start: u64, end: u64, who: &Actor, order: &Order<'_>, report: &mut impl FnMut(Clash, u64, u64)) {
        let mut gaps = Vec::new();
        let mut from = start;
        for (&at, cell) in self.cells.range_mut(start..end) {
            if from < at {
                gaps.push((from, at));
            }
            from = cell.end;
            cell.clashes(false, order, &mut |clash| report(clash, at, from));
            if cell.is_unwritten() {
                report(Clash::Unwritten, at, from);
            }
            cell.add_read(who, order);
        }
        if from < end {
            gaps.push((from, end));
        }
        for (at, end) in gaps {
            report(Clash::Unwritten, at, end);
            self.cells.insert(at, Cell { end, write: None, reads: vec![*who] });
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

    /// Notes that an allocator handed out `[start, end)`. Reports who still uses it.
    pub fn hand_out(
        &mut self,
        (start, end): (u64, u64),
        (at, frontier, stamp): (u64, &Arc<Frontier>, Stamp),
        order: &Order<'_>,
        report: &mut impl FnMut(&Actor, u64, u64),
    ) {
        self.split(start);
        self.split(end);
        let mut reported = false;
        for (&at, cell) in self.cells.range(start..end) {
            for earlier in cell.write.iter().chain(&cell.reads).filter(|earlier| !order.covers(earlier)) {
                report(earlier, at, cell.end);
                reported = true;
            }
        }
        if reported {
            // Said once: the new owner's own accesses would only repeat it.
            self.forget(start, end);
        }
        // What was taken back before may have been several pieces, at several times.
        let mut from = start;
        for (until, returned) in self.returns_within(start, end) {
            self.mark(from, until, Mark::HandedOut { at, frontier: Arc::clone(frontier), stamp, returned });
            from = until;
        }
    }

    /// Cuts `[start, end)` into pieces that were taken back by one call each: where each ends, and that call's number;
    /// 0 if none did.
    fn returns_within(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (mut pieces, mut from) = (Vec::new(), start);
        for (at, until, mark) in self.marks_within(start, end) {
            if from < at {
                pieces.push((at, 0));
            }
            from = until.min(end);
            let (Mark::HandedOut { returned, .. } | Mark::Returned { at: returned }) = *mark;
            pieces.push((from, returned));
        }
        if from < end {
            pieces.push((end, 0));
        }
        // Neighbours with the same past are one piece.
        pieces.dedup_by(|next, piece| {
            let same = next.1 == piece.1;
            if same {
                piece.0 = next.0;
            }
            same
        });
        pieces
    }

    /// The marks on `[start, end)`, with where each begins and ends.
    fn marks_within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, &Mark)> {
        let first = self.marks.range(..=start).next_back().map_or(start, |(&at, _)| at);
        let marks = self.marks.range(first..end).map(|(&at, (until, mark))| (at, *until, mark));
        marks.filter(move |&(_, until, _)| until > start)
    }

    /// Sets an allocator's mark on `[start, end)`, in place of what was marked there.
    pub fn mark(&mut self, start: u64, end: u64, mark: Mark) {
        self.unmark(start, end);
        self.marks.insert(start, (end, mark));
    }

    /// Takes away what was marked on `[start, end)`.
    pub fn unmark(&mut self, start: u64, end: u64) {
        if let Some((_, (until, old))) = self.marks.range_mut(..start).next_back()
            && *until > start
        {
            let rest = (*until, old.clone());
            *until = start;
            self.marks.insert(start, rest);
        }
        while let Some((&at, _)) = self.marks.range(start..end).next() {
            let (until, old) = self.marks.remove(&at).expect("a key that was just found");
            if until > end {
                self.marks.insert(end, (until, old));
            }
        }
    }

    fn clashes_with_marks(&self, start: u64, end: u64, who: &Actor, report: &mut impl FnMut(Clash, u64, u64)) -> bool {
        let mut clashed = false;
        for (at, until, mark) in self.marks_within(start, end) {
            let clash = match mark {
                Mark::HandedOut { at, returned, .. } if who.at >= *at => {
                    let stale = who.point.is_some_and(|point| point.captured_at < *returned);
                    stale.then_some(Clash::ReturnedSinceCapture)
                }
                Mark::HandedOut { frontier, stamp, .. } => {
                    let known =
                        frontier.covers(who.stamp) || (stamp.lane == who.stamp.lane && who.stamp.seq <= stamp.seq);
                    (!known).then_some(Clash::HandedOut)
                }
                Mark::Returned { at } => (who.at > *at).then_some(Clash::Returned),
            };
            if let Some(clash) = clash {
                report(clash, at.max(start), until.min(end));
                clashed = true;
            }
        }
        clashed
    }

    /// Forgets who touched `[start, end)`.
    fn forget(&mut self, start: u64, end: u64) {
        while let Some((&at, _)) = self.cells.range(start..end).next() {
            self.cells.remove(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StreamId;

    /// Work number `seq` of `lane`, which knows of `seen`.
    fn access(shadow: &mut Shadow, range: (u64, u64), write: bool, me: (u32, u64), seen: &[(u32, u64)]) -> Vec<String> {
        let stamp = Stamp { lane: me.0, seq: me.1 };
        let mut base = Frontier::default();
        for &(lane, seq) in seen {
            base.add(Stamp { lane, seq });
        }
        let who = Actor {
            label: Label::Fill,
            stamp,
            point: None,
            stream: StreamId(u64::from(me.0)),
            at: me.1 + 100 * u64::from(me.0),
        };
        let order = Order { stamp, base: &base, graph: None };
        let mut clashes = Vec::new();
        shadow.touch(range, write, &who, &order, &mut |clash, from, to| {
            clashes.push(match clash {
                Clash::Unordered(other) => format!("{}.{} {from}..{to}", other.stamp.lane, other.stamp.seq),
                other => format!("{other:?} {from}..{to}"),
            });
        });
        clashes
    }

    #[test]
    fn writes_of_two_lanes_clash_where_they_overlap() {
        let mut shadow = Shadow::default();
        assert!(access(&mut shadow, (0, 100), true, (1, 1), &[]).is_empty());
        assert_eq!(access(&mut shadow, (50, 150), true, (2, 1), &[]), ["1.1 50..100"]);
        assert!(access(&mut shadow, (0, 150), true, (1, 2), &[(2, 1)]).is_empty());
    }

    #[test]
    fn reads_do_not_clash_with_reads_but_with_the_next_write() {
        let mut shadow = Shadow::default();
        access(&mut shadow, (0, 10), true, (1, 1), &[]);
        assert!(access(&mut shadow, (0, 10), false, (2, 1), &[(1, 1)]).is_empty());
        assert!(access(&mut shadow, (0, 10), false, (3, 1), &[(1, 1)]).is_empty());
        assert_eq!(access(&mut shadow, (4, 6), true, (2, 2), &[(1, 1)]), ["3.1 4..6"]);
    }

    #[test]
    fn a_later_read_of_the_same_lane_stands_for_the_earlier() {
        let mut shadow = Shadow::default();
        for seq in 1..100 {
            access(&mut shadow, (0, 8), false, (1, seq), &[]);
        }
        assert_eq!(shadow.cells[&0].reads.len(), 1);
    }

    #[test]
    fn unwritten_bytes_are_told_apart_from_written_ones() {
        let mut shadow = Shadow::default();
        access(&mut shadow, (10, 20), true, (1, 1), &[]);
        assert_eq!(access(&mut shadow, (5, 25), false, (1, 2), &[]), ["Unwritten 5..10", "Unwritten 20..25"]);
    }

    #[test]
    fn a_new_owner_excuses_only_those_it_comes_after() {
        let mut shadow = Shadow::default();
        let frontier = Arc::new(Frontier::default());
        shadow.mark(0, 64, Mark::HandedOut { at: 500, frontier, stamp: Stamp { lane: 1, seq: 3 }, returned: 0 });
        assert!(access(&mut shadow, (0, 64), true, (1, 2), &[]).is_empty(), "queued before in the same stream");
        assert_eq!(access(&mut shadow, (0, 64), true, (2, 1), &[]), ["HandedOut 0..64"]);
        shadow.mark(16, 32, Mark::Returned { at: 0 });
        assert_eq!(access(&mut shadow, (0, 64), false, (1, 2), &[]), ["Returned 16..32"]);
    }
}
