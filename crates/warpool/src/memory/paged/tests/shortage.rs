//! Requests when memory is short, step by step.

use super::machine::{DEVICE, MIB, Machine};
use crate::defect::Defect;
use crate::memory::{Allocation, DeviceAllocator as _, MemPoolId, PoolOptions, PrivatePools as _, Request, Settings};

/// A block that its stream has written to.
fn allocate(machine: &Machine, stream: usize, bytes: u64) -> Allocation {
    let stream = &machine.streams[stream];
    let block = machine.paged.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap();
    machine.write_tag(&block, 1, stream);
    machine.paged.check();
    block
}

/// An old mapping, of a page that is in use elsewhere, is in the only place where the request needs no further page.
#[test]
fn old_mappings_make_no_request_run_out_of_memory() {
    let machine = Machine::with_capacity(40 * MIB, 2, Settings::default());
    let paged = &machine.paged;
    let allocate = |stream: usize, bytes: u64| allocate(&machine, stream, bytes);
    // Three pages and one byte of a fourth, which the next block shares.
    allocate(0, 6 * MIB + 1);
    let next = allocate(0, 2 * MIB);
    paged.free(next).unwrap();
    let free_later = allocate(1, 6 * MIB);
    allocate(1, 26 * MIB);
    assert_eq!(paged.page_stats(DEVICE).unwrap().reserved_bytes, 40 * MIB);
    assert_eq!(paged.page_stats(DEVICE).unwrap().totals.taken, 1, "the page that was free");
    paged.free(free_later).unwrap();
    // What is left of the fourth page, and three more.
    allocate(0, 8 * MIB - 1024);
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!(machine.defect(), None);
}

/// The first stream has two places for 26 MiB: one of twelve slots between blocks, whose pages the other stream has
/// now, and one of thirteen slots, of which only the last has no page. The device is full.
fn two_places(is_paused: bool) -> Machine {
    let machine = Machine::with_capacity(56 * MIB, 2, Settings::default());
    if is_paused {
        machine.sim.pause_stream(machine.streams[0].id()).unwrap();
    }
    let allocate = |stream: usize, bytes: u64| allocate(&machine, stream, bytes);
    allocate(0, 3 * MIB);
    let between = allocate(0, 26 * MIB);
    allocate(0, 3 * MIB);
    let last = allocate(0, 24 * MIB);
    machine.paged.free(between).unwrap();
    allocate(1, 24 * MIB);
    machine.paged.free(last).unwrap();
    let stats = machine.paged.page_stats(DEVICE).unwrap();
    assert_eq!((stats.reserved_bytes, stats.totals.taken), (56 * MIB, 12));
    machine
}

/// A request that would otherwise fail goes where it needs the fewest slots, however many calls that takes.
fn the_fewest_slots_count_first() {
    let machine = two_places(false);
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    allocate(&machine, 0, 26 * MIB);
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!(machine.defect(), None);
}

/// It waits for the work that may use the pages that were there before.
fn old_mappings_are_waited_for() {
    let machine = two_places(true);
    allocate(&machine, 0, 26 * MIB);
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!(machine.defect(), None);
}

/// Two free pages of two slots are beside a hole of two slots. The request has five: there it would leave half of one
/// page free, which no other slot can get, and two slots more are too many. At other addresses the pages are enough.
#[test]
fn a_page_that_a_window_cuts_counts_whole() {
    let machine = Machine::with_capacity(14 * MIB, 2, Settings::default());
    let allocate = |stream: usize, bytes: u64, slots: u32| {
        machine.paged.set_page_sizes(if slots == 2 { 0 } else { u64::MAX }, u64::MAX);
        allocate(&machine, stream, bytes)
    };
    let below = allocate(0, 4 * MIB, 2);
    let between = allocate(0, 4 * MIB, 1);
    let above = allocate(0, 4 * MIB, 2);
    allocate(0, 2 * MIB, 1);
    machine.paged.free(between).unwrap();
    machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    let elsewhere = allocate(1, 2 * MIB, 1);
    allocate(1, 2 * MIB, 1);
    let stats = machine.paged.page_stats(DEVICE).unwrap();
    assert_eq!((stats.pages, stats.reserved_bytes, stats.totals.taken), (5, 14 * MIB, 0));
    [below, above, elsewhere].into_iter().for_each(|block| machine.paged.free(block).unwrap());
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    allocate(0, 10 * MIB, 1);
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!(machine.defect(), None);
}

/// Its pages have 2 MiB: there is no room for a larger one.
fn the_last_pages_are_small() {
    let machine = Machine::with_capacity(42 * MIB, 2, Settings::default());
    machine.paged.set_page_sizes(0, u64::MAX);
    allocate(&machine, 1, 40 * MIB);
    allocate(&machine, 0, 2 * MIB);
    assert_eq!(machine.paged.page_stats(DEVICE).unwrap().reserved_bytes, 42 * MIB);
}

/// Pages of pools that are marked for it are taken, and only then.
fn pools_that_are_marked_give_pages() {
    let machine = Machine::with_capacity(40 * MIB, 2, Settings::default());
    let paged = &machine.paged;
    let pool = paged.create_pool(DEVICE, PoolOptions { use_on_oom: true, ..PoolOptions::default() }).unwrap();
    let request = Request::new(DEVICE, machine.streams[0].id(), 20 * MIB).in_pool(pool);
    let block = paged.allocate_raw(request).unwrap();
    paged.free(block).unwrap();
    allocate(&machine, 1, 20 * MIB);
    assert_eq!(paged.page_stats(DEVICE).unwrap().totals.taken, 0, "the driver had enough");
    allocate(&machine, 1, 20 * MIB);
    assert_eq!(paged.page_stats(DEVICE).unwrap().reserved_bytes, 40 * MIB);
}

/// Each rule of the second attempt, and that the request fails without it.
#[test]
fn the_second_attempt_follows_its_rules() {
    let rules: [(Defect, fn()); 4] = [
        (Defect::ShortageCountsCallsFirst, the_fewest_slots_count_first),
        (Defect::ShortageKeepsPageSize, the_last_pages_are_small),
        (Defect::ShortageKeepsOldMappings, old_mappings_are_waited_for),
        (Defect::ShortageLeavesPools, pools_that_are_marked_give_pages),
    ];
    for (defect, program) in rules {
        program();
        let without = std::panic::catch_unwind(|| defect.with(program));
        assert!(without.is_err(), "{defect:?} makes no difference");
    }
}

/// Such a window can never be filled: choosing it must end, and not be tried for ever.
#[test]
fn an_impossible_window_is_not_chosen() {
    two_places_with_room();
    let without = std::panic::catch_unwind(|| Defect::ImpossibleWindow.with(two_places_with_room));
    assert!(without.is_err(), "it makes no difference");
}

/// Work of the first stream may still use what the other stream has taken, so the request goes elsewhere.
fn two_places_with_room() {
    let machine = Machine::with_capacity(200 * MIB, 2, Settings::default());
    machine.sim.pause_stream(machine.streams[0].id()).unwrap();
    allocate(&machine, 0, 3 * MIB);
    let between = allocate(&machine, 0, 6 * MIB);
    allocate(&machine, 0, 3 * MIB);
    machine.paged.free(between).unwrap();
    allocate(&machine, 1, 4 * MIB);
    allocate(&machine, 0, 6 * MIB);
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!(machine.defect(), None);
}

/// A machine whose second stream has freed pages of two slots, of which the first stream lacks one slot.
fn too_large(capacity: u64) -> Machine {
    let machine = Machine::with_capacity(capacity, 2, Settings::default());
    machine.paged.set_page_sizes(0, u64::MAX);
    let large = allocate(&machine, 1, 40 * MIB);
    machine.paged.set_page_sizes(u64::MAX, u64::MAX);
    allocate(&machine, 0, 2 * MIB);
    machine.paged.free(large).unwrap();
    assert_eq!(machine.paged.page_stats(DEVICE).unwrap().reserved_bytes, 42 * MIB);
    machine
}

/// A free page that is too large for a gap leaves when another is created: once its work is done, no more is reserved
/// than before.
#[test]
fn pages_that_are_too_large_leave_once_their_work_is_done() {
    let machine = too_large(200 * MIB);
    let reserved = || machine.paged.page_stats(DEVICE).unwrap().reserved_bytes / MIB;
    // Five slots: two pages of two, and a new one of one.
    allocate(&machine, 0, 10 * MIB);
    assert_eq!(reserved(), 44, "one page more, until the other stream has passed");
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    // The next request that needs pages finds that out.
    allocate(&machine, 0, 4 * MIB);
    assert_eq!(reserved(), 40);
    assert_eq!(machine.defect(), None);
}

/// A request that would otherwise fail waits for that.
#[test]
fn pages_that_are_too_large_make_no_request_run_out_of_memory() {
    let machine = too_large(42 * MIB);
    let reserved = || machine.paged.page_stats(DEVICE).unwrap().reserved_bytes / MIB;
    allocate(&machine, 0, 10 * MIB);
    assert_eq!(reserved(), 40, "a page of two slots for one of one slot");
    machine.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!(machine.defect(), None);
}

/// Every block leaves a part of its last page free. Once that adds up, new pages have one slot.
#[test]
fn new_pages_are_small_once_much_is_lost_in_parts_of_pages() {
    let machine = Machine::with_capacity(200 * MIB, 8, Settings::default());
    let paged = &machine.paged;
    paged.set_page_sizes(0, u64::MAX);
    let reserved = |stream: usize| {
        allocate(&machine, stream, 5 * MIB);
        paged.page_stats(DEVICE).unwrap().reserved_bytes / MIB
    };
    // 3 MiB of two pages are lost each time, up to eight slots and 0.6 %.
    assert_eq!((0..8).map(reserved).collect::<Vec<_>>(), [8, 16, 24, 32, 40, 48, 54, 60]);
    assert_eq!(machine.defect(), None);
}

/// Small pages would not help against what is free beside small blocks.
#[test]
fn parts_beside_small_blocks_are_no_reason_for_small_pages() {
    let machine = Machine::with_capacity(200 * MIB, 7, Settings::default());
    machine.paged.set_page_sizes(0, u64::MAX);
    for stream in 0..6 {
        allocate(&machine, stream, 1024);
    }
    allocate(&machine, 6, 5 * MIB);
    assert_eq!(machine.paged.page_stats(DEVICE).unwrap().reserved_bytes, (6 * 2 + 8) * MIB);
    assert_eq!(machine.defect(), None);
}

/// Completing the pending frees of other streams is no reason to lose sight of this stream's statistics.
#[test]
fn peaks_are_exact_after_a_wait_for_pending_frees() {
    let machine = Machine::with_capacity(40 * MIB, 3, Settings::default());
    let (paged, streams) = (&machine.paged, &machine.streams);
    let allocate =
        |stream: usize, mib: u64| paged.allocate_raw(Request::new(DEVICE, streams[stream].id(), mib * MIB)).unwrap();
    let first = allocate(0, 4);
    let pending = allocate(1, 20);
    machine.sim.pause_stream(streams[2].id()).unwrap();
    machine.write_tag(&pending, 1, &streams[2]);
    paged.record_use(pending, streams[2].id()).unwrap();
    paged.free(pending).unwrap();
    allocate(2, 30);
    paged.free(first).unwrap();
    let peak = paged.stats(DEVICE).unwrap().allocated_bytes.all.peak;
    assert_eq!(peak, 34 * MIB);
}
