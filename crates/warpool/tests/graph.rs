//! Graphs on the simulated device: what they run, what they own, every way to use them wrongly, and that nothing is
//! left behind.

mod common;

#[path = "graph/basics.rs"]
mod basics;
#[path = "graph/conditional.rs"]
mod conditional;
#[path = "graph/faults.rs"]
mod faults;
#[path = "graph/lab.rs"]
mod lab;
#[path = "graph/leaving.rs"]
mod leaving;
#[path = "graph/memory.rs"]
mod memory;
#[path = "graph/polling.rs"]
mod polling;
#[path = "graph/scope.rs"]
mod scope;
#[path = "graph/template.rs"]
mod template;
