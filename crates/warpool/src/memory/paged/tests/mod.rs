//! The paged allocator over a small simulated device, so that pages are taken between heaps. The simulation knows
//! contents and order: a lost tag or a hazard is a defect of the allocator. Random programs are in `crates/soak`.
//!
//! - `bystanders`: streams that use a block although nobody said so.
//! - `contention`: heaps that take the same page from each other.
//! - `decay`: what nobody needed for long returns to the driver.
//! - `defects`: deliberate defects are found.
//! - `elastic`: elastic memory at addresses that another heap has had.
//! - `faults`: every driver call of fixed programs fails once.
//! - `graph_pools`: what a captured graph needs of its pages, step by step.
//! - `models`: the parts without a mutex, under many interleavings.
//! - `shortage`: requests when memory is short, step by step.

mod bystanders;
mod contention;
mod decay;
mod defects;
mod elastic;
mod faults;
mod graph_pools;
mod machine;
mod models;
mod shortage;
