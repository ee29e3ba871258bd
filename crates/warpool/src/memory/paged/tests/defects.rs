//! Deliberate defects are found, each by a program made for it. Without the defect the same programs show nothing.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::machine::{DEVICE, MIB, Machine};
use crate::defect::Defect;
use crate::memory::{Allocation, DeviceAllocator as _, Request, Settings};

/// What the simulation sees in a program. An access to unmapped memory loses the device: all calls fail then.
pub fn seen(program: impl FnOnce() -> Option<String>) -> Option<String> {
    catch_unwind(AssertUnwindSafe(program)).unwrap_or_else(|panic| match panic.downcast_ref::<String>() {
        Some(message) if message.contains("CUDA_ERROR_ILLEGAL_ADDRESS") => Some(message.clone()),
        _ => resume_unwind(panic),
    })
}

fn allocate(machine: &Machine, stream: usize, mib: u64) -> Allocation {
    machine.paged.allocate_raw(Request::new(DEVICE, machine.streams[stream].id(), mib * MIB)).unwrap()
}

/// A stream takes pages of another whose work is still queued.
fn takes_from_another_stream() -> Option<String> {
    let machine = Machine::with_capacity(100 * MIB, 2, Settings::default());
    machine.sim.pause_stream(machine.streams[0].id()).unwrap();
    let first = allocate(&machine, 0, 64);
    machine.write_tag(&first, 1, &machine.streams[0]);
    machine.paged.free(first).unwrap();
    let second = allocate(&machine, 1, 64);
    machine.write_tag(&second, 2, &machine.streams[1]);
    machine.sim.resume_stream(machine.streams[0].id()).unwrap();
    machine.streams[0].synchronize().unwrap();
    machine.check_tag(&second, 2, &machine.streams[1]);
    machine.streams[1].synchronize().unwrap();
    machine.defect()
}

/// A page moves on to ever new addresses, while work at all of them is still queued.
fn moves_pages_behind_queued_work() -> Option<String> {
    let machine = Machine::with_capacity(400 * MIB, 1, Settings::default());
    machine.sim.pause_stream(machine.streams[0].id()).unwrap();
    for round in 0..40 {
        let block = allocate(&machine, 0, 4 + 2 * round);
        machine.write_tag(&block, 1 + round as u32, &machine.streams[0]);
        machine.check_tag(&block, 1 + round as u32, &machine.streams[0]);
        allocate(&machine, 0, 2);
        machine.paged.free(block).unwrap();
    }
    machine.sim.resume_stream(machine.streams[0].id()).unwrap();
    // An access to unmapped memory loses the device.
    let synchronized = machine.streams[0].synchronize();
    machine.sim.hazards().first().map(ToString::to_string).or_else(|| synchronized.err().map(|error| error.to_string()))
}

#[test]
fn a_missing_event_between_heaps_is_found_by_a_program_made_for_it() {
    assert_eq!(takes_from_another_stream(), None);
    let found = Defect::NoEventBetweenHeaps.with(takes_from_another_stream);
    println!("{found:?}");
    assert!(found.is_some());
}

#[test]
fn unmapping_too_early_is_found_by_a_program_made_for_it() {
    assert_eq!(moves_pages_behind_queued_work(), None);
    let found = Defect::UnmapsTooEarly.with(moves_pages_behind_queued_work);
    println!("{found:?}");
    assert!(found.is_some());
}
