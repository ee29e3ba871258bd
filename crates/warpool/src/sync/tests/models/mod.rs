//! The locks under many interleavings: the same source files are built with `shuttle` in place of `primitives.rs`. A
//! schedule in which no thread can go on is an error, and a wait with a timeout never times out.

#[path = "../../capture_gate.rs"]
#[expect(clippy::duplicate_mod, reason = "built a second time, with other primitives")]
mod capture_gate;
pub(crate) mod primitives;
#[path = "../../sequence.rs"]
#[expect(clippy::duplicate_mod, reason = "built a second time, with other primitives")]
mod sequence;
#[path = "../../spin_lock.rs"]
#[expect(clippy::duplicate_mod, reason = "built a second time, with other primitives")]
pub(crate) mod spin_lock;

use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::thread;
use warpool_testing::scaled;

use self::capture_gate::CaptureGate;
use self::primitives::{Mutex, lock};
use self::sequence::{OVERHEAD, ReadError, Sequenced};
use self::spin_lock::SpinLock;

/// Runs a model with many schedules: random ones, and such that differ in few preemptions.
pub(crate) fn check(model: impl Fn() + Sync + Send + Copy + 'static) {
    let schedules = usize::try_from(scaled(1000)).expect("few");
    shuttle::check_random(model, schedules);
    shuttle::check_pct(model, schedules, 3);
}

/// Adds in two steps: a lost update would show.
fn add(value: &mut u64) {
    let before = *value;
    thread::yield_now();
    *value = before + 1;
}

#[test]
fn a_spin_lock_orders_what_is_done_under_it() {
    check(|| {
        let lock = Arc::new(SpinLock::new(0));
        let others: Vec<_> = (0..3)
            .map(|_| {
                let lock = Arc::clone(&lock);
                thread::spawn(move || {
                    add(&mut lock.lock());
                    add(&mut lock.lock());
                })
            })
            .collect();
        // May find it held.
        let added = u64::from(lock.try_lock().map(|mut value| add(&mut value)).is_some());
        add(&mut lock.lock());
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(*lock.lock(), 7 + added);
    });
}

/// A capture that begins or ends sets the flag while it does so, as the driver would.
#[derive(Default)]
struct Captures {
    gate: CaptureGate,
    is_changing: AtomicBool,
    changes: AtomicU64,
}

impl Captures {
    fn change(&self) {
        let change = self.gate.close();
        self.is_changing.store(true, Ordering::SeqCst);
        thread::yield_now();
        self.is_changing.store(false, Ordering::SeqCst);
        self.changes.fetch_add(1, Ordering::SeqCst);
        drop(change);
    }

    /// The two steps of a call: the check and the driver call. Nothing changes in between.
    fn check_and_call(&self) {
        let before = self.changes.load(Ordering::SeqCst);
        thread::yield_now();
        let is_changing = self.is_changing.load(Ordering::SeqCst);
        assert!(!is_changing && self.changes.load(Ordering::SeqCst) == before, "a capture changed within a call");
    }
}

#[test]
fn no_capture_changes_within_a_typed_call_or_a_call_of_an_allocator() {
    check(|| {
        let captures = Arc::new(Captures::default());
        let spawn = |act: fn(&Captures)| {
            let captures = Arc::clone(&captures);
            thread::spawn(move || act(&captures))
        };
        let threads = [
            spawn(|captures| {
                let _outer = captures.gate.enter(0, || Ok(())).unwrap();
                captures.check_and_call();
                // A nested call waits for nothing, even if a change waits for this thread.
                let _inner = captures.gate.enter(1, || panic!("it waits for itself")).unwrap();
                captures.check_and_call();
            }),
            spawn(|captures| {
                let _call = captures.gate.enter_for_call(|| Ok(())).unwrap();
                captures.check_and_call();
            }),
            spawn(Captures::change),
        ];
        captures.change();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(captures.changes.load(Ordering::SeqCst), 2);
        // All have left.
        drop(captures.gate.close());
    });
}

/// An allocator holds its lock during its driver calls; the closure of a typed call may need that lock.
#[test]
fn a_typed_call_may_wait_for_an_allocator_that_makes_calls() {
    check(|| {
        let captures = Arc::new((Captures::default(), Mutex::new(())));
        let allocator = {
            let captures = Arc::clone(&captures);
            thread::spawn(move || {
                let _allocator = lock(&captures.1);
                let _call = captures.0.gate.enter_for_call(|| Ok(())).unwrap();
                captures.0.check_and_call();
            })
        };
        let typed = {
            let captures = Arc::clone(&captures);
            thread::spawn(move || {
                let _typed = captures.0.gate.enter(0, || Ok(())).unwrap();
                drop(lock(&captures.1));
            })
        };
        captures.0.change();
        allocator.join().unwrap();
        typed.join().unwrap();
    });
}

/// Two writers after each other write rows whose words are equal; a row with different words would be torn.
#[test]
fn a_reader_without_a_lock_sees_no_torn_row() {
    check(|| {
        let words: Arc<[AtomicU64; OVERHEAD + 3]> = Arc::default();
        let writer = {
            let words = Arc::clone(&words);
            thread::spawn(move || (1..=3).for_each(|value| Sequenced::new(&*words).write(&[value; 3])))
        };
        let mut last = 0;
        for _ in 0..3 {
            let mut row = [0; 3];
            match Sequenced::new(&*words).read(&mut row) {
                Ok(()) => {
                    assert!(row == [row[0]; 3] && row[0] >= last, "{row:?} after {last}");
                    last = row[0];
                }
                // The writer did not run meanwhile.
                Err(ReadError::Busy | ReadError::NeverWritten) => {}
                Err(ReadError::Damaged) => panic!("a torn row: {row:?}"),
            }
        }
        writer.join().unwrap();
        let mut row = [0; 3];
        Sequenced::new(&*words).read(&mut row).unwrap();
        assert_eq!(row, [3; 3]);
    });
}
