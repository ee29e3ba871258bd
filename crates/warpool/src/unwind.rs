//! Panics of user code: callbacks, upstreams, external allocators, destructors.
//!
//! They unwind to the caller of the allocator. Guards undo unfinished steps, and the remaining callbacks are still
//! called. No user code runs while a thread is already unwinding, unless its panics are caught: a second panic would
//! abort the process.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

/// Runs a closure if it is dropped by a panic.
#[must_use = "dropped at once, it runs the closure"]
pub(crate) struct OnUnwind<F: FnOnce()> {
    undo: Option<F>,
}

impl<F: FnOnce()> OnUnwind<F> {
    pub(crate) fn new(undo: F) -> Self {
        Self { undo: Some(undo) }
    }

    /// Cancels it: nothing is left to undo.
    #[inline]
    pub(crate) fn disarm(mut self) {
        self.undo = None;
    }
}

impl<F: FnOnce()> Drop for OnUnwind<F> {
    #[inline]
    fn drop(&mut self) {
        if let Some(undo) = self.undo.take() {
            undo();
        }
    }
}

/// Makes every call, even after one has panicked. The first panic is resumed after the last call; if the thread is
/// already unwinding, it is dropped.
pub(crate) fn call_each<T>(each: impl IntoIterator<Item = T>, mut call: impl FnMut(T)) {
    let mut first = None;
    for one in each {
        let outcome = catch_unwind(AssertUnwindSafe(|| call(one)));
        first = first.or(outcome.err());
    }
    if let Some(panic) = first
        && !thread::panicking()
    {
        resume_unwind(panic);
    }
}

/// Drops a value whose destructor may run user code. While the thread is unwinding, a panic of that destructor is
/// caught here.
pub(crate) fn drop_user_value<T>(value: T) {
    call_each([value], drop);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("from a destructor");
        }
    }

    #[test]
    fn every_call_is_made_and_the_first_panic_goes_on() {
        let calls = Cell::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            call_each([1, 2, 3], |number| {
                calls.set(calls.get() + 1);
                assert!(number == 3, "{number}");
            });
        }));
        assert_eq!((calls.get(), outcome.unwrap_err().downcast_ref::<String>().unwrap().as_str()), (3, "1"));
    }

    #[test]
    fn a_guard_runs_only_by_a_panic_and_a_second_panic_ends_in_it() {
        let undone = Cell::new(0);
        OnUnwind::new(|| undone.set(100)).disarm();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _guard = OnUnwind::new(|| {
                drop_user_value(Bomb);
                undone.set(undone.get() + 1);
            });
            panic!("first");
        }));
        assert_eq!((undone.get(), *outcome.unwrap_err().downcast_ref::<&str>().unwrap()), (1, "first"));
    }
}
