//! Graphs on the simulated device: what they run, what they own, every way to use them wrongly, and that nothing is
//! left behind.

#[path = "../common/mod.rs"]
mod common;

mod basics;
mod conditional;
mod fault_injection;
mod faults;
mod graphed_callable;
mod host_memory;
mod lab;
mod leaving;
mod memory;
mod mirror;
mod mirror_bodies;
mod mirror_memory;
mod polling;
mod scope;
mod swarm;
mod template;
