//! Which segments could be returned to the driver, at least in part: what changed since the last release, so that a
//! recording with many releases and many segments need not list them all at each.

use rustc_hash::FxHashMap;

use super::SegmentId;

/// The free blocks that make a segment releasable. Tracks nothing by default.
#[derive(Clone, Debug, Default)]
pub(super) struct Releasable {
    is_tracking: bool,
    /// By address: the segment, and whether it is a whole large segment that is not expandable.
    blocks: FxHashMap<u64, (SegmentId, bool)>,
    /// How many of them were added for each segment since the last call of `take_changes`, less those removed.
    changes: FxHashMap<SegmentId, i32>,
    unused_large: usize,
}

impl Releasable {
    pub fn tracking() -> Self {
        Self { is_tracking: true, ..Self::default() }
    }

    #[inline]
    pub fn is_tracking(&self) -> bool {
        self.is_tracking
    }

    pub fn has_unused_large(&self) -> bool {
        self.unused_large > 0
    }

    pub fn add(&mut self, addr: u64, segment: SegmentId, is_unused_large: bool) {
        if self.blocks.insert(addr, (segment, is_unused_large)).is_none() {
            self.unused_large += usize::from(is_unused_large);
            self.change(segment, 1);
        }
    }

    #[inline]
    pub fn remove(&mut self, addr: u64) {
        if self.blocks.is_empty() {
            return;
        }
        if let Some((segment, is_unused_large)) = self.blocks.remove(&addr) {
            self.unused_large -= usize::from(is_unused_large);
            self.change(segment, -1);
        }
    }

    /// The changes since the last call, in the order of segments.
    pub fn take_changes(&mut self) -> Vec<(SegmentId, i32)> {
        let mut changes: Vec<(SegmentId, i32)> = self.changes.drain().collect();
        changes.sort_unstable();
        changes
    }

    fn change(&mut self, segment: SegmentId, by: i32) {
        let change = self.changes.entry(segment).or_default();
        *change += by;
        if *change == 0 {
            self.changes.remove(&segment);
        }
    }
}
