//! Work on several threads where there are some, else in order: a browser's WebAssembly has none.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// How many threads the target runs at once; 1 where it has none.
#[must_use]
pub fn threads_available() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The results of `work` for all numbers below `count`, in their order, on at most `threads` threads: the caller's is
/// one of them, and does the work of those that cannot be started.
pub fn in_parallel<T: Send>(count: usize, threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    in_parallel_beside(count, threads, &work, &work)
}

/// Likewise, where the caller's thread does `own` in place of `work`, with a callback that belongs to it.
pub(crate) fn in_parallel_beside<T: Send>(
    count: usize,
    threads: usize,
    own: impl Fn(usize) -> T,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let number = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&number| number < count);
    let found: Mutex<Vec<(usize, T)>> = Mutex::new(Vec::with_capacity(count));
    let add = |number, result| found.lock().unwrap_or_else(PoisonError::into_inner).push((number, result));
    thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            let worker = || {
                while let Some(number) = number() {
                    add(number, work(number));
                }
            };
            if thread::Builder::new().spawn_scoped(scope, worker).is_err() {
                break;
            }
        }
        while let Some(number) = number() {
            add(number, own(number));
        }
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_unstable_by_key(|&(number, _)| number);
    found.into_iter().map(|(_, result)| result).collect()
}

/// The results of both. `other` has a thread of its own where one can be started.
pub fn both<A, B: Send>(own: impl FnOnce() -> A, other: impl FnOnce() -> B + Send) -> (A, B) {
    if threads_available() == 1 {
        return (own(), other());
    }
    thread::scope(|scope| {
        let other = scope.spawn(other);
        (own(), other.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_on_any_number_of_threads() {
        for (count, threads) in [(0, 4), (1, 0), (7, 1), (100, 3), (3, 100)] {
            let expected: Vec<usize> = (0..count).map(|number| number * 10).collect();
            assert_eq!(in_parallel(count, threads, |number| number * 10), expected, "{count} on {threads}");
        }
    }

    #[test]
    fn only_the_callers_thread_does_its_own() {
        let caller = thread::current().id();
        let is_caller = || thread::current().id() == caller;
        let found =
            in_parallel_beside(50, 3, |number| (number, true, is_caller()), |number| (number, false, is_caller()));
        for (index, &(number, is_own, is_caller)) in found.iter().enumerate() {
            assert_eq!((number, is_own), (index, is_caller));
        }
    }

    #[test]
    fn both_are_answered() {
        assert_eq!(both(|| 1, || 'b'), (1, 'b'));
    }
}
