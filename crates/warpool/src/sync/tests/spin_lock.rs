//! The spin lock with threads of the system.

use crate::sync::spin_lock::SpinLock;

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
