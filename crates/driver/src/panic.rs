//! Discards panics of user code where they are caught.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Drops the payload of a panic. The drop may panic again: then the second payload is leaked, unless it is a string,
/// and nothing unwinds.
#[doc(hidden)]
pub fn discard_panic(payload: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        match again.is::<&str>() || again.is::<String>() {
            true => drop(again),
            false => std::mem::forget(again),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("on purpose, while a payload is dropped");
        }
    }

    #[test]
    fn a_payload_may_panic() {
        discard_panic(Box::new("a text"));
        discard_panic(Box::new(Bomb));
    }
}
