//! Graphs on the simulated device: what they run, what they own, every wrong use, and that nothing is leaked.

#[path = "../common/mod.rs"]
mod common;

mod basics;
mod conditional;
mod drops;
mod fault_injection;
mod faults;
mod fixture;
mod found;
mod graphed_callable;
mod host_memory;
mod memory;
mod ownership;
mod polling;
mod pytorch;
mod pytorch_bodies;
mod pytorch_memory;
mod scope;
mod template;
