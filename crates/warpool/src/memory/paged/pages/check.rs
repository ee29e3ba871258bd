//! What must always hold.

use super::super::heap::{Heap, State};
use super::super::ids::HeapId;
use super::{PageId, PageTable, Slot};
use crate::memory::SegmentKind;

impl PageTable {
    /// Checks that the blocks of a heap and its pages agree. Returns the bytes of pages that belong to it.
    ///
    /// # Panics
    /// If they do not.
    pub(in crate::memory::paged) fn check_heap(&self, number: HeapId, heap: &Heap) -> u64 {
        for kind in [SegmentKind::Small, SegmentKind::Large] {
            for (id, block) in heap.ranges(kind).flatten().filter(|&(id, _)| !heap.is_in_segment(id)) {
                let range = heap.range_of(id);
                let is_hole = block.state() == State::Hole;
                let [first, last] =
                    [block.addr(), block.addr() + block.bytes() - 1].map(|addr| self.slot_index(range, addr));
                // After the last slot that was ever used there is nothing to look at.
                for index in first..=last.min(u32::try_from(self.slots(range).len()).expect("few slots")) {
                    let has_page = self.own_page(Slot { range, index }).is_some();
                    assert_eq!(has_page, !is_hole, "slot {index} of {block:?}");
                }
            }
        }
        let homes = self.mappings_of(number).into_iter().filter(|&(_, _, is_home)| is_home);
        homes.map(|(page, _, _)| self.page_bytes(page)).sum()
    }

    /// Checks every invariant.
    ///
    /// # Panics
    /// If one does not hold.
    pub(in crate::memory::paged) fn check(&self) {
        let mut bytes = 0;
        for (id, page) in (0..).map(PageId).zip(&self.pages) {
            let Some(page) = page else { continue };
            bytes += u64::from(page.slots) * self.slot_bytes;
            assert!(page.home.is_none_or(|home| page.is_mapped_at(home)), "{id:?} is mapped where it belongs");
            for &slot in &page.mapped {
                let is_home = page.home == Some(slot);
                for part in 0..page.slots {
                    let at = Slot { index: slot.index + part, ..slot };
                    let mapped =
                        self.slot(at).part().map(|at| (at.page, u32::from(at.part), at.slots.into(), at.is_home));
                    assert_eq!(mapped, Some((id, part, page.slots, is_home)), "{id:?} at {at:?}");
                }
            }
        }
        let segments: u64 = self.ranges.iter().filter(|map| map.segment.is_some()).map(|map| map.bytes).sum();
        assert_eq!(segments, self.segment_bytes, "bytes of segments");
        assert_eq!(bytes + segments, self.reserved.all.current, "bytes reserved");
        for &(page, slot) in &self.old {
            assert!(self.is_old_mapping(page, slot), "{page:?} at {slot:?} is an old mapping");
        }
        let without_home: std::collections::BTreeSet<PageId> = self.homeless_pages().collect();
        for (id, page) in (0..).map(PageId).zip(&self.pages) {
            let homeless = page.as_ref().is_some_and(|page| page.home.is_none());
            assert_eq!(homeless, without_home.contains(&id), "a page belongs somewhere, is spare or leaves");
        }
    }
}
