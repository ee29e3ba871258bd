//! The memory that the allocator had reserved from the driver: segments, and the mapped parts of expandable segments.

use std::collections::BTreeMap;

use warpool::memory::report::SegmentKind;

use crate::replay::{HeapState, StateChange};

/// Reserved memory, from one position to another. If a part is returned, the range ends, and the rest becomes another
/// range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedRange {
    /// The position after its event; 0 if that is not in the history.
    pub from: u64,
    /// The position from which on it is returned; `None` if it never was.
    pub until: Option<u64>,
    /// Its address.
    pub addr: u64,
    /// Its size.
    pub bytes: u64,
    /// The stream, by the driver's handle.
    pub stream: u64,
    /// Whether it serves large or small requests.
    pub kind: SegmentKind,
    /// Which pool it is in; 0 is the default pool. Private pools are numbered as they appear.
    pub pool: u32,
    /// Its segment: mapped parts of one expandable segment have the same.
    pub segment: u32,
}

impl ReservedRange {
    /// Whether it is reserved at a position.
    #[must_use]
    pub fn is_reserved_at(&self, position: u64) -> bool {
        self.from <= position && self.until.is_none_or(|until| position < until)
    }
}

/// The ranges while events are seen.
pub(super) struct Ranges {
    open: BTreeMap<u64, ReservedRange>,
    ended: Vec<ReservedRange>,
}

impl Ranges {
    pub fn new(start: &HeapState) -> Self {
        let mut ranges = Self { open: BTreeMap::new(), ended: Vec::new() };
        for block in &start.blocks {
            let Some(segment) = block.segment else { continue };
            let before = ranges.open.range_mut(..block.addr).next_back();
            match before.filter(|(_, it)| it.addr.checked_add(it.bytes) == Some(block.addr) && it.segment == segment) {
                Some((_, range)) => range.bytes = range.bytes.saturating_add(block.bytes),
                None => {
                    let (stream, kind, pool) = (block.stream, block.kind, block.pool.0);
                    let (from, until, addr, bytes) = (0, None, block.addr, block.bytes);
                    ranges.open.insert(addr, ReservedRange { from, until, addr, bytes, stream, kind, pool, segment });
                }
            }
        }
        ranges
    }

    pub fn see(&mut self, position: u64, change: StateChange) {
        match change {
            StateChange::Reserved { addr, bytes, stream, kind, pool, segment } => {
                let (from, until, pool) = (position, None, pool.0);
                let range = ReservedRange { from, until, addr, bytes, stream, kind, pool, segment };
                if let Some(before) = self.open.insert(addr, range) {
                    self.ended.push(ReservedRange { until: Some(position), ..before });
                }
            }
            StateChange::Released { addr, bytes } => self.release(position, addr, addr.saturating_add(bytes)),
            _ => {}
        }
    }

    /// Ends the ranges that overlap some addresses, and begins new ones for the rest of them.
    fn release(&mut self, position: u64, addr: u64, end: u64) {
        let overlaps = |it: &ReservedRange| it.addr < end && it.addr.saturating_add(it.bytes) > addr;
        let below = self.open.range(..addr).next_back().filter(|(_, it)| overlaps(it)).map(|(&at, _)| at);
        let within: Vec<u64> = below.into_iter().chain(self.open.range(addr..end).map(|(&at, _)| at)).collect();
        for at in within {
            let Some(range) = self.open.remove(&at) else { continue };
            self.ended.push(ReservedRange { until: Some(position), ..range });
            let range_end = range.addr.saturating_add(range.bytes);
            for (from, to) in [(range.addr, addr), (end, range_end)] {
                if from < to {
                    self.open.insert(from, ReservedRange { from: position, addr: from, bytes: to - from, ..range });
                }
            }
        }
    }

    /// The ranges in the order of their events.
    pub fn finish(mut self) -> Vec<ReservedRange> {
        self.ended.extend(self.open.into_values());
        // A range that began and ended with the same event is dropped.
        self.ended.retain(|range| range.until != Some(range.from));
        self.ended.sort_unstable_by_key(|range| (range.from, range.addr));
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::PoolKey;

    #[test]
    fn a_part_that_is_returned_leaves_the_rest() {
        let mut ranges = Ranges::new(&HeapState::default());
        let (stream, kind, pool, segment) = (0, SegmentKind::Large, PoolKey::DEFAULT, 0);
        ranges.see(1, StateChange::Reserved { addr: 100, bytes: 60, stream, kind, pool, segment });
        ranges.see(5, StateChange::Released { addr: 120, bytes: 20 });
        ranges.see(9, StateChange::Released { addr: 100, bytes: 20 });
        let text = |range: &ReservedRange| {
            let until = range.until.map_or_else(String::new, |until| until.to_string());
            format!("{}+{} {}..{until}", range.addr, range.bytes, range.from)
        };
        let found: Vec<String> = ranges.finish().iter().map(text).collect();
        assert_eq!(found, ["100+60 1..5", "100+20 5..9", "140+20 5.."]);
    }
}
