//! Typed memory and kernels with typed arguments.

mod asleep;
mod captures;
mod errors;
mod fixture;
mod hazards;
mod kernels;
mod order;
mod pinned;
mod racing_captures;
mod replays;
mod vectors;
