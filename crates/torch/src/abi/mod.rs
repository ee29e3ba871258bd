//! The C interface, by subject. Each function is a few lines: arguments to Rust, the call, the answer to C.
//!
//! Unless it says otherwise, a function that returns `int` gives 0 for success and 1 for failure, and
//! `warpool_last_error` then says why.

pub mod about;
pub mod history;
pub mod memory;
pub mod pools;
pub mod settings;
pub mod stats;
