//! A program as the requests that it makes of its allocator: allocations, frees and what lies between, without
//! addresses. It runs with the real allocators on the simulated GPU, under any settings and on a device of any size;
//! one run can be written as a snapshot, with the stacks and times of the program.
//!
//! Unlike a recording it says nothing about segments, so there is nothing to infer or to compare. Predictions are made
//! with it: a program that ran on tensors without memory makes the same requests as on a GPU.

mod file;
mod run;
mod smallest;

use warpool::memory::Stack;

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
