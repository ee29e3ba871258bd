//! Stream capture: how a capture begins, spreads to other streams, is invalidated and ends.

use std::collections::BTreeSet;

use warpool_driver::ErrorCode::{
    CapturedEvent, IllegalState, InvalidValue, StreamCaptureImplicit, StreamCaptureInvalidated, StreamCaptureIsolation,
    StreamCaptureMerge, StreamCaptureUnjoined, StreamCaptureUnmatched, StreamCaptureUnsupported,
    StreamCaptureWrongThread,
};
use warpool_driver::{
    CaptureMode, CaptureState, ErrorCode, EventScope, GraphTopology, NodeKind, Pattern, StreamHandle, StreamId,
};

use crate::check::Check;
use crate::context::{Capture, KernelLog, Resource, TestContext};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of};

pub(crate) const CHECKS: &[Check] = crate::checks![
    captured_work_does_not_run,
    ending_without_a_capture_is_rejected,
    legacy_stream_cannot_capture,
    other_streams_can_capture_in_every_mode,
    stream_has_one_capture_at_a_time,
    capture_ids_are_unique,
    stream_info_is_available_during_capture,
    stream_handle_is_available_during_capture,
    captured_event_is_unusable_until_recorded_again,
    captured_event_may_be_destroyed,
    wait_for_unrecorded_event_adds_no_node,
    wait_on_captured_event_joins_the_capture,
    empty_branch_need_not_be_joined,
    joined_stream_cannot_begin_a_capture,
    legacy_stream_state_query_invalidates_nothing,
    legacy_stream_is_usable_during_non_blocking_capture,
    only_relaxed_captures_can_be_ended_by_another_thread,
    other_threads_can_add_work_to_a_capture,
    destroying_the_origin_stream_drops_the_capture,
    joined_stream_may_be_destroyed,
    capture_dependencies_follow_the_work,
    topology_is_available_during_capture,
    capture_can_be_queried_while_other_threads_add_work,
    external_events_become_nodes,
    ; provoking hazards:
    synchronizing_the_capturing_stream_invalidates_the_capture,
    invalidated_capture_rejects_work,
    stream_is_usable_after_invalidated_capture,
    querying_a_captured_event_invalidates_the_capture,
    waiting_for_uncaptured_work_invalidates_the_capture,
    event_recorded_outside_leaves_the_capture,
    unjoined_work_fails_the_capture,
    only_the_origin_stream_can_end_a_capture,
    two_captures_cannot_merge,
    legacy_stream_invalidates_captures_of_blocking_streams,
    legacy_stream_cannot_join_a_capture,
    capture_dependencies_require_an_active_capture,
    end_of_invalidated_capture_names_the_invalidating_call,
];

const MODES: [CaptureMode; 3] = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

fn stream_info_is_available_during_capture(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let mut info = None;
    context.capture(stream, || {
        info = Some(context.driver.stream_info(stream)?);
        Ok(())
    })?;
    expect_eq("the info during the capture", info, Some(context.driver.stream_info(stream)?))
}

/// In every mode, on the capturing thread and on another, also for a stream that was never queried before.
fn stream_handle_is_available_during_capture(context: &TestContext) -> CheckResult {
    for mode in MODES {
        let stream = context.stream()?;
        context.driver.capture_begin(stream, mode)?;
        let here = context.driver.stream_handle(stream);
        let there = context.on_new_thread(|| context.driver.stream_handle(stream));
        let state = context.driver.capture_state(stream);
        let ended = context.driver.capture_end(stream).map(|graph| context.track(Resource::Graph(graph)));
        let info = context.driver.stream_info(stream)?;
        let want = StreamHandle { device: info.device, raw: info.raw };
        expect_eq(
            &format!("its handle in a {mode:?} capture, on this and on another thread"),
            (here?, there?),
            (want, want),
        )?;
        expect(matches!(state?, CaptureState::Active(_)), "the capture is still active")?;
        ended?;
    }
    Ok(())
}

fn captured_work_does_not_run(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(3)?);
    context.append(log, 1, stream)?;
    context.capture(stream, || context.append(log, 2, stream))?;
    context.append(log, 3, stream)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1, 3])
}

fn ending_without_a_capture_is_rejected(context: &TestContext) -> CheckResult {
    for stream in [context.stream()?, context.blocking_stream()?, context.per_thread_stream()?] {
        expect_error(context.driver.capture_end(stream), IllegalState)?;
        context.expect_capture(stream, Capture::None)?;
    }
    Ok(())
}

fn legacy_stream_cannot_capture(context: &TestContext) -> CheckResult {
    let (legacy, log) = (context.legacy_stream()?, context.kernel_log(1)?);
    for mode in MODES {
        expect_error(context.driver.capture_begin(legacy, mode), StreamCaptureUnsupported)?;
    }
    context.expect_capture(legacy, Capture::None)?;
    context.append(log, 1, legacy)?;
    context.synchronize(legacy)?;
    context.expect_log(log, &[1])
}

fn other_streams_can_capture_in_every_mode(context: &TestContext) -> CheckResult {
    let log = context.kernel_log(9)?;
    for mode in MODES {
        for stream in [context.stream()?, context.blocking_stream()?, context.per_thread_stream()?] {
            context.driver.capture_begin(stream, mode)?;
            context.expect_capture(stream, Capture::Active)?;
            context.append(log, 1, stream)?;
            let graph = context.end_capture(stream)?;
            context.expect_capture(stream, Capture::None)?;
            expect_eq("the number of nodes", context.driver.graph_topology(graph)?.nodes.len(), 1)?;
        }
    }
    Ok(())
}

fn stream_has_one_capture_at_a_time(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(1)?);
    context.begin_capture(stream)?;
    expect_error(context.driver.capture_begin(stream, CaptureMode::Relaxed), IllegalState)?;
    expect_error(context.driver.capture_begin(stream, CaptureMode::Global), IllegalState)?;
    context.expect_capture(stream, Capture::Active)?;
    context.append(log, 1, stream)?;
    let graph = context.end_capture(stream)?;
    expect_eq("the number of nodes", context.driver.graph_topology(graph)?.nodes.len(), 1)
}

fn capture_ids_are_unique(context: &TestContext) -> CheckResult {
    let (first, second) = (context.stream()?, context.stream()?);
    let id = |stream| match context.driver.capture_state(stream)? {
        CaptureState::Active(id) => Ok(id),
        other => expect(false, &format!("an active capture, got {other:?}")).map(|()| unreachable!()),
    };
    let mut seen = BTreeSet::new();
    for _ in 0..10 {
        context.driver.capture_begin(first, CaptureMode::Global)?;
        context.driver.capture_begin(second, CaptureMode::Global)?;
        expect_eq("the id in a second query", id(first)?, id(first)?)?;
        expect(seen.insert(id(first)?) && seen.insert(id(second)?), "the ids are new")?;
        context.end_capture(second)?;
        context.end_capture(first)?;
    }
    Ok(())
}

/// In a relaxed capture on a new stream, `act` must fail with `want` and invalidate the capture.
fn invalidates(
    context: &TestContext,
    want: ErrorCode,
    act: impl Fn(StreamId) -> warpool_driver::Result<()>,
) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(1)?);
    context.begin_capture(stream)?;
    expect_error_of("the invalidating call", act(stream), want)?;
    expect_invalidated(context, stream)?;
    expect_usable(context, stream, log)
}

/// The capture that began on `stream` must be invalidated; its end reports that and ends it.
fn expect_invalidated(context: &TestContext, stream: StreamId) -> CheckResult {
    context.expect_capture(stream, Capture::Invalidated)?;
    expect_error(context.driver.capture_end(stream), StreamCaptureInvalidated)?;
    context.expect_capture(stream, Capture::None)
}

fn expect_usable(context: &TestContext, stream: StreamId, log: KernelLog) -> CheckResult {
    context.append(log, 5, stream)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[5])
}

fn synchronizing_the_capturing_stream_invalidates_the_capture(context: &TestContext) -> CheckResult {
    invalidates(context, StreamCaptureUnsupported, |stream| context.driver.stream_synchronize(stream))?;
    invalidates(context, StreamCaptureUnsupported, |stream| context.driver.stream_query(stream).map(drop))
}

fn invalidated_capture_rejects_work(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(1)?);
    let memory = context.alloc(64)?;
    context.begin_capture(stream)?;
    expect_error(context.driver.stream_query(stream), StreamCaptureUnsupported)?;
    let fill = context.driver.fill(memory, Pattern::U8(1), 16, stream);
    expect_error(fill, StreamCaptureInvalidated)?;
    expect_invalidated(context, stream)?;
    expect_usable(context, stream, log)
}

fn stream_is_usable_after_invalidated_capture(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(2)?);
    context.begin_capture(stream)?;
    context.append(log, 1, stream)?;
    expect_error(context.driver.stream_query(stream), StreamCaptureUnsupported)?;
    expect_invalidated(context, stream)?;
    let exec = context.capture_exec(stream, || context.append(log, 2, stream))?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[2])
}

fn end_of_invalidated_capture_names_the_invalidating_call(context: &TestContext) -> CheckResult {
    let (driver, device, stream, event) = (&context.driver, context.device_id, context.stream()?, context.event()?);
    context.record(event, context.stream()?)?;
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
        let result = if here { act() } else { context.on_new_thread(&act) };
        let Err(cause) = result else { return expect(false, &format!("{name} fails")) };
        // Later errors do not replace the first.
        expect_error_of("another", driver.event_record(event, stream, EventScope::Plain), StreamCaptureInvalidated)?;
        let Err(error) = driver.capture_end(stream) else { return expect(false, "the end of the capture fails") };
        expect_eq("the error code of the end", error.code, StreamCaptureInvalidated)?;
        let detail = error.detail.as_deref().unwrap_or_default();
        let named = detail.contains(name) && detail.contains(&format!("{:?}", cause.code));
        expect(named, &format!("the detail names {name} and {:?}: {detail:?}", cause.code))?;
    }
    Ok(())
}

fn querying_a_captured_event_invalidates_the_capture(context: &TestContext) -> CheckResult {
    for _ in 0..2 {
        let event = context.event()?;
        invalidates(context, CapturedEvent, |stream| {
            context.driver.event_record(event, stream, EventScope::Plain)?;
            context.driver.event_query(event).map(drop)
        })?;
        invalidates(context, CapturedEvent, |stream| {
            context.driver.event_record(event, stream, EventScope::Plain)?;
            context.driver.event_synchronize(event)
        })?;
    }
    Ok(())
}

fn captured_event_is_unusable_until_recorded_again(context: &TestContext) -> CheckResult {
    let (stream, other, event) = (context.stream()?, context.stream()?, context.event()?);
    context.record(event, stream)?;
    context.synchronize(stream)?;
    context.capture(stream, || context.record(event, stream))?;
    expect_error(context.driver.event_query(event), InvalidValue)?;
    expect_error(context.driver.event_synchronize(event), InvalidValue)?;
    expect_error(context.driver.stream_wait_event(other, event, EventScope::Plain), InvalidValue)?;
    context.expect_capture(other, Capture::None)?;
    context.record(event, stream)?;
    context.driver.event_synchronize(event)?;
    expect(context.driver.event_query(event)?, "the event is complete")?;
    context.wait(other, event)?;
    context.synchronize(other)
}

fn captured_event_may_be_destroyed(context: &TestContext) -> CheckResult {
    let (first, second, event, log) = (context.stream()?, context.stream()?, context.event()?, context.kernel_log(2)?);
    let exec = context.capture_exec(first, || {
        context.append(log, 1, first)?;
        context.record(event, first)?;
        context.wait(second, event)?;
        context.destroy_event(event)?;
        context.append(log, 2, second)?;
        context.order(second, first)
    })?;
    context.replay(exec, first)?;
    context.expect_log(log, &[1, 2])
}

fn waiting_for_uncaptured_work_invalidates_the_capture(context: &TestContext) -> CheckResult {
    let (other, event) = (context.stream()?, context.event()?);
    context.record(event, other)?;
    context.synchronize(other)?;
    invalidates(context, StreamCaptureIsolation, |stream| {
        context.driver.stream_wait_event(stream, event, EventScope::Plain)
    })
}

fn wait_for_unrecorded_event_adds_no_node(context: &TestContext) -> CheckResult {
    let (stream, event) = (context.stream()?, context.event()?);
    let graph = context.capture(stream, || context.wait(stream, event))?;
    expect_eq("the number of nodes", context.driver.graph_topology(graph)?.nodes.len(), 0)
}

fn event_recorded_outside_leaves_the_capture(context: &TestContext) -> CheckResult {
    let (other, event) = (context.stream()?, context.event()?);
    invalidates(context, StreamCaptureIsolation, |stream| {
        context.driver.event_record(event, stream, EventScope::Plain)?;
        context.driver.event_record(event, other, EventScope::Plain)?;
        context.driver.stream_wait_event(stream, event, EventScope::Plain)
    })
}

fn wait_on_captured_event_joins_the_capture(context: &TestContext) -> CheckResult {
    let (first, second, log) = (context.stream()?, context.stream()?, context.kernel_log(3)?);
    let graph = context.capture(first, || {
        context.append(log, 1, first)?;
        context.order(first, second)?;
        expect_eq(
            "the capture of the second stream",
            context.driver.capture_state(second)?,
            context.driver.capture_state(first)?,
        )?;
        context.append(log, 2, second)?;
        context.order(second, first)?;
        context.append(log, 3, first)
    })?;
    context.expect_capture(second, Capture::None)?;
    let shape = context.driver.graph_topology(graph)?;
    let [one, two, three] = [0, 1, 2].map(|at| shape.nodes.get(at).map(|node| node.id));
    let edges: Vec<_> = shape.edges.iter().map(|&(from, to)| (Some(from), Some(to))).collect();
    // A join adds dependencies and removes none, even where one of the edges is redundant.
    for edge in [(one, two), (two, three), (one, three)] {
        expect(edges.contains(&edge), &format!("the edge {edge:?} is one of {edges:?}"))?;
    }
    expect_eq("nodes and edges", (shape.nodes.len(), edges.len()), (3, 3))?;
    context.replay(context.instantiate(graph)?, second)?;
    context.expect_log(log, &[1, 2, 3])
}

fn unjoined_work_fails_the_capture(context: &TestContext) -> CheckResult {
    let (first, second, log) = (context.stream()?, context.stream()?, context.kernel_log(1)?);
    context.begin_capture(first)?;
    context.order(first, second)?;
    context.append(log, 1, second)?;
    expect_error(context.driver.capture_end(first), StreamCaptureUnjoined)?;
    context.expect_capture(first, Capture::None)?;
    context.expect_capture(second, Capture::None)?;
    expect_usable(context, second, log)
}

fn empty_branch_need_not_be_joined(context: &TestContext) -> CheckResult {
    let (first, second, log) = (context.stream()?, context.stream()?, context.kernel_log(1)?);
    context.capture(first, || context.order(first, second))?;
    context.expect_capture(second, Capture::None)?;
    expect_usable(context, second, log)
}

fn only_the_origin_stream_can_end_a_capture(context: &TestContext) -> CheckResult {
    let (first, second, log) = (context.stream()?, context.stream()?, context.kernel_log(1)?);
    context.begin_capture(first)?;
    context.order(first, second)?;
    expect_error(context.driver.capture_end(second), StreamCaptureUnmatched)?;
    context.expect_capture(second, Capture::Invalidated)?;
    expect_invalidated(context, first)?;
    context.expect_capture(second, Capture::None)?;
    expect_usable(context, second, log)
}

fn joined_stream_cannot_begin_a_capture(context: &TestContext) -> CheckResult {
    let (first, second) = (context.stream()?, context.stream()?);
    context.begin_capture(first)?;
    context.order(first, second)?;
    expect_error(context.driver.capture_begin(second, CaptureMode::Relaxed), IllegalState)?;
    context.expect_capture(first, Capture::Active)?;
    context.expect_capture(second, Capture::Active)?;
    context.end_capture(first)?;
    Ok(())
}

fn two_captures_cannot_merge(context: &TestContext) -> CheckResult {
    let (first, second, event) = (context.stream()?, context.stream()?, context.event()?);
    context.begin_capture(first)?;
    context.begin_capture(second)?;
    context.record(event, first)?;
    expect_error(context.driver.stream_wait_event(second, event, EventScope::Plain), StreamCaptureMerge)?;
    context.expect_capture(second, Capture::Invalidated)?;
    expect_invalidated(context, first)?;
    expect_invalidated(context, second)
}

fn legacy_stream_invalidates_captures_of_blocking_streams(context: &TestContext) -> CheckResult {
    let (legacy, blocking) = (context.legacy_stream()?, context.blocking_stream()?);
    let (event, memory, log) = (context.event()?, context.alloc(64)?, context.kernel_log(1)?);
    let calls: [(&str, &dyn Fn() -> warpool_driver::Result<()>); 3] = [
        ("fill", &|| context.driver.fill(memory, Pattern::U8(1), 16, legacy)),
        ("event_record", &|| context.driver.event_record(event, legacy, EventScope::Plain)),
        ("stream_query", &|| context.driver.stream_query(legacy).map(drop)),
    ];
    for (name, call) in calls {
        context.begin_capture(blocking)?;
        expect_error_of(name, call(), StreamCaptureImplicit)?;
        expect_invalidated(context, blocking)?;
    }
    expect_usable(context, blocking, log)
}

fn legacy_stream_state_query_invalidates_nothing(context: &TestContext) -> CheckResult {
    let (legacy, blocking) = (context.legacy_stream()?, context.blocking_stream()?);
    context.begin_capture(blocking)?;
    expect_error(context.driver.capture_state(legacy), StreamCaptureImplicit)?;
    context.expect_capture(blocking, Capture::Active)?;
    context.end_capture(blocking)?;
    context.expect_capture(legacy, Capture::None)
}

fn legacy_stream_is_usable_during_non_blocking_capture(context: &TestContext) -> CheckResult {
    let (legacy, stream, log) = (context.legacy_stream()?, context.stream()?, context.kernel_log(2)?);
    context.capture(stream, || {
        context.append(log, 1, legacy)?;
        context.synchronize(legacy)?;
        context.expect_capture(legacy, Capture::None)?;
        context.expect_capture(stream, Capture::Active)
    })?;
    context.expect_log(log, &[1])
}

fn legacy_stream_cannot_join_a_capture(context: &TestContext) -> CheckResult {
    let (legacy, event) = (context.legacy_stream()?, context.event()?);
    invalidates(context, StreamCaptureImplicit, |stream| {
        context.driver.event_record(event, stream, EventScope::Plain)?;
        context.driver.stream_wait_event(legacy, event, EventScope::Plain)
    })
}

fn only_relaxed_captures_can_be_ended_by_another_thread(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    for mode in MODES {
        context.driver.capture_begin(stream, mode)?;
        let ended = context.on_new_thread(|| context.driver.capture_end(stream));
        if mode == CaptureMode::Relaxed {
            context.track(Resource::Graph(ended?));
        } else {
            expect_error(ended, StreamCaptureWrongThread)?;
        }
        context.expect_capture(stream, Capture::None)?;
        expect_error(context.driver.capture_end(stream), IllegalState)?;
    }
    Ok(())
}

fn other_threads_can_add_work_to_a_capture(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    for mode in MODES {
        let log = context.kernel_log(3)?;
        context.driver.capture_begin(stream, mode)?;
        context.append(log, 1, stream)?;
        context.on_new_thread(|| context.append(log, 2, stream))?;
        context.append(log, 3, stream)?;
        let graph = context.end_capture(stream)?;
        context.replay(context.instantiate(graph)?, stream)?;
        context.expect_log(log, &[1, 2, 3])?;
    }
    Ok(())
}

fn capture_can_be_queried_while_other_threads_add_work(context: &TestContext) -> CheckResult {
    const WORK: u32 = 200;
    let (stream, log) = (context.stream()?, context.kernel_log(3 * WORK)?);
    let sides = [context.stream()?, context.stream()?];
    context.driver.capture_begin(stream, CaptureMode::Relaxed)?;
    for side in sides {
        context.order(stream, side)?;
    }
    std::thread::scope(|scope| -> CheckResult {
        let add = |stream| move || (0..WORK).try_for_each(|value| context.append(log, value, stream));
        let threads = [stream, sides[0], sides[1]].map(|stream| scope.spawn(add(stream)));
        for _ in 0..WORK {
            let nodes = context.driver.capture_topology(stream)?.nodes.len();
            expect(nodes <= 3 * WORK as usize, "no more nodes than work")?;
            for stream in [stream, sides[0], sides[1]] {
                expect(context.driver.capture_dependencies(stream)?.len() <= 1, "one kernel comes last")?;
            }
        }
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    for side in sides {
        context.order(side, stream)?;
    }
    let nodes = context.driver.graph_topology(context.end_capture(stream)?)?.nodes;
    expect_eq("kernels", nodes.iter().filter(|node| node.kind == NodeKind::Kernel).count(), 3 * WORK as usize)
}

fn destroying_the_origin_stream_drops_the_capture(context: &TestContext) -> CheckResult {
    let (first, log) = (context.stream()?, context.kernel_log(2)?);
    context.driver.capture_begin(first, CaptureMode::Global)?;
    context.append(log, 1, first)?;
    context.destroy_stream(first)?;
    // No capture is left that forbids calls.
    let other = context.stream()?;
    context.synchronize(other)?;
    expect_usable(context, other, log)
}

fn joined_stream_may_be_destroyed(context: &TestContext) -> CheckResult {
    let (first, second, log) = (context.stream()?, context.stream()?, context.kernel_log(2)?);
    let exec = context.capture_exec(first, || {
        context.order(first, second)?;
        context.append(log, 1, second)?;
        context.order(second, first)?;
        context.destroy_stream(second)?;
        context.append(log, 2, first)
    })?;
    context.replay(exec, first)?;
    context.expect_log(log, &[1, 2])
}

fn capture_dependencies_follow_the_work(context: &TestContext) -> CheckResult {
    let (first, second) = (context.stream()?, context.stream()?);
    let (left, right) = (context.kernel_log(2)?, context.kernel_log(2)?);
    let waits = |stream| context.driver.capture_dependencies(stream);
    context.begin_capture(first)?;
    expect_eq("dependencies at the start", waits(first)?.len(), 0)?;
    context.append(left, 1, first)?;
    let one = waits(first)?;
    expect_eq("dependencies after a kernel", one.len(), 1)?;
    context.order(first, second)?;
    expect_eq("dependencies of a joined stream", waits(second)?, one.clone())?;
    context.append(left, 2, first)?;
    context.append(right, 3, second)?;
    expect(waits(first)? != one && waits(first)? != waits(second)?, "each branch has its own dependencies")?;
    context.order(second, first)?;
    let joined: BTreeSet<_> = waits(first)?.into_iter().collect();
    expect_eq("dependencies after the join", joined.len(), 2)?;
    expect(joined.contains(&waits(second)?[0]), "the other branch is one of them")?;
    context.append(left, 4, first)?;
    expect_eq("dependencies after work that follows the join", waits(first)?.len(), 1)?;
    context.end_capture(first)?;
    Ok(())
}

fn capture_dependencies_require_an_active_capture(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    expect_error(context.driver.capture_dependencies(stream), IllegalState)?;
    expect_error(context.driver.capture_topology(stream), IllegalState)?;
    context.begin_capture(stream)?;
    expect_error(context.driver.stream_query(stream), StreamCaptureUnsupported)?;
    expect_error(context.driver.capture_dependencies(stream), StreamCaptureInvalidated)?;
    expect_error(context.driver.capture_topology(stream), StreamCaptureInvalidated)?;
    expect_invalidated(context, stream)
}

fn topology_is_available_during_capture(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(5)?);
    context.begin_capture(stream)?;
    for n in 0..5_usize {
        let shape = context.driver.capture_topology(stream)?;
        expect_eq("nodes so far", shape.nodes.len(), n)?;
        expect_eq("edges so far", shape.edges.len(), n.saturating_sub(1))?;
        let last: Vec<_> = shape.nodes.last().map(|node| node.id).into_iter().collect();
        expect_eq("the last node", context.driver.capture_dependencies(stream)?, last)?;
        context.append(log, n as u32, stream)?;
    }
    let seen = context.driver.capture_topology(stream)?;
    let graph = context.end_capture(stream)?;
    let kinds = |shape: &GraphTopology| shape.nodes.iter().map(|node| node.kind).collect::<Vec<_>>();
    expect_eq("the kinds of nodes at the end", kinds(&context.driver.graph_topology(graph)?), kinds(&seen))
}

fn external_events_become_nodes(context: &TestContext) -> CheckResult {
    let (stream, other, event, outside) = (context.stream()?, context.stream()?, context.event()?, context.event()?);
    context.record(outside, other)?;
    context.synchronize(other)?;
    let graph = context.capture(stream, || {
        context.driver.stream_wait_event(stream, outside, EventScope::External)?;
        context.driver.event_record(event, stream, EventScope::External)?;
        expect(context.driver.event_query(event)?, "an event that is not recorded yet is complete")?;
        context.expect_capture(stream, Capture::Active)
    })?;
    let kinds: Vec<_> = context.driver.graph_topology(graph)?.nodes.iter().map(|node| node.kind).collect();
    expect_eq("the kinds of nodes", kinds, vec![NodeKind::EventWait, NodeKind::EventRecord])
}
