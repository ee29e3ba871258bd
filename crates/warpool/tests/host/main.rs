//! The pinned host allocator on the simulated GPU.

#[path = "../common/mod.rs"]
mod common;

mod caps;
mod closing;
mod context;
mod fault_injection;
mod graphs;
mod hot_path;
mod panics;
mod placement;
mod pytorch;
mod races;
mod regressions;
mod reporting;
mod reuse_order;
mod settings;
mod sharding;
mod stream_uses;
mod stress;
