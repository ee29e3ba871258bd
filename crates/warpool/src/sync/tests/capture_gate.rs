//! The capture gate with threads of the system.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::sync::CaptureGate;

fn wait_until_closed(gate: &CaptureGate) {
    while !gate.is_closed() {
        thread::yield_now();
    }
}

#[test]
fn a_change_waits_for_calls_and_later_calls_wait_for_the_change() {
    let gate = Arc::new(CaptureGate::default());
    let (sender, receiver) = mpsc::channel();
    let outer = gate.try_enter(0).unwrap();
    let change = thread::spawn({
        let (gate, sender) = (Arc::clone(&gate), sender.clone());
        move || {
            let change = gate.close();
            sender.send("changed").unwrap();
            drop(change);
        }
    });
    wait_until_closed(&gate);
    let late = thread::spawn({
        let gate = Arc::clone(&gate);
        move || {
            assert!(gate.try_enter(1).is_none());
            sender.send("refused").unwrap();
            let _entered = gate.enter(1, || Ok(())).unwrap();
            sender.send("entered").unwrap();
        }
    });
    assert_eq!(receiver.recv().unwrap(), "refused");
    // A nested call must not wait: its thread would never leave.
    let nested = gate.enter(1, || panic!("it waits for itself")).unwrap();
    assert!(gate.is_thread_inside());
    drop(nested);
    assert!(gate.is_thread_inside() && receiver.try_recv().is_err());
    drop(outer);
    assert!(!gate.is_thread_inside());
    assert_eq!((receiver.recv().unwrap(), receiver.recv().unwrap()), ("changed", "entered"));
    change.join().unwrap();
    late.join().unwrap();
    // It does not wait: all have left.
    drop(gate.close());
}

/// An allocator may hold a lock that the closure of a typed call needs: it does not wait for that closure.
#[test]
fn a_call_of_an_allocator_waits_for_a_change_but_not_for_the_typed_calls_before_it() {
    let gate = Arc::new(CaptureGate::default());
    let (sender, receiver) = mpsc::channel();
    let typed = gate.try_enter(0).unwrap();
    let change = thread::spawn({
        let (gate, sender) = (Arc::clone(&gate), sender.clone());
        move || {
            let change = gate.close();
            sender.send("changed").unwrap();
            let late = thread::spawn({
                let gate = Arc::clone(&gate);
                move || {
                    let waits = || {
                        sender.send("waits").unwrap();
                        Ok(())
                    };
                    drop(gate.enter_for_call(waits).unwrap());
                    sender.send("entered").unwrap();
                }
            });
            // Dropped once the call waits, or is about to wait.
            thread::sleep(Duration::from_millis(20));
            drop(change);
            late.join().unwrap();
        }
    });
    wait_until_closed(&gate);
    drop(gate.enter_for_call(|| panic!("it waits for a typed call")).unwrap());
    assert!(receiver.try_recv().is_err());
    drop(typed);
    change.join().unwrap();
    let seen: Vec<&str> = receiver.try_iter().collect();
    assert!(seen == ["changed", "waits", "entered"] || seen == ["changed", "entered"], "{seen:?}");
}

#[test]
fn another_gate_is_entered_on_its_own() {
    let gates = [CaptureGate::default(), CaptureGate::default()];
    let _first = gates[0].try_enter(0).unwrap();
    let second = gates[1].try_enter(0).unwrap();
    assert!(gates[1].is_thread_inside());
    drop(second);
    assert!(gates[0].is_thread_inside());
    drop(gates[1].close());
}

/// Calls see the same state at their beginning and end.
#[test]
fn nothing_changes_while_a_call_is_inside() {
    let gate = CaptureGate::default();
    let (value, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for key in 0..3 {
            let (gate, value, stop) = (&gate, &value, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let entered = gate.enter(key, || Ok(())).unwrap();
                    let before = value.load(Ordering::Relaxed);
                    for _ in 0..20 {
                        assert_eq!((before % 2, value.load(Ordering::Relaxed)), (0, before));
                    }
                    drop(entered);
                }
            });
        }
        for _ in 0..400 {
            let change = gate.close();
            value.fetch_add(1, Ordering::Relaxed);
            thread::yield_now();
            value.fetch_add(1, Ordering::Relaxed);
            drop(change);
        }
        stop.store(true, Ordering::Relaxed);
    });
}
