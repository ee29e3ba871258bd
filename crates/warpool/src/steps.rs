//! Counts the steps of operations whose cost could grow with the number of existing objects. For tests, which compare
//! counts and never times.

use std::cell::Cell;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Counts one step of the calling thread.
#[inline]
pub(crate) fn count() {
    STEPS.set(STEPS.get() + 1);
}

/// How many steps the calling thread has taken.
#[doc(hidden)]
#[must_use]
pub fn steps_taken() -> u64 {
    STEPS.get()
}
