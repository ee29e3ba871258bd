//! A program as the requests that it makes of its allocator: allocations, frees and what lies between, without
//! addresses. It runs with the real allocators on the simulated GPU, under any settings and on a device of any size;
//! one run can be written as a snapshot, with the stacks and times of the program.
//!
//! Unlike a recording it says nothing about segments, so there is nothing to infer or to compare. Predictions are made
//! with it: a program that ran on tensors without memory makes the same requests as on a GPU.

mod file;
mod run;
mod smallest;

use warpool::memory::report::Stack;

pub use file::RequestsError;
pub use run::{Conditions, OutOfMemory, Outcome, Placed};

/// The requests of a program, in order.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// How many devices it uses, at least 1.
    pub devices: u32,
    /// How many streams it uses on each device, the default stream, 0, among them.
    pub streams: u32,
    /// One more than the highest number of an allocation.
    pub allocations: u32,
    /// Its requests.
    pub steps: Vec<Step>,
    /// The call stacks of its allocations, innermost frame first.
    pub stacks: Vec<Stack>,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// When, in microseconds.
    pub time_us: i64,
    /// What.
    pub request: Request,
}

/// What a program asks of its allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Memory for work on a stream.
    Alloc {
        /// The number of the allocation.
        id: u32,
        /// The size.
        bytes: u64,
        /// The device.
        device: u32,
        /// The number of the stream on that device.
        stream: u32,
        /// The call stack, by its number.
        stack: u32,
    },
    /// An allocation is no longer needed.
    Free {
        /// Its number.
        id: u32,
        /// Whether work of other streams still uses it, as recorded with `record_stream`. Then the block is free from
        /// the [`Complete`](Self::Complete) on that follows in the same order.
        in_use: bool,
    },
    /// The work that the oldest block waits for, of those freed while in use, has completed.
    Complete,
    /// All work on the devices has completed.
    Synchronize,
    /// Cached memory is returned to the driver.
    EmptyCache {
        /// Of this device.
        device: u32,
    },
    /// The share of a device's memory that may be reserved, in millionths.
    Limit {
        /// The device.
        device: u32,
        /// The share.
        millionths: u32,
    },
}

#[cfg(test)]
mod tests {
    use warpool::memory::Settings;

    use super::*;
    use crate::replay::AllocatorChoice;
    use crate::stop::Stop;

    const MIB: u64 = 1 << 20;

    fn alloc(id: u32, mib: u64, stream: u32) -> Step {
        let request = Request::Alloc { id, bytes: mib * MIB, device: 0, stream, stack: 0 };
        Step { time_us: i64::from(id), request }
    }

    fn step(request: Request) -> Step {
        Step { time_us: 7, request }
    }

    fn free(id: u32, in_use: bool) -> Step {
        step(Request::Free { id, in_use })
    }

    fn requests(steps: &[Step]) -> Requests {
        let allocations = steps.iter().filter(|step| matches!(step.request, Request::Alloc { .. })).count();
        let stacks = vec![Stack::from([])];
        Requests { devices: 1, streams: 2, allocations: allocations as u32, steps: steps.to_vec(), stacks }
    }

    fn conditions(capacity: Option<u64>) -> Conditions {
        Conditions { allocator: AllocatorChoice::Caching, settings: Settings::default(), capacity, bytes_context: 0 }
    }

    fn reserved(steps: &[Step]) -> u64 {
        let outcome = requests(steps).run(&conditions(None), &Stop::default()).unwrap().unwrap();
        outcome.stats[0].reserved_bytes.all.peak / MIB
    }

    #[test]
    fn block_that_other_work_uses_is_reused_once_it_completed() {
        let before = [alloc(0, 30, 1), free(0, true)];
        let with = |more: &[Step]| reserved(&[&before[..], more].concat());
        assert_eq!(with(&[alloc(1, 30, 1)]), 60);
        assert_eq!(with(&[step(Request::Complete), alloc(1, 30, 1)]), 30);
        assert_eq!(with(&[step(Request::Synchronize), alloc(1, 30, 1)]), 30);
        assert_eq!(with(&[step(Request::Complete), alloc(1, 30, 0)]), 60, "another stream");
        let two = [alloc(1, 50, 1), free(1, true), step(Request::Complete), alloc(2, 50, 1), alloc(3, 30, 1)];
        assert_eq!(with(&two), 130, "the oldest use completes first");
    }

    #[test]
    fn smallest_device_is_found_up_to_the_tolerance() {
        // 40 MiB are cached when 50 are requested: on a small device they are returned first.
        let requests = requests(&[alloc(0, 40, 0), free(0, false), alloc(1, 50, 0)]);
        let found = requests.smallest(&conditions(None), 50 * MIB, 90 * MIB, 2 * MIB, &Stop::default());
        let found = found.unwrap().unwrap();
        assert!((50 * MIB..=52 * MIB).contains(&found), "{found}");
        let run = |bytes| requests.run(&conditions(Some(bytes)), &Stop::default()).unwrap().unwrap();
        assert!(run(found).out_of_memory.is_none());
        assert_eq!(run(45 * MIB).out_of_memory.map(|oom| oom.step), Some(2));
    }

    #[test]
    fn snapshot_has_the_times_and_streams_of_the_program() {
        let requests = requests(&[alloc(0, 30, 1), free(0, false), alloc(1, 1, 0)]);
        let placed = requests.place(&conditions(None), &Stop::default()).unwrap().unwrap();
        let events: Vec<_> =
            placed.snapshot.traces[0].iter().map(|event| (event.action.name(), event.stream, event.time_us)).collect();
        assert_eq!(
            events,
            [
                ("segment_alloc", 1, 0),
                ("alloc", 1, 0),
                ("free_requested", 1, 7),
                ("free_completed", 1, 7),
                ("segment_alloc", 0, 1),
                ("alloc", 0, 1),
            ]
        );
    }
}
