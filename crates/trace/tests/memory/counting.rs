//! A counting allocator: the memory that a test takes, exactly and the same each time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts what each thread allocates. Reallocations count as two blocks while one is copied into the other.
pub struct Counting;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn add(bytes: usize) {
    // While a thread ends, its counters are already destroyed.
    let _ = CURRENT.try_with(|current| {
        current.set(current.get().wrapping_add(bytes));
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(current.get())));
    });
}

fn remove(bytes: usize) {
    let _ = CURRENT.try_with(|current| current.set(current.get().saturating_sub(bytes)));
}

// SAFETY: all calls go to the system's allocator as they came; the counters do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller keeps the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        remove(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        remove(layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// Runs something, and returns the most bytes that it had allocated at one time, on this thread.
pub fn peak<R>(run: impl FnOnce() -> R) -> (u64, R) {
    let before = CURRENT.get();
    PEAK.set(before);
    let result = run();
    ((PEAK.get() - before) as u64, result)
}
