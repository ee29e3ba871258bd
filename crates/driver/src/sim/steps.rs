//! Counts the steps of operations whose cost could grow with what merely exists: nodes of vector clocks, streams and
//! pools that a call looks at. For tests, which compare counts and never times.

use std::cell::Cell;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Counts one step of the calling thread.
#[inline]
pub(in crate::sim) fn count() {
    STEPS.set(STEPS.get() + 1);
}

/// How many steps the calling thread has taken, in all simulated drivers.
#[doc(hidden)]
#[must_use]
pub fn steps_taken() -> u64 {
    STEPS.get()
}
