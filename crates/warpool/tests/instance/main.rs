//! Streams, events, guards and injected driver faults below the allocators, on the simulated GPU.

#[path = "../common/mod.rs"]
mod common;

mod events;
mod faults;
mod guards;
mod streams;
