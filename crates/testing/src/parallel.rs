//! A loop over all cores.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Calls `check` with every item, on as many threads as there are cores. A test with many long rounds then does not
/// leave the other cores idle while it is the last one. If a call panics, so does this one, after the others.
pub fn in_parallel<T: Sync>(items: &[T], check: impl Fn(&T) + Sync) {
    let (next, check) = (AtomicUsize::new(0), &check);
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(items.len());
    thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                        check(item);
                    }
                })
            })
            .collect();
        for thread in spawned {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
}
