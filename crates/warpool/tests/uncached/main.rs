//! Allocators without a cache, the contract of every allocator, and decorators, on the simulated GPU.

#[path = "../common/mod.rs"]
mod common;

mod allocators;
mod decorators;
mod driver_pool;
mod gone_streams;
mod panics;
mod pluggable;
mod racing_captures;
mod racing_sleeps;
