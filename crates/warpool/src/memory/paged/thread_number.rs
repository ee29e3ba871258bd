//! Numbers of threads: no two threads of a process ever have the same, and none has 0.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::lock;

thread_local! {
    static NUMBER: Cell<u64> = const { Cell::new(0) };
    static END: End = const { End };
}

/// The numbers of threads that have not ended.
static RUNNING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Dropped when its thread ends.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        // Destructors of other variables may still use the allocator: the thread is then a new one, for good.
        let number = NUMBER.replace(0);
        // Without waiting: in a child of `fork` the lock may be that of a thread which is not there. If a number stays,
        // its thread counts as running, no more.
        if let Ok(mut running) = RUNNING.try_lock() {
            running.remove(&number);
        }
    }
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

/// Whether the thread with this number has ended. What it did is then visible to the caller.
pub(super) fn has_ended(number: u64) -> bool {
    !lock(&RUNNING).contains(&number)
}

#[cold]
fn assign() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(&RUNNING).insert(number);
    // Its destructor is registered by this. It fails only while the thread ends.
    let _ = END.try_with(|_| ());
    NUMBER.set(number);
    number
}
