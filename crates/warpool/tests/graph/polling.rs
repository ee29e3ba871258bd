//! Threads that poll events while other threads capture. The protocol itself is tested in `src/capture/pollers.rs`.

use std::sync::mpsc;
use std::time::Duration;

use warpool::driver::sim::HazardKind;
use warpool::graph::{CaptureOptions, GraphError};

use crate::fixture::{CaptureFixture, graph_error};

#[test]
fn queries_with_a_guard_invalidate_no_capture() {
    let fixture = CaptureFixture::new();
    let mut event = fixture.context.instance.event();
    event.record(&fixture.context.side_stream()).unwrap();
    let mut graph = fixture.graph();
    graph
        .capture(&fixture.side, CaptureOptions::default(), |_| {
            let query = || fixture.context.instance.polling().query(&event);
            assert!(query()?, "from the thread that captures");
            std::thread::scope(|threads| threads.spawn(query).join().unwrap()).map(drop)
        })
        .unwrap();
    let without =
        graph.reset().and_then(|()| graph.capture(&fixture.side, CaptureOptions::default(), |_| event.query()));
    assert!(without.is_err(), "without the guard the same query invalidates it");
    fixture.expect_hazards(&[HazardKind::CaptureInvalidated]);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_capture_waits_for_polling_guards() {
    let fixture = CaptureFixture::new();
    let (say, receiver) = mpsc::channel();
    std::thread::scope(|threads| {
        let polling = fixture.context.instance.polling();
        threads.spawn(|| {
            let mut graph = fixture.graph();
            fixture.expect_usable(&mut graph);
            say.send(()).unwrap();
        });
        // Not a proof that it waits for the guard, but it must not have begun.
        std::thread::sleep(Duration::from_millis(20));
        assert!(receiver.try_recv().is_err(), "it did not wait");
        drop(polling);
        receiver.recv().unwrap();
    });
    fixture.finish();
}

#[test]
fn a_capture_can_time_out_waiting() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let options = CaptureOptions { poller_timeout: Some(Duration::ZERO), ..CaptureOptions::default() };
    let (ready, go) = (mpsc::channel(), mpsc::channel::<()>());
    std::thread::scope(|threads| {
        let (instance, say) = (&fixture.context.instance, ready.0);
        threads.spawn(move || {
            let _polling = instance.polling();
            say.send(()).unwrap();
            let _ = go.1.recv();
        });
        ready.1.recv().unwrap();
        let error = graph_error(graph.capture(&fixture.side, options, |_| Ok(())));
        assert!(matches!(error, GraphError::PollersBusy { pollers: 1, .. }), "{error}");
        assert!(!fixture.context.instance.is_capturing(&fixture.side).unwrap() && graph.pools().is_empty());
        drop(go.0);
    });
    fixture.fill_into(&mut graph, options, 1);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_capture_on_a_polling_thread_is_an_error() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let polling = fixture.context.instance.polling();
    let nested = fixture.context.instance.polling();
    drop(polling);
    assert_eq!(
        graph_error(graph.capture(&fixture.side, CaptureOptions::default(), |_| Ok(()))),
        GraphError::PollsItself
    );
    drop(nested);
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}
