//! Sleep and wake on the simulated GPU, which tracks contents and order: a lost tag or a hazard is a defect. Random
//! programs are in `crates/soak`.
//!
//! - `calls`: the result of each call in every state, step by step.
//! - `elastic`: elastic memory of a tag.
//! - `faults`: every driver call of sleeping and waking fails, once and permanently.
//! - `graphs`: graphs over memory that sleeps.
//! - `large`: copies of more than one chunk.

mod calls;
mod elastic;
mod faults;
mod graphs;
mod large;
mod machine;
