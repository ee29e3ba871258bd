//! Short scripts and the blocks after them.

use warpool::memory::Settings;

use super::*;
use crate::budget::Budget;

const STREAM: u64 = 0;

fn new_heap(expandable_segments: bool) -> RecordedHeap {
    let rules = RecordedRules::new(&Settings { expandable_segments, ..Settings::default() });
    RecordedHeap::new(rules, &Budget::new(None))
}

/// The blocks by address, in MiB: `x` allocated, `p` pending free, `.` free.
fn picture(heap: &RecordedHeap) -> String {
    let name = |state| match state {
        BlockState::ActiveAllocated => 'x',
        BlockState::ActivePendingFree => 'p',
        BlockState::Inactive => '.',
    };
    heap.blocks().values().map(|block| format!("[{} {}]", name(block.state), block.bytes as f64 / MIB as f64)).collect()
}

#[test]
fn blocks_are_split_and_merged_as_recorded() {
    let mut heap = new_heap(false);
    heap.add_segment(20 * MIB, 20 * MIB, STREAM, None);
    heap.alloc(20 * MIB, 4 * MIB, 0).unwrap();
    heap.alloc(24 * MIB, 2 * MIB, 0).unwrap();
    assert_eq!(picture(&heap), "[x 4][x 2][. 14]");
    heap.free_requested(20 * MIB).unwrap();
    assert_eq!(picture(&heap), "[p 4][x 2][. 14]");
    heap.free_completed(20 * MIB).unwrap();
    heap.alloc(20 * MIB, 3 * MIB + 512, 0).unwrap();
    assert_eq!(picture(&heap), "[x 4][x 2][. 14]", "the rest is too small for a block");
    heap.free_completed(24 * MIB).unwrap();
    heap.free_completed(20 * MIB).unwrap();
    assert_eq!(picture(&heap), "[. 20]");
    heap.remove_segment(20 * MIB, 20 * MIB).unwrap();
    assert_eq!(heap.bytes_reserved(), 0);
}

#[test]
fn undoing_frees_restores_unsplit_blocks() {
    let mut heap = new_heap(false);
    heap.add_segment(20 * MIB, 20 * MIB, STREAM, None);
    heap.undo_free_completed(24 * MIB, 2 * MIB).unwrap();
    heap.undo_free_completed(20 * MIB, 3 * MIB + 512).unwrap();
    assert_eq!(picture(&heap), "[p 4][p 2][. 14]");
    heap.undo_free_requested(20 * MIB).unwrap();
    assert_eq!(heap.undo_free_requested(20 * MIB), None);
    let mut other_order = new_heap(false);
    other_order.add_segment(20 * MIB, 20 * MIB, STREAM, None);
    other_order.undo_free_completed(20 * MIB, 3 * MIB + 512).unwrap();
    other_order.undo_free_completed(24 * MIB, 2 * MIB).unwrap();
    assert_eq!(picture(&other_order), "[p 4][p 2][. 14]");
}

#[test]
fn expandable_segments_grow_and_shrink() {
    let mut heap = new_heap(true);
    let base = 1 << 40;
    let segment = heap.map(base, 20 * MIB, STREAM, None);
    heap.alloc(base, 18 * MIB, 0).unwrap();
    assert_eq!(heap.map(base + 20 * MIB, 20 * MIB, STREAM, None), segment);
    assert_eq!(picture(&heap), "[x 18][. 22]");
    heap.unmap(base + 20 * MIB, 20 * MIB).unwrap();
    assert_eq!((picture(&heap).as_str(), heap.segment(segment).end), ("[x 18][. 2]", base + 20 * MIB));
    assert_ne!(heap.map(base + 60 * MIB, 20 * MIB, STREAM, None), segment, "a segment grows at its end");
    heap.free_completed(base).unwrap();
    heap.unmap(base, 20 * MIB).unwrap();
    assert_eq!(heap.segment(segment).bytes, 0);
}

#[test]
fn uncertain_end_of_a_block_can_be_moved() {
    let mut heap = new_heap(false);
    heap.add_segment(20 * MIB, 20 * MIB, STREAM, None);
    heap.undo_free_completed(20 * MIB, 4 * MIB).unwrap();
    assert_eq!(heap.extend_block_before(24 * MIB, 2 * MIB), None, "more than stays unsplit");
    heap.extend_block_before(24 * MIB, MIB / 2).unwrap();
    assert_eq!(picture(&heap), "[p 4.5][. 15.5]");
}

#[test]
fn smaller_fitting_block_is_preferred() {
    let mut heap = new_heap(false);
    let first = heap.add_segment(100 * MIB, 20 * MIB, STREAM, None);
    heap.add_segment(200 * MIB, 30 * MIB, STREAM, None);
    heap.keep_free_lists();
    assert_eq!(heap.preferred_blocks(STREAM, 15 * MIB, Some(200 * MIB)), [(100 * MIB, first)]);
    assert_eq!(heap.preferred_blocks(STREAM, 15 * MIB, Some(100 * MIB)), []);
    assert_eq!(heap.preferred_blocks(STREAM, 25 * MIB, Some(200 * MIB)), []);
    assert_eq!(heap.preferred_blocks(STREAM, 15 * MIB, None).len(), 2);
    assert_eq!(heap.preferred_blocks(7, 15 * MIB, None), []);
}
