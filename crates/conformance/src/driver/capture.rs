//! The protocol of stream capture: how one begins, spreads, breaks and ends.

use std::collections::BTreeSet;

use super::Check;
use super::bench::{Bench, Capturing, Log};
use super::owned::Owned;
use crate::expect::{Checked, expect, expect_code, expect_code_of, expect_eq};
use warpool_driver::ErrorCode::{
    CapturedEvent, IllegalState, InvalidValue, StreamCaptureImplicit, StreamCaptureInvalidated, StreamCaptureIsolation,
    StreamCaptureMerge, StreamCaptureUnjoined, StreamCaptureUnmatched, StreamCaptureUnsupported,
    StreamCaptureWrongThread,
};
use warpool_driver::{CaptureMode, CaptureState, ErrorCode, EventScope, NodeKind, StreamHandle, StreamId};

pub(super) const CHECKS: &[Check] = super::checks![
    captured_work_does_not_run,
    ending_nothing_is_refused,
    the_legacy_default_stream_cannot_capture,
    other_streams_can_capture_in_every_mode,
    a_stream_captures_once_at_a_time,
    captures_have_ids_of_their_own,
    a_stream_tells_what_it_is_while_it_captures,
    a_stream_has_its_handle_while_it_captures,
    a_captured_event_is_useless_until_recorded_again,
    a_captured_event_may_be_destroyed,
    waiting_for_a_never_recorded_event_adds_nothing,
    a_wait_joins_a_stream_to_the_capture,
    a_branch_without_work_need_not_join,
    a_joined_stream_cannot_begin_a_capture,
    asking_for_the_default_streams_state_breaks_nothing,
    the_default_stream_works_beside_a_non_blocking_capture,
    another_thread_ends_only_relaxed_captures,
    other_threads_add_work_to_a_capture,
    destroying_the_first_stream_drops_the_capture,
    a_joined_stream_may_be_destroyed,
    dependencies_follow_the_work,
    the_graph_can_be_seen_as_it_grows,
    external_events_become_nodes,
    ; provoking:
    waiting_for_the_capturing_stream_breaks_the_capture,
    a_broken_capture_takes_no_more_work,
    a_stream_works_again_after_a_broken_capture,
    asking_about_a_captured_event_breaks_the_capture,
    waiting_for_outside_work_breaks_the_capture,
    an_event_recorded_elsewhere_leaves_the_capture,
    unjoined_work_is_refused_at_the_end,
    only_the_first_stream_ends_a_capture,
    two_captures_do_not_merge,
    the_default_stream_breaks_captures_of_blocking_streams,
    the_default_stream_cannot_join,
    dependencies_need_a_live_capture,
    the_end_of_a_broken_capture_names_the_call_that_broke_it,
];

const MODES: [CaptureMode; 3] = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

fn a_stream_tells_what_it_is_while_it_captures(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let mut told = None;
    bench.captured(stream, || {
        told = Some(bench.driver.stream_info(stream)?);
        Ok(())
    })?;
    expect_eq("what it told", told, Some(bench.driver.stream_info(stream)?))
}

/// In every mode, on the thread that captures and on another: also for a stream that nobody asked before.
fn a_stream_has_its_handle_while_it_captures(bench: &Bench<'_>) -> Checked {
    for mode in MODES {
        let stream = bench.stream()?;
        bench.driver.capture_begin(stream, mode)?;
        let here = bench.driver.stream_handle(stream);
        let elsewhere = bench.elsewhere(|| bench.driver.stream_handle(stream));
        let state = bench.driver.capture_state(stream);
        let ended = bench.driver.capture_end(stream).map(|graph| bench.own(Owned::Graph(graph)));
        let info = bench.driver.stream_info(stream)?;
        let want = StreamHandle { device: info.device, raw: info.raw };
        expect_eq(&format!("its handle in a {mode:?} capture, here and elsewhere"), (here?, elsewhere?), (want, want))?;
        expect(matches!(state?, CaptureState::Active(_)), "a capture that goes on")?;
        ended?;
    }
    Ok(())
}

fn captured_work_does_not_run(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(3)?);
    bench.append(log, 1, stream)?;
    bench.captured(stream, || bench.append(log, 2, stream))?;
    bench.append(log, 3, stream)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1, 3])
}

fn ending_nothing_is_refused(bench: &Bench<'_>) -> Checked {
    for stream in [bench.stream()?, bench.blocking_stream()?, bench.thread_stream()?] {
        expect_code(bench.driver.capture_end(stream), IllegalState)?;
        bench.expect_state(stream, Capturing::No)?;
    }
    Ok(())
}

fn the_legacy_default_stream_cannot_capture(bench: &Bench<'_>) -> Checked {
    let (legacy, log) = (bench.default_stream()?, bench.log(1)?);
    for mode in MODES {
        expect_code(bench.driver.capture_begin(legacy, mode), StreamCaptureUnsupported)?;
    }
    bench.expect_state(legacy, Capturing::No)?;
    bench.append(log, 1, legacy)?;
    bench.sync(legacy)?;
    bench.expect_log(log, &[1])
}

fn other_streams_can_capture_in_every_mode(bench: &Bench<'_>) -> Checked {
    let log = bench.log(9)?;
    for mode in MODES {
        for stream in [bench.stream()?, bench.blocking_stream()?, bench.thread_stream()?] {
            bench.driver.capture_begin(stream, mode)?;
            bench.expect_state(stream, Capturing::Yes)?;
            bench.append(log, 1, stream)?;
            let graph = bench.end(stream)?;
            bench.expect_state(stream, Capturing::No)?;
            expect_eq("its nodes", bench.driver.graph_topology(graph)?.nodes.len(), 1)?;
        }
    }
    Ok(())
}

fn a_stream_captures_once_at_a_time(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(1)?);
    bench.begin(stream)?;
    expect_code(bench.driver.capture_begin(stream, CaptureMode::Relaxed), IllegalState)?;
    expect_code(bench.driver.capture_begin(stream, CaptureMode::Global), IllegalState)?;
    bench.expect_state(stream, Capturing::Yes)?;
    bench.append(log, 1, stream)?;
    let graph = bench.end(stream)?;
    expect_eq("its nodes", bench.driver.graph_topology(graph)?.nodes.len(), 1)
}

fn captures_have_ids_of_their_own(bench: &Bench<'_>) -> Checked {
    let (first, second) = (bench.stream()?, bench.stream()?);
    let id = |stream| match bench.driver.capture_state(stream)? {
        CaptureState::Active(id) => Ok(id),
        other => expect(false, &format!("an active capture, got {other:?}")).map(|()| unreachable!()),
    };
    let mut seen = BTreeSet::new();
    for _ in 0..10 {
        bench.driver.capture_begin(first, CaptureMode::Global)?;
        bench.driver.capture_begin(second, CaptureMode::Global)?;
        expect_eq("the id, asked again", id(first)?, id(first)?)?;
        expect(seen.insert(id(first)?) && seen.insert(id(second)?), "ids that were never given before")?;
        bench.end(second)?;
        bench.end(first)?;
    }
    Ok(())
}

/// Captures on a fresh stream in a relaxed capture, does `act`, which must fail with `want`, and sees that this broke
/// the capture.
fn breaks(bench: &Bench<'_>, want: ErrorCode, act: impl Fn(StreamId) -> warpool_driver::Result<()>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(1)?);
    bench.begin(stream)?;
    expect_code_of("the call that breaks it", act(stream), want)?;
    broken(bench, stream)?;
    usable(bench, stream, log)
}

/// The capture that began on `stream` is broken, says so at its end, and is over then.
fn broken(bench: &Bench<'_>, stream: StreamId) -> Checked {
    bench.expect_state(stream, Capturing::Broken)?;
    expect_code(bench.driver.capture_end(stream), StreamCaptureInvalidated)?;
    bench.expect_state(stream, Capturing::No)
}

fn usable(bench: &Bench<'_>, stream: StreamId, log: Log) -> Checked {
    bench.append(log, 5, stream)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[5])
}

fn waiting_for_the_capturing_stream_breaks_the_capture(bench: &Bench<'_>) -> Checked {
    breaks(bench, StreamCaptureUnsupported, |stream| bench.driver.stream_synchronize(stream))?;
    breaks(bench, StreamCaptureUnsupported, |stream| bench.driver.stream_query(stream).map(drop))
}

fn a_broken_capture_takes_no_more_work(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(1)?);
    let memory = bench.memory(64)?;
    bench.begin(stream)?;
    expect_code(bench.driver.stream_query(stream), StreamCaptureUnsupported)?;
    let fill = bench.driver.fill(memory, warpool_driver::Pattern::U8(1), 16, stream);
    expect_code(fill, StreamCaptureInvalidated)?;
    broken(bench, stream)?;
    usable(bench, stream, log)
}

fn a_stream_works_again_after_a_broken_capture(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(2)?);
    bench.begin(stream)?;
    bench.append(log, 1, stream)?;
    expect_code(bench.driver.stream_query(stream), StreamCaptureUnsupported)?;
    broken(bench, stream)?;
    let exec = bench.ready(stream, || bench.append(log, 2, stream))?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[2])
}

fn the_end_of_a_broken_capture_names_the_call_that_broke_it(bench: &Bench<'_>) -> Checked {
    let (driver, device, stream, event) = (bench.driver, bench.device, bench.stream()?, bench.event()?);
    bench.record(event, bench.stream()?)?;
    type Act<'b> = Box<dyn Fn() -> warpool_driver::Result<()> + Sync + 'b>;
    let acts: [(&str, bool, Act<'_>); 5] = [
        ("stream_query", true, Box::new(|| driver.stream_query(stream).map(drop))),
        ("stream_wait_event", true, Box::new(|| driver.stream_wait_event(stream, event, EventScope::Plain))),
        ("mem_alloc", true, Box::new(|| driver.mem_alloc(device, 4096).map(drop))),
        ("mem_alloc", false, Box::new(|| driver.mem_alloc(device, 4096).map(drop))),
        ("device_synchronize", false, Box::new(|| driver.device_synchronize(device))),
    ];
    for (name, here, act) in acts {
        driver.capture_begin(stream, CaptureMode::Global)?;
        let broke = if here { act() } else { bench.elsewhere(&act) };
        let Err(cause) = broke else { return expect(false, &format!("{name} to be refused")) };
        // What comes after it does not change what broke it.
        expect_code_of("another", driver.event_record(event, stream, EventScope::Plain), StreamCaptureInvalidated)?;
        let Err(error) = driver.capture_end(stream) else { return expect(false, "the end to be refused") };
        expect_eq("the code at the end", error.code, StreamCaptureInvalidated)?;
        let detail = error.detail.as_deref().unwrap_or_default();
        let named = detail.contains(name) && detail.contains(&format!("{:?}", cause.code));
        expect(named, &format!("{name} and {:?} to be named, in {detail:?}", cause.code))?;
    }
    Ok(())
}

fn asking_about_a_captured_event_breaks_the_capture(bench: &Bench<'_>) -> Checked {
    for _ in 0..2 {
        let event = bench.event()?;
        breaks(bench, CapturedEvent, |stream| {
            bench.driver.event_record(event, stream, EventScope::Plain)?;
            bench.driver.event_query(event).map(drop)
        })?;
        breaks(bench, CapturedEvent, |stream| {
            bench.driver.event_record(event, stream, EventScope::Plain)?;
            bench.driver.event_synchronize(event)
        })?;
    }
    Ok(())
}

fn a_captured_event_is_useless_until_recorded_again(bench: &Bench<'_>) -> Checked {
    let (stream, other, event) = (bench.stream()?, bench.stream()?, bench.event()?);
    bench.record(event, stream)?;
    bench.sync(stream)?;
    bench.captured(stream, || bench.record(event, stream))?;
    expect_code(bench.driver.event_query(event), InvalidValue)?;
    expect_code(bench.driver.event_synchronize(event), InvalidValue)?;
    expect_code(bench.driver.stream_wait_event(other, event, EventScope::Plain), InvalidValue)?;
    bench.expect_state(other, Capturing::No)?;
    bench.record(event, stream)?;
    bench.driver.event_synchronize(event)?;
    expect(bench.driver.event_query(event)?, "the event to be done")?;
    bench.wait(other, event)?;
    bench.sync(other)
}

fn a_captured_event_may_be_destroyed(bench: &Bench<'_>) -> Checked {
    let (first, second, event, log) = (bench.stream()?, bench.stream()?, bench.event()?, bench.log(2)?);
    let exec = bench.ready(first, || {
        bench.append(log, 1, first)?;
        bench.record(event, first)?;
        bench.wait(second, event)?;
        bench.destroy_event(event)?;
        bench.append(log, 2, second)?;
        bench.order(second, first)
    })?;
    bench.replay(exec, first)?;
    bench.expect_log(log, &[1, 2])
}

fn waiting_for_outside_work_breaks_the_capture(bench: &Bench<'_>) -> Checked {
    let (other, event) = (bench.stream()?, bench.event()?);
    bench.record(event, other)?;
    bench.sync(other)?;
    breaks(bench, StreamCaptureIsolation, |stream| bench.driver.stream_wait_event(stream, event, EventScope::Plain))
}

fn waiting_for_a_never_recorded_event_adds_nothing(bench: &Bench<'_>) -> Checked {
    let (stream, event) = (bench.stream()?, bench.event()?);
    let graph = bench.captured(stream, || bench.wait(stream, event))?;
    expect_eq("its nodes", bench.driver.graph_topology(graph)?.nodes.len(), 0)
}

fn an_event_recorded_elsewhere_leaves_the_capture(bench: &Bench<'_>) -> Checked {
    let (other, event) = (bench.stream()?, bench.event()?);
    breaks(bench, StreamCaptureIsolation, |stream| {
        bench.driver.event_record(event, stream, EventScope::Plain)?;
        bench.driver.event_record(event, other, EventScope::Plain)?;
        bench.driver.stream_wait_event(stream, event, EventScope::Plain)
    })
}

fn a_wait_joins_a_stream_to_the_capture(bench: &Bench<'_>) -> Checked {
    let (first, second, log) = (bench.stream()?, bench.stream()?, bench.log(3)?);
    let graph = bench.captured(first, || {
        bench.append(log, 1, first)?;
        bench.order(first, second)?;
        expect_eq("the second stream", bench.driver.capture_state(second)?, bench.driver.capture_state(first)?)?;
        bench.append(log, 2, second)?;
        bench.order(second, first)?;
        bench.append(log, 3, first)
    })?;
    bench.expect_state(second, Capturing::No)?;
    let shape = bench.driver.graph_topology(graph)?;
    let [one, two, three] = [0, 1, 2].map(|at| shape.nodes.get(at).map(|node| node.id));
    let edges: Vec<_> = shape.edges.iter().map(|&(from, to)| (Some(from), Some(to))).collect();
    // A join adds to what the stream waits for and takes nothing away, also where one edge says as much as two.
    for edge in [(one, two), (two, three), (one, three)] {
        expect(edges.contains(&edge), &format!("the edge {edge:?} among {edges:?}"))?;
    }
    expect_eq("nodes and edges", (shape.nodes.len(), edges.len()), (3, 3))?;
    bench.replay(bench.instantiate(graph)?, second)?;
    bench.expect_log(log, &[1, 2, 3])
}

fn unjoined_work_is_refused_at_the_end(bench: &Bench<'_>) -> Checked {
    let (first, second, log) = (bench.stream()?, bench.stream()?, bench.log(1)?);
    bench.begin(first)?;
    bench.order(first, second)?;
    bench.append(log, 1, second)?;
    expect_code(bench.driver.capture_end(first), StreamCaptureUnjoined)?;
    bench.expect_state(first, Capturing::No)?;
    bench.expect_state(second, Capturing::No)?;
    usable(bench, second, log)
}

fn a_branch_without_work_need_not_join(bench: &Bench<'_>) -> Checked {
    let (first, second, log) = (bench.stream()?, bench.stream()?, bench.log(1)?);
    bench.captured(first, || bench.order(first, second))?;
    bench.expect_state(second, Capturing::No)?;
    usable(bench, second, log)
}

fn only_the_first_stream_ends_a_capture(bench: &Bench<'_>) -> Checked {
    let (first, second, log) = (bench.stream()?, bench.stream()?, bench.log(1)?);
    bench.begin(first)?;
    bench.order(first, second)?;
    expect_code(bench.driver.capture_end(second), StreamCaptureUnmatched)?;
    bench.expect_state(second, Capturing::Broken)?;
    broken(bench, first)?;
    bench.expect_state(second, Capturing::No)?;
    usable(bench, second, log)
}

fn a_joined_stream_cannot_begin_a_capture(bench: &Bench<'_>) -> Checked {
    let (first, second) = (bench.stream()?, bench.stream()?);
    bench.begin(first)?;
    bench.order(first, second)?;
    expect_code(bench.driver.capture_begin(second, CaptureMode::Relaxed), IllegalState)?;
    bench.expect_state(first, Capturing::Yes)?;
    bench.expect_state(second, Capturing::Yes)?;
    bench.end(first)?;
    Ok(())
}

fn two_captures_do_not_merge(bench: &Bench<'_>) -> Checked {
    let (first, second, event) = (bench.stream()?, bench.stream()?, bench.event()?);
    bench.begin(first)?;
    bench.begin(second)?;
    bench.record(event, first)?;
    expect_code(bench.driver.stream_wait_event(second, event, EventScope::Plain), StreamCaptureMerge)?;
    bench.expect_state(second, Capturing::Broken)?;
    broken(bench, first)?;
    broken(bench, second)
}

fn the_default_stream_breaks_captures_of_blocking_streams(bench: &Bench<'_>) -> Checked {
    let (legacy, blocking) = (bench.default_stream()?, bench.blocking_stream()?);
    let (event, memory, log) = (bench.event()?, bench.memory(64)?, bench.log(1)?);
    let calls: [(&str, &dyn Fn() -> warpool_driver::Result<()>); 3] = [
        ("fill", &|| bench.driver.fill(memory, warpool_driver::Pattern::U8(1), 16, legacy)),
        ("event_record", &|| bench.driver.event_record(event, legacy, EventScope::Plain)),
        ("stream_query", &|| bench.driver.stream_query(legacy).map(drop)),
    ];
    for (name, call) in calls {
        bench.begin(blocking)?;
        expect_code_of(name, call(), StreamCaptureImplicit)?;
        broken(bench, blocking)?;
    }
    usable(bench, blocking, log)
}

fn asking_for_the_default_streams_state_breaks_nothing(bench: &Bench<'_>) -> Checked {
    let (legacy, blocking) = (bench.default_stream()?, bench.blocking_stream()?);
    bench.begin(blocking)?;
    expect_code(bench.driver.capture_state(legacy), StreamCaptureImplicit)?;
    bench.expect_state(blocking, Capturing::Yes)?;
    bench.end(blocking)?;
    bench.expect_state(legacy, Capturing::No)
}

fn the_default_stream_works_beside_a_non_blocking_capture(bench: &Bench<'_>) -> Checked {
    let (legacy, stream, log) = (bench.default_stream()?, bench.stream()?, bench.log(2)?);
    bench.captured(stream, || {
        bench.append(log, 1, legacy)?;
        bench.sync(legacy)?;
        bench.expect_state(legacy, Capturing::No)?;
        bench.expect_state(stream, Capturing::Yes)
    })?;
    bench.expect_log(log, &[1])
}

fn the_default_stream_cannot_join(bench: &Bench<'_>) -> Checked {
    let (legacy, event) = (bench.default_stream()?, bench.event()?);
    breaks(bench, StreamCaptureImplicit, |stream| {
        bench.driver.event_record(event, stream, EventScope::Plain)?;
        bench.driver.stream_wait_event(legacy, event, EventScope::Plain)
    })
}

fn another_thread_ends_only_relaxed_captures(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    for mode in MODES {
        bench.driver.capture_begin(stream, mode)?;
        let ended = bench.elsewhere(|| bench.driver.capture_end(stream));
        if mode == CaptureMode::Relaxed {
            bench.own(Owned::Graph(ended?));
        } else {
            expect_code(ended, StreamCaptureWrongThread)?;
        }
        bench.expect_state(stream, Capturing::No)?;
        expect_code(bench.driver.capture_end(stream), IllegalState)?;
    }
    Ok(())
}

fn other_threads_add_work_to_a_capture(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    for mode in MODES {
        let log = bench.log(3)?;
        bench.driver.capture_begin(stream, mode)?;
        bench.append(log, 1, stream)?;
        bench.elsewhere(|| bench.append(log, 2, stream))?;
        bench.append(log, 3, stream)?;
        let graph = bench.end(stream)?;
        bench.replay(bench.instantiate(graph)?, stream)?;
        bench.expect_log(log, &[1, 2, 3])?;
    }
    Ok(())
}

fn destroying_the_first_stream_drops_the_capture(bench: &Bench<'_>) -> Checked {
    let (first, log) = (bench.stream()?, bench.log(2)?);
    bench.driver.capture_begin(first, CaptureMode::Global)?;
    bench.append(log, 1, first)?;
    bench.destroy_stream(first)?;
    // Nothing forbids guarded calls any more.
    let other = bench.stream()?;
    bench.sync(other)?;
    usable(bench, other, log)
}

fn a_joined_stream_may_be_destroyed(bench: &Bench<'_>) -> Checked {
    let (first, second, log) = (bench.stream()?, bench.stream()?, bench.log(2)?);
    let exec = bench.ready(first, || {
        bench.order(first, second)?;
        bench.append(log, 1, second)?;
        bench.order(second, first)?;
        bench.destroy_stream(second)?;
        bench.append(log, 2, first)
    })?;
    bench.replay(exec, first)?;
    bench.expect_log(log, &[1, 2])
}

fn dependencies_follow_the_work(bench: &Bench<'_>) -> Checked {
    let (first, second) = (bench.stream()?, bench.stream()?);
    let (left, right) = (bench.log(2)?, bench.log(2)?);
    let waits = |stream| bench.driver.capture_dependencies(stream);
    bench.begin(first)?;
    expect_eq("dependencies at the start", waits(first)?.len(), 0)?;
    bench.append(left, 1, first)?;
    let one = waits(first)?;
    expect_eq("dependencies after a kernel", one.len(), 1)?;
    bench.order(first, second)?;
    expect_eq("dependencies of a stream that joined", waits(second)?, one.clone())?;
    bench.append(left, 2, first)?;
    bench.append(right, 3, second)?;
    expect(waits(first)? != one && waits(first)? != waits(second)?, "each branch to go its own way")?;
    bench.order(second, first)?;
    let joined: BTreeSet<_> = waits(first)?.into_iter().collect();
    expect_eq("dependencies after the join", joined.len(), 2)?;
    expect(joined.contains(&waits(second)?[0]), "the other branch among them")?;
    bench.append(left, 4, first)?;
    expect_eq("dependencies after work behind the join", waits(first)?.len(), 1)?;
    bench.end(first)?;
    Ok(())
}

fn dependencies_need_a_live_capture(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    expect_code(bench.driver.capture_dependencies(stream), IllegalState)?;
    expect_code(bench.driver.capture_topology(stream), IllegalState)?;
    bench.begin(stream)?;
    expect_code(bench.driver.stream_query(stream), StreamCaptureUnsupported)?;
    expect_code(bench.driver.capture_dependencies(stream), StreamCaptureInvalidated)?;
    expect_code(bench.driver.capture_topology(stream), StreamCaptureInvalidated)?;
    broken(bench, stream)
}

fn the_graph_can_be_seen_as_it_grows(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(5)?);
    bench.begin(stream)?;
    for n in 0..5_usize {
        let shape = bench.driver.capture_topology(stream)?;
        expect_eq("nodes so far", shape.nodes.len(), n)?;
        expect_eq("edges so far", shape.edges.len(), n.saturating_sub(1))?;
        let last: Vec<_> = shape.nodes.last().map(|node| node.id).into_iter().collect();
        expect_eq("the last node", bench.driver.capture_dependencies(stream)?, last)?;
        bench.append(log, n as u32, stream)?;
    }
    let seen = bench.driver.capture_topology(stream)?;
    let graph = bench.end(stream)?;
    let kinds = |shape: &warpool_driver::GraphTopology| shape.nodes.iter().map(|node| node.kind).collect::<Vec<_>>();
    expect_eq("the kinds at the end", kinds(&bench.driver.graph_topology(graph)?), kinds(&seen))
}

fn external_events_become_nodes(bench: &Bench<'_>) -> Checked {
    let (stream, other, event, outside) = (bench.stream()?, bench.stream()?, bench.event()?, bench.event()?);
    bench.record(outside, other)?;
    bench.sync(other)?;
    let graph = bench.captured(stream, || {
        bench.driver.stream_wait_event(stream, outside, EventScope::External)?;
        bench.driver.event_record(event, stream, EventScope::External)?;
        expect(bench.driver.event_query(event)?, "an event that marks nothing yet")?;
        bench.expect_state(stream, Capturing::Yes)
    })?;
    let kinds: Vec<_> = bench.driver.graph_topology(graph)?.nodes.iter().map(|node| node.kind).collect();
    expect_eq("the nodes", kinds, vec![NodeKind::EventWait, NodeKind::EventRecord])
}
