//! Tests of the simulated driver beyond the conformance suite.

mod determinism;
mod fault_injection;
mod fixture;
mod growth;
mod hazards;
mod kernel_arguments;
mod libraries;
mod paused_streams;
mod placement;
mod registrations;
mod regressions;
mod remaps;
#[path = "../common/scale.rs"]
mod scale;
mod settings;
mod threads;
