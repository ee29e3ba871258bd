//! The blocks that allocators have given out, so that an access that runs from one into the next is found.
//!
//! Both are mapped and in use, so nothing else is wrong with such an access: a real device would just overwrite the
//! neighbour. Only blocks that existed when the work was queued count: stream order allows their memory to be given out
//! again, divided differently, while the work has yet to run. Nodes of a graph are not checked, since the blocks at
//! their capture are not known. Copies and fills of whole pages are not checked either: an allocator uses them to move
//! and clear its segments.

use std::collections::BTreeMap;

use super::Memory;
use super::access::AccessContext;
use crate::DevicePtr;
use crate::sim::order::{HazardKind, HazardRange, Operation};

/// The pages that physical memory has at least.
const PAGE: u64 = 2 << 20;

/// Blocks by their start; they do not overlap.
#[derive(Debug, Default)]
pub struct Blocks {
    /// The end, and the number of the call that reported the block.
    ends: BTreeMap<u64, (u64, u64)>,
}

impl Blocks {
    /// An allocator gave out a block, by call number `at`.
    pub fn add(&mut self, ptr: DevicePtr, bytes: u64, at: u64) {
        self.remove(ptr, bytes);
        self.ends.insert(ptr.0, (ptr.0.saturating_add(bytes), at));
    }

    /// Removes the blocks of a range.
    pub fn remove(&mut self, ptr: DevicePtr, bytes: u64) {
        let end = ptr.0.saturating_add(bytes);
        while let Some((&start, _)) = self.ends.range(..end).next_back().filter(|(_, (to, _))| *to > ptr.0) {
            self.ends.remove(&start);
        }
    }

    /// Start and end of the block that contains `ptr`, if it was given out before call number `before`.
    pub fn containing(&self, ptr: DevicePtr, before: u64) -> Option<(u64, u64)> {
        let (&start, &(end, at)) = self.ends.range(..=ptr.0).next_back()?;
        (ptr.0 < end && at < before).then_some((start, end))
    }
}

impl Memory {
    /// Logs an access that begins in one block, or in one allocation of the driver, and ends in another.
    pub(super) fn check_block(&self, ptr: DevicePtr, bytes: u64, by: &mut AccessContext<'_>) {
        let is_checked = match by.accessor.operation {
            Operation::Kernel(_) => true,
            Operation::Fill => !(ptr.0.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE)),
            _ => false,
        };
        if !is_checked || by.accessor.node.is_some() {
            return;
        }
        let block_of = |ptr| self.blocks.containing(ptr, by.accessor.queued_at);
        let region = || self.space.region_at(ptr.0).map(|(start, size, _)| (start, start + size));
        let Some((start, end)) = block_of(ptr).or_else(region) else { return };
        let Some(beyond) = ptr.0.checked_add(bytes).and_then(|to| to.checked_sub(end)).filter(|&beyond| beyond > 0)
        else {
            return;
        };
        let neighbour = DevicePtr(end);
        if self.space.region_at(end).is_none() {
            // Not mapped: an access of its own kind.
            return;
        }
        let names = by.hazards.names();
        let into = match (names.of_memory(neighbour), block_of(neighbour)) {
            (Some(label), Some((_, next))) => format!("{label:?}, a block of {} bytes", next - end),
            (_, Some((_, next))) => format!("a block of {} bytes", next - end),
            (_, None) if block_of(ptr).is_some() => "memory that no block uses".to_owned(),
            (_, None) => "another allocation".to_owned(),
        };
        let why = format!(
            "it runs {beyond} bytes past the end of its block ({} bytes at {}), into {into}",
            end - start,
            DevicePtr(start)
        );
        let range = HazardRange::new(None, ptr, 0, bytes);
        by.hazards.add_access(HazardKind::BlockOverrun, (None, &by.accessor), start, (range, ptr), || why, by.now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_replace_what_they_overlap() {
        let mut blocks = Blocks::default();
        let at = |blocks: &Blocks, ptr| blocks.containing(DevicePtr(ptr), 10);
        blocks.add(DevicePtr(100), 50, 1);
        blocks.add(DevicePtr(150), 50, 2);
        assert_eq!((at(&blocks, 99), at(&blocks, 149), at(&blocks, 150)), (None, Some((100, 150)), Some((150, 200))));
        assert_eq!(blocks.containing(DevicePtr(150), 2), None, "it was given out later");
        blocks.add(DevicePtr(140), 20, 3);
        assert_eq!((at(&blocks, 120), at(&blocks, 159), at(&blocks, 170)), (None, Some((140, 160)), None));
        blocks.remove(DevicePtr(0), 141);
        assert_eq!(at(&blocks, 150), None);
    }
}
