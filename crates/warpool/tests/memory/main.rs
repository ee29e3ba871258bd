//! The caching allocator on the simulated GPU.

#[path = "../common/mod.rs"]
mod common;

mod capture;
mod checkpoint;
mod core;
mod exact_addresses;
mod expandable;
mod faults;
mod history;
mod out_of_memory;
mod panics;
mod placement;
mod pools;
mod reentrancy;
mod stats;
mod streams;
mod swarm;
