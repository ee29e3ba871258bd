//! The options of a run.

use std::time::Duration;

use crate::campaign::Campaign;

/// How much to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Until this much time has passed; the running program is completed.
    Time(Duration),
    /// This number of programs of each campaign.
    Programs(u64),
    /// Only the program of that number, of each campaign.
    One(u64),
}

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed of all programs.
    pub seed: u64,
    /// The campaigns, which take turns.
    pub campaigns: Vec<Campaign>,
    /// How much.
    pub length: Length,
    /// Kinds of steps that are left out (`panics`, `caching`, `checkpoints`, `captures`, `extremes`), to find out what
    /// a violation needs.
    pub skip: Vec<String>,
    /// Puts a defect into the allocators under test (memory that is returned twice), to test the campaigns themselves.
    pub broken: bool,
}
