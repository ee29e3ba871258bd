//! Typed memory and kernels with typed arguments.

#[path = "../common/pause.rs"]
mod pause;

mod asleep;
mod captures;
mod elastic;
mod errors;
mod fixture;
mod hazards;
mod kernels;
mod order;
mod pinned;
mod racing_captures;
mod replays;
mod vectors;
