//! Counts the steps of a replay whose number could grow with what a recording merely contains: blocks, segments and
//! conflicts that an event looks at. For tests, which compare counts and never times.

use std::cell::Cell;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Counts steps of the calling thread.
#[inline]
pub(crate) fn count(steps: usize) {
    STEPS.set(STEPS.get() + steps as u64);
}

/// How many steps the calling thread has taken.
#[doc(hidden)]
#[must_use]
pub fn steps_taken() -> u64 {
    STEPS.get()
}
