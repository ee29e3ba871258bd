//! Random programs over every allocator of Warpool, on the simulated GPU: the campaigns of `warpool soak`.
//!
//! A program is a pure function of the seed, the campaign and its number: it draws a machine, an allocator with
//! settings, and some hundred steps, and makes them. The programs are correct: whatever they do with memory is ordered,
//! recorded or waited for. So each of these is a violation, a defect of the code under test:
//! - a block that overlaps another one, or that lost its contents (every block holds its owner's tag);
//! - a hazard in the log of the simulated device;
//! - statistics that differ from a naive allocation table ([`table`](self)), or a broken invariant of `check()`;
//! - addresses and driver calls that differ from a naive model of PyTorch's allocator ([`Campaign::Placement`]);
//! - contents after replays that differ from those of the same work on the host ([`Campaign::Replays`]);
//! - an error that no injected fault explains, a panic, or a call that does not return;
//! - driver objects that are left when everything is closed;
//! - process memory that keeps growing ([`FlatMemory`]).
//!
//! Faults are injected into driver calls ([`Faulty`](warpool::driver::decorate::Faulty)) of the allocators and graphs,
//! never into the program's own calls.
//!
//! [`run`] runs campaigns until a time or a number of programs is reached, or up to the first violation. A
//! [`Violation`] names the program, which can be run alone with [`Length::One`]. Programs of [`Campaign::Threads`] use
//! several threads; their interleaving differs from run to run.
//!
//! Not here: how results are printed.

#![deny(unsafe_code)]

mod allocators;
mod campaign;
mod caught;
mod contention;
mod context;
mod counts;
mod device;
mod elastic;
mod host;
mod lifetime;
mod machine;
mod options;
mod placement;
mod racing;
mod recordings;
mod registered;
mod replays;
mod resident;
mod rng;
mod runner;
mod share;
mod sleep;
mod steps;
mod streams;
mod table;
mod threads;
mod typed;
mod unsafe_calls;

pub use campaign::Campaign;
pub use counts::{Counts, Kinds};
pub use options::{Length, Options};
pub use resident::{FlatMemory, Resident};
pub use runner::{CampaignReport, Progress, Report, Violation, run};
