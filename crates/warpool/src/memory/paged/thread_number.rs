//! Numbers of threads: no two threads of a process ever have the same, and none has 0.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    static NUMBER: Cell<u64> = const { Cell::new(0) };
}

/// The number of the calling thread; 0 if it has none yet.
#[inline]
pub(super) fn known_thread_number() -> u64 {
    NUMBER.get()
}

/// The number of the calling thread.
#[inline]
pub(super) fn thread_number() -> u64 {
    match NUMBER.get() {
        0 => assign(),
        number => number,
    }
}

#[cold]
fn assign() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    NUMBER.set(number);
    number
}
