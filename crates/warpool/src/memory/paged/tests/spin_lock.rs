//! The spin lock and the biased lock with threads of the system.

use crate::memory::paged::biased_lock::BiasedLock;
use crate::memory::paged::process_barrier::process_has_barrier;
use crate::memory::paged::spin_lock::SpinLock;

#[test]
fn threads_take_turns() {
    let lock = SpinLock::new(0_u64);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    let mut value = lock.lock();
                    // Two steps: a lost update would show.
                    let next = *value + 1;
                    *value = next;
                }
            });
        }
    });
    assert_eq!(*lock.lock(), 80_000);
}

#[test]
fn a_panic_releases_it() {
    let lock = SpinLock::new(1);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _held = lock.lock();
        panic!("under the lock");
    }));
    assert!(panicked.is_err());
    assert_eq!(*lock.lock(), 1);
}

/// Threads take a biased lock many times in a row each, so that each gets the bias and loses it.
#[test]
fn threads_take_the_bias_from_each_other() {
    let lock = BiasedLock::new(0_u64);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for round in 0..20_000 {
                    let mut value = lock.lock();
                    let next = *value + 1;
                    *value = next;
                    drop(value);
                    if round % 500 == 0 {
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    assert_eq!(*lock.lock(), 120_000);
}

/// More threads than there are places in the lock, one after the other: each gets the bias, as fast as the first.
#[test]
fn threads_that_have_ended_leave_no_trace() {
    if !process_has_barrier() {
        println!("this system has no barrier for all threads: no thread gets the bias");
        return;
    }
    let lock = BiasedLock::new(0_u64);
    let run = || {
        let taken = (1..100).find(|_| {
            *lock.lock() += 1;
            lock.lock_by_bias().is_some()
        });
        taken.expect("it gets the bias")
    };
    let taken: Vec<u32> = (0..20).map(|_| std::thread::scope(|scope| scope.spawn(run).join().unwrap())).collect();
    assert_eq!(taken, [taken[0]; 20]);
    assert_eq!(*lock.lock(), u64::from(taken.iter().sum::<u32>()));
}

#[test]
fn a_panic_releases_a_biased_lock() {
    let lock = BiasedLock::new(0);
    for round in 0..10 {
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            *lock.lock() += 1;
            let _held = lock.lock();
            panic!("under the lock");
        }));
        assert!(panicked.is_err());
        assert_eq!(*lock.lock(), round + 1);
    }
    // Another thread gets it too.
    std::thread::scope(|scope| scope.spawn(|| assert_eq!(*lock.lock(), 10)).join().unwrap());
}
