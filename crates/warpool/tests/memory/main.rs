//! The caching allocator on the simulated GPU.

#[path = "../common/mod.rs"]
mod common;

mod capture;
mod checkpoint;
mod core;
mod direct;
mod exact_addresses;
mod expandable;
mod faults;
mod growth;
mod history;
mod lent_blocks;
mod out_of_memory;
mod panics;
mod placement;
mod pools;
mod ranges;
mod recent;
mod reentrancy;
mod regressions;
mod settings_extremes;
mod stable;
mod stats;
mod streams;
