//! The C interface, by subject. Each function converts its arguments, makes one call, and converts the result.
//!
//! Unless documented otherwise, a function that returns `int` returns 0 for success and 1 for failure, and
//! `warpool_last_error` has the reason. Functions are `unsafe` if an argument is a pointer that is followed, or a
//! `cudaStream_t`, which the driver follows.

pub mod history;
pub mod library;
pub mod memory;
pub mod pools;
pub mod settings;
pub mod stats;
