//! Counts of what programs did.

use std::collections::BTreeMap;
use std::ops::AddAssign;

/// How often programs did something of a kind, beyond [`Counts`]: by its name.
pub type Kinds = BTreeMap<&'static str, u64>;

/// Counts of what programs did. A campaign without faults or captures does not test them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Programs that ran to their end.
    pub programs: u64,
    /// Calls of the code under test: allocations, frees, recorded uses, captures and so on.
    pub operations: u64,
    /// Blocks that were allocated.
    pub allocations: u64,
    /// Driver calls that were made to fail.
    pub faults: u64,
    /// Panics in callbacks of the program: trackers, upstreams, bodies of captures.
    pub panics: u64,
    /// Requests that ran out of memory.
    pub out_of_memory: u64,
    /// Captures that succeeded.
    pub captures: u64,
    /// Captures that failed, by a fault or because the program gave up.
    pub captures_failed: u64,
    /// Replays of graphs.
    pub replays: u64,
    /// Recordings that were read, damaged ones included.
    pub recordings: u64,
    /// Recordings that were replayed to the end.
    pub recordings_replayed: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.programs += other.programs;
        self.operations += other.operations;
        self.allocations += other.allocations;
        self.faults += other.faults;
        self.panics += other.panics;
        self.out_of_memory += other.out_of_memory;
        self.captures += other.captures;
        self.captures_failed += other.captures_failed;
        self.replays += other.replays;
        self.recordings += other.recordings;
        self.recordings_replayed += other.recordings_replayed;
    }
}
