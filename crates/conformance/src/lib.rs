//! Checks over any Warpool driver, and over the resources that Warpool builds on it. `warpool selftest` runs them.
//!
//! - [`driver`]: one suite per subject of the driver contract.
//! - [`resources`]: streams, events, allocators, handles, generators and graphs.
//! - [`expect`]: how a check states what it expects.

pub mod driver;
pub mod expect;
mod launch;
pub mod resources;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a value that each change leaves consistent, so that a panic elsewhere does not matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
