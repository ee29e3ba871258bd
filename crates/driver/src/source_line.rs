//! The line of the program that a driver call is made for.
//!
//! A call through the driver's trait objects cannot know it (`#[track_caller]` ends there), so the caller that knows it
//! sets it around the call. Only a driver that reports hazards reads it.
//!
//! ```
//! use std::panic::Location;
//! use warpool_driver::source_line::{at, at_if, current};
//!
//! let line = Location::caller();
//! assert_eq!(at(line, current), Some(line));
//! assert_eq!(at_if(false, line, current), None); // for a driver that does not read it
//! ```

use std::cell::Cell;
use std::panic::Location;

thread_local! {
    static CURRENT: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Runs `calls`, which are made for the program's line `line`. Within them, an inner line has precedence.
#[inline]
pub fn at<R>(line: &'static Location<'static>, calls: impl FnOnce() -> R) -> R {
    let _restore = Restore(CURRENT.replace(Some(line)));
    calls()
}

/// The same if `driver_reads_it`; else it runs `calls` and nothing more.
#[inline]
pub fn at_if<R>(driver_reads_it: bool, line: &'static Location<'static>, calls: impl FnOnce() -> R) -> R {
    let _restore = driver_reads_it.then(|| Restore(CURRENT.replace(Some(line))));
    calls()
}

/// The line that the calling thread makes driver calls for, if it is known.
#[inline]
#[must_use]
pub fn current() -> Option<&'static Location<'static>> {
    CURRENT.get()
}

/// Restores the line of the outer scope, even after a panic.
struct Restore(Option<&'static Location<'static>>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_nest_and_end_also_by_a_panic() {
        let (outer, inner) = (Location::caller(), Location::caller());
        assert_eq!(current(), None);
        at(outer, || {
            let unwound = std::panic::catch_unwind(|| at(inner, || std::panic::resume_unwind(Box::new(()))));
            assert!(unwound.is_err());
            assert!(std::ptr::eq(current().expect("the outer scope"), outer));
        });
        assert_eq!(current(), None);
    }
}
