//! Threads that poll events beside threads that capture. How they take turns is tested beside the code, in
//! `graph/pollers.rs`.

use std::sync::mpsc;
use std::time::Duration;

use warpool::driver::sim::HazardKind;
use warpool::graph::{CaptureOptions, GraphError};

use crate::lab::{Lab, graph_error};

#[test]
fn questions_asked_with_a_guard_break_no_capture() {
    let lab = Lab::new();
    let mut event = lab.context.instance.event();
    event.record(&lab.context.side_stream()).unwrap();
    let mut graph = lab.graph();
    graph
        .capture(&lab.side, CaptureOptions::default(), |_| {
            let asked = || lab.context.instance.polling().query(&event);
            assert!(asked()?, "from the thread that captures");
            std::thread::scope(|threads| threads.spawn(asked).join().unwrap()).map(drop)
        })
        .unwrap();
    let without = graph.reset().and_then(|()| graph.capture(&lab.side, CaptureOptions::default(), |_| event.query()));
    assert!(without.is_err(), "without the guard the same question breaks it");
    lab.forgive(&[HazardKind::CaptureInvalidated]);
    drop(graph);
    lab.finish();
}

#[test]
fn a_capture_waits_for_those_who_poll() {
    let lab = Lab::new();
    let (say, heard) = mpsc::channel();
    std::thread::scope(|threads| {
        let polling = lab.context.instance.polling();
        threads.spawn(|| {
            let mut graph = lab.graph();
            lab.still_works(&mut graph);
            say.send(()).unwrap();
        });
        // Not a proof that it waits for the guard, but it must not have got past it.
        std::thread::sleep(Duration::from_millis(20));
        assert!(heard.try_recv().is_err(), "it did not wait");
        drop(polling);
        heard.recv().unwrap();
    });
    lab.finish();
}

#[test]
fn a_capture_can_give_up_waiting() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let options = CaptureOptions { poller_timeout: Some(Duration::ZERO), ..CaptureOptions::default() };
    let (ready, go) = (mpsc::channel(), mpsc::channel::<()>());
    std::thread::scope(|threads| {
        let (instance, say) = (&lab.context.instance, ready.0);
        threads.spawn(move || {
            let _polling = instance.polling();
            say.send(()).unwrap();
            let _ = go.1.recv();
        });
        ready.1.recv().unwrap();
        let refused = graph_error(graph.capture(&lab.side, options, |_| Ok(())));
        assert!(matches!(refused, GraphError::PollersBusy { pollers: 1, .. }), "{refused}");
        assert!(!lab.context.instance.is_capturing(&lab.side).unwrap() && graph.pools().is_empty());
        drop(go.0);
    });
    lab.fill_into(&mut graph, options, 1);
    drop(graph);
    lab.finish();
}

#[test]
fn a_thread_that_polls_cannot_wait_for_itself() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let polling = lab.context.instance.polling();
    let nested = lab.context.instance.polling();
    drop(polling);
    assert_eq!(graph_error(graph.capture(&lab.side, CaptureOptions::default(), |_| Ok(()))), GraphError::PollsItself);
    drop(nested);
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}
