//! Heaps that take each other's pages, step by step.

use super::machine::{DEVICE, MIB, Machine};
use crate::memory::{DeviceAllocator as _, PagedAllocator, Request, Settings};

const STREAMS: usize = 4;

/// Every stream allocates a block and frees it, one after the other, so that one page would do.
fn take_turns(machine: &Machine, bytes: u64) {
    for stream in &machine.streams {
        let block = machine.paged.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap();
        machine.write_tag(&block, 1, stream);
        machine.paged.free(block).unwrap();
        machine.paged.check();
    }
}

fn taken(paged: &PagedAllocator) -> u64 {
    let totals = paged.page_stats(DEVICE).unwrap().totals;
    totals.taken + totals.taken_back
}

fn reserved(paged: &PagedAllocator) -> u64 {
    paged.page_stats(DEVICE).unwrap().reserved_bytes
}

#[test]
fn heaps_that_need_a_page_in_turns_get_one_each() {
    for bytes in [64 << 10, 2 * MIB] {
        let machine = Machine::with_capacity(40 * MIB, STREAMS, Settings::default());
        let paged = &machine.paged;
        take_turns(&machine, bytes);
        assert_eq!(reserved(paged), 2 * MIB, "at first a page is taken before memory grows");
        (0..20).for_each(|_| take_turns(&machine, bytes));
        let before = taken(paged);
        (0..20).for_each(|_| take_turns(&machine, bytes));
        assert_eq!(taken(paged), before, "blocks of {bytes} bytes");
        assert_eq!(reserved(paged), STREAMS as u64 * 2 * MIB);
        // The same after the pages were given back.
        paged.trim_to(DEVICE, 0).unwrap();
        assert_eq!(reserved(paged), 0);
        (0..20).for_each(|_| take_turns(&machine, bytes));
        let before = taken(paged);
        (0..20).for_each(|_| take_turns(&machine, bytes));
        assert_eq!(taken(paged), before, "blocks of {bytes} bytes after a trim");
        assert_eq!(machine.defect(), None);
    }
}

/// What is taken in turns is larger than a page: memory does not grow by more than a page for each heap.
#[test]
fn pages_of_their_own_are_few() {
    let machine = Machine::with_capacity(200 * MIB, STREAMS, Settings::default());
    let paged = &machine.paged;
    for _ in 0..20 {
        take_turns(&machine, 20 * MIB);
        take_turns(&machine, MIB);
    }
    let most = 20 * MIB + STREAMS as u64 * 2 * MIB;
    assert!(reserved(paged) <= most, "{} of {most}", reserved(paged));
    assert_eq!(machine.defect(), None);
}

/// A limit is kept: heaps then take each other's pages.
#[test]
fn no_page_of_its_own_is_beyond_the_limit() {
    let machine = Machine::with_capacity(2 * MIB, STREAMS, Settings::default());
    (0..20).for_each(|_| take_turns(&machine, MIB));
    assert_eq!(reserved(&machine.paged), 2 * MIB);
    assert_eq!(machine.defect(), None);
}
