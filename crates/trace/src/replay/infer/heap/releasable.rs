//! Tracks which segments could be returned to the driver, at least in part. Only changes since the last release are
//! kept, so that a recording with many releases and many segments does not list all segments at each release.

use rustc_hash::FxHashMap;

use super::SegmentId;

/// The free blocks that make a segment releasable. Tracks nothing by default.
#[derive(Clone, Debug, Default)]
pub(super) struct Releasable {
    is_tracking: bool,
    /// By address.
    blocks: FxHashMap<u64, ReleasableBlock>,
    /// How many of them were added for each segment since the last call of `take_changes`, less those removed.
    changes: FxHashMap<SegmentId, i32>,
    unused_large: usize,
    bytes: u64,
}

/// A free block of which at least a part could be returned.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReleasableBlock {
    pub segment: SegmentId,
    /// Whether it is a whole large segment that is not expandable.
    pub is_unused_large: bool,
    /// How much could be returned.
    pub bytes: u64,
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

    /// All bytes that could be returned.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn add(&mut self, addr: u64, block: ReleasableBlock) {
        if self.blocks.insert(addr, block).is_none() {
            self.unused_large += usize::from(block.is_unused_large);
            self.bytes = self.bytes.saturating_add(block.bytes);
            self.change(block.segment, 1);
        }
    }

    #[inline]
    pub fn remove(&mut self, addr: u64) {
        if self.blocks.is_empty() {
            return;
        }
        if let Some(block) = self.blocks.remove(&addr) {
            self.unused_large -= usize::from(block.is_unused_large);
            self.bytes = self.bytes.saturating_sub(block.bytes);
            self.change(block.segment, -1);
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
