//! Idle decay: what nobody needed for `idle_decay_ms` returns to the driver, a part at a time, and nothing else does.
//! Time is the simulation's.

use std::sync::Arc;
use std::time::Duration;

use warpool_driver::Devices as _;

use super::machine::{DEVICE, MIB, Machine};
use crate::memory::{
    Allocation, BackgroundReclaim, DeviceAllocator as _, MemPoolId, PoolOptions, PrivatePools as _, Request, Settings,
};

/// Memory is idle after 800 ms; a slice of that is 100 ms.
fn machine() -> Machine {
    Machine::with_capacity(1024 * MIB, 2, Settings { idle_decay_ms: Some(800), ..Settings::default() })
}

fn allocate(machine: &Machine, stream: usize, mib: u64) -> Allocation {
    machine.paged.allocate_raw(Request::new(DEVICE, machine.streams[stream].id(), mib * MIB)).unwrap()
}

fn pass(machine: &Machine, millis: u64) {
    machine.sim.pass_time(Duration::from_millis(millis));
}

fn reserved(machine: &Machine) -> u64 {
    machine.paged.stats(DEVICE).unwrap().reserved_bytes.all.current / MIB
}

/// Lets time pass in steps of 100 ms, as a thread would. Returns what is reserved after each, in MiB.
fn idle(machine: &Machine, steps: u64) -> Vec<u64> {
    let step = |_| {
        pass(machine, 101);
        let before = reserved(machine);
        let released = machine.paged.release_idle(DEVICE).unwrap();
        machine.paged.check();
        assert_eq!(released, (before - reserved(machine)) * MIB);
        reserved(machine)
    };
    (0..steps).map(step).collect()
}

#[test]
fn what_was_not_needed_leaves_a_part_at_a_time() {
    let machine = machine();
    let kept = allocate(&machine, 0, 64);
    machine.write_tag(&kept, 1, &machine.streams[0]);
    let phase = allocate(&machine, 0, 448);
    machine.paged.free(phase).unwrap();
    machine.sim.device_synchronize(DEVICE).unwrap();
    // The peak counts as long as it is within 800 ms.
    assert_eq!(idle(&machine, 8), [512; 8]);
    // Then a quarter of what is idle leaves in each slice, at least 64 MiB.
    assert_eq!(idle(&machine, 8), [400, 316, 252, 188, 124, 64, 64, 64]);
    machine.check_tag(&kept, 1, &machine.streams[0]);
    machine.paged.free(kept).unwrap();
    machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!(machine.finish(), None);
}

#[test]
fn a_program_that_repeats_itself_keeps_what_it_needs() {
    let machine = machine();
    let kept = allocate(&machine, 0, 100);
    for _ in 0..40 {
        // What one stream frees the other one takes.
        for stream in [0, 1] {
            let block = allocate(&machine, stream, 300);
            machine.write_tag(&block, 2, &machine.streams[stream]);
            pass(&machine, 90);
            machine.paged.release_idle(DEVICE).unwrap();
            machine.paged.free(block).unwrap();
        }
    }
    let totals = machine.paged.page_stats(DEVICE).unwrap().totals;
    assert_eq!((totals.created, totals.released), (200, 0));
    machine.paged.free(kept).unwrap();
    machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!(machine.finish(), None);
}

/// Without a thread, requests that need pages let others leave.
#[test]
fn requests_return_what_is_idle() {
    let machine = machine();
    let phase = allocate(&machine, 0, 512);
    machine.paged.free(phase).unwrap();
    machine.sim.device_synchronize(DEVICE).unwrap();
    let mut kept = vec![allocate(&machine, 1, 2)];
    for _ in 0..30 {
        pass(&machine, 101);
        // Pages of the other heap serve it, so nothing grows.
        kept.push(allocate(&machine, 1, 2));
    }
    assert_eq!(reserved(&machine), 62);
    kept.into_iter().for_each(|block| machine.paged.free(block).unwrap());
    machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!(machine.finish(), None);
}

/// Nobody waits for a stream that is still busy: its pages leave later.
#[test]
fn pages_leave_once_their_stream_has_passed() {
    let machine = machine();
    machine.sim.pause_stream(machine.streams[0].id()).unwrap();
    let phase = allocate(&machine, 0, 256);
    machine.write_tag(&phase, 1, &machine.streams[0]);
    machine.check_tag(&phase, 1, &machine.streams[0]);
    machine.paged.free(phase).unwrap();
    assert_eq!(idle(&machine, 20), [256; 20]);
    machine.sim.resume_stream(machine.streams[0].id()).unwrap();
    machine.sim.device_synchronize(DEVICE).unwrap();
    assert_eq!(idle(&machine, 2).last(), Some(&0));
    assert_eq!(machine.finish(), None);
}

/// A graph knows the addresses of its pool, and may be launched at any time.
#[test]
fn memory_of_pools_in_use_stays() {
    let machine = machine();
    let pool = machine.paged.create_pool(DEVICE, PoolOptions::default()).unwrap();
    let request = Request { pool: Some(pool), ..Request::new(DEVICE, machine.streams[0].id(), 128 * MIB) };
    let block = machine.paged.allocate_raw(request).unwrap();
    machine.paged.free(block).unwrap();
    machine.sim.device_synchronize(DEVICE).unwrap();
    assert_eq!(idle(&machine, 20), [128; 20]);
    machine.paged.release_pool(DEVICE, pool).unwrap();
    assert_eq!(idle(&machine, 20).last(), Some(&0));
    assert_eq!(machine.finish(), None);
}

#[test]
fn nothing_decays_without_the_setting() {
    let machine = Machine::with_capacity(128 * MIB, 1, Settings::default());
    let block = allocate(&machine, 0, 64);
    machine.paged.free(block).unwrap();
    assert_eq!(idle(&machine, 40), [64; 40]);
    // It can be switched on, and counts from then on.
    machine.paged.set_settings(Settings { idle_decay_ms: Some(800), ..Settings::default() }).unwrap();
    assert_eq!(idle(&machine, 9), [64; 9]);
    assert_eq!(idle(&machine, 1), [0]);
    assert_eq!(machine.finish(), None);
}

/// The thread does what it is for, and ends with its owner. (It reads the simulation's clock, which only this test
/// moves; the sleep between its looks is real.)
#[test]
fn a_thread_returns_memory_of_a_program_that_makes_no_calls() {
    let machine = Machine::with_capacity(128 * MIB, 1, Settings { idle_decay_ms: Some(8), ..Settings::default() });
    let block = allocate(&machine, 0, 64);
    machine.paged.free(block).unwrap();
    machine.sim.device_synchronize(DEVICE).unwrap();
    let thread = BackgroundReclaim::start(&machine.paged);
    while reserved(&machine) > 0 {
        pass(&machine, 2);
        std::thread::yield_now();
    }
    drop(thread);
    assert_eq!(Arc::strong_count(&machine.paged), 1, "the thread has ended");
    assert_eq!(machine.finish(), None);
}
