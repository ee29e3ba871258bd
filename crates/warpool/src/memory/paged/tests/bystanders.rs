//! Programs that use a block in another stream and free it without saying so. An allocator that keeps memory within its
//! stream forgives it while that stream is idle; so do pages, as far as the other stream has a heap.

use warpool_driver::{CaptureMode, Captures as _, Graphs as _};

use super::defects::seen;
use super::machine::{DEVICE, MIB, Machine};
use crate::defect::Defect;
use crate::memory::{Allocation, DeviceAllocator as _, PrivatePools as _, Request, Settings};

/// Streams: the owner of the blocks, one that uses them without a word, one that takes their pages.
const OWNER: usize = 0;
const BYSTANDER: usize = 1;
const TAKER: usize = 2;

fn allocate(machine: &Machine, stream: usize, bytes: u64) -> Allocation {
    machine.paged.allocate_raw(Request::new(DEVICE, machine.streams[stream].id(), bytes)).unwrap()
}

/// A machine whose bystander has a heap, and is paused.
fn machine() -> (Machine, Allocation) {
    let machine = Machine::with_capacity(400 * MIB, 3, Settings::default());
    let own = allocate(&machine, BYSTANDER, 512);
    machine.sim.pause_stream(machine.streams[BYSTANDER].id()).unwrap();
    (machine, own)
}

/// The bystander reads a block of the owner, which is freed.
fn read_and_free(machine: &Machine, block: Allocation, tag: u32) {
    machine.write_tag(&block, tag, &machine.streams[OWNER]);
    machine.wait(&machine.streams[BYSTANDER], &machine.streams[OWNER]);
    machine.check_tag(&block, tag, &machine.streams[BYSTANDER]);
    machine.paged.free(block).unwrap();
}

fn resume(machine: &Machine) {
    machine.sim.resume_stream(machine.streams[BYSTANDER].id()).unwrap();
    for stream in &machine.streams {
        stream.synchronize().unwrap();
    }
}

/// A program shows nothing, but does if bystanders are forgotten.
fn is_forgiven(program: fn() -> Option<String>) {
    assert_eq!(program(), None);
    let found = Defect::ForgetsBystanders.with(|| seen(program));
    println!("{found:?}");
    assert!(found.is_some());
}

fn takes_pages() -> Option<String> {
    let (machine, _own) = machine();
    read_and_free(&machine, allocate(&machine, OWNER, 64 * MIB), 1);
    let taken = allocate(&machine, TAKER, 64 * MIB);
    machine.write_tag(&taken, 2, &machine.streams[TAKER]);
    resume(&machine);
    assert!(machine.paged.page_stats(DEVICE).unwrap().totals.taken > 0);
    machine.defect()
}

fn takes_pages_back() -> Option<String> {
    let (machine, _own) = machine();
    // The taker has pages, which the owner takes, and which are still mapped in the taker's addresses.
    let before = allocate(&machine, TAKER, 64 * MIB);
    machine.write_tag(&before, 1, &machine.streams[TAKER]);
    machine.paged.free(before).unwrap();
    read_and_free(&machine, allocate(&machine, OWNER, 64 * MIB), 2);
    let taken = allocate(&machine, TAKER, 64 * MIB);
    machine.write_tag(&taken, 3, &machine.streams[TAKER]);
    resume(&machine);
    assert!(machine.paged.page_stats(DEVICE).unwrap().totals.taken_back > 0);
    machine.defect()
}

/// Pages move on to ever new addresses of the owner. What the bystander reads there is no longer what it was, with any
/// allocator, but the addresses must stay mapped: reading others loses the device.
fn moves_pages() -> Option<String> {
    let (machine, _own) = machine();
    let mut held = Vec::new();
    for round in 0..40 {
        let block = allocate(&machine, OWNER, (4 + 2 * round) * MIB);
        held.push(allocate(&machine, OWNER, 2 * MIB));
        read_and_free(&machine, block, 1);
        machine.streams[OWNER].synchronize().unwrap();
    }
    let unmapped = machine.paged.page_stats(DEVICE).unwrap().totals.unmapped;
    if unmapped > 0 {
        return Some(format!("{unmapped} mappings were undone too early"));
    }
    resume(&machine);
    None
}

#[test]
fn a_stream_that_takes_pages_waits_for_bystanders() {
    is_forgiven(takes_pages);
}

#[test]
fn a_stream_that_takes_pages_back_waits_for_bystanders() {
    is_forgiven(takes_pages_back);
}

#[test]
fn mappings_stay_until_bystanders_have_passed() {
    is_forgiven(moves_pages);
}

#[test]
fn a_bystander_that_captures_holds_nobody_up() {
    let (machine, _own) = machine();
    let block = allocate(&machine, OWNER, 64 * MIB);
    machine.write_tag(&block, 1, &machine.streams[OWNER]);
    machine.paged.free(block).unwrap();
    let (paged, sim, stream) = (&machine.paged, &machine.sim, machine.streams[BYSTANDER].id());
    paged.capture_began(DEVICE).unwrap();
    sim.capture_begin(stream, CaptureMode::Global).unwrap();
    let taken = allocate(&machine, TAKER, 64 * MIB);
    machine.write_tag(&taken, 2, &machine.streams[TAKER]);
    let graph = sim.capture_end(stream).expect("the capture is valid");
    paged.capture_ended(DEVICE).unwrap();
    sim.graph_destroy(graph).unwrap();
    resume(&machine);
    assert_eq!(machine.defect(), None);
}
