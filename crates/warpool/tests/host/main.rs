//! The pinned host allocator on the simulated machine: sizes, places, waiting, caps, settings, counters, graphs.

#[path = "../common/mod.rs"]
mod common;

mod caps;
mod fault_injection;
mod graphs;
mod hot;
mod lab;
mod leaving;
mod mirror;
mod places;
mod races;
mod reuse_order;
mod settings;
mod shown;
mod stress;
mod swarm;
mod waiting;
