//! Streams: their properties, the order of their work, host callbacks, adopted handles.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::ErrorCode::{InvalidHandle, NotPermitted};
use warpool_driver::{
    CaptureMode, DevicePtr, EventId, EventOptions, EventScope, ForeignStream, GraphExecId, KernelArg, LaunchShape,
    Pattern, StreamHandle, StreamId, StreamOptions,
};

use crate::check::Check;
use crate::context::{TestContext, mix_u32_on_host, to_bytes};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq};
use crate::sync::lock;

pub(crate) const CHECKS: &[Check] = crate::checks![
    default_stream_ids_are_constant,
    priority_range_is_ordered,
    priorities_are_clamped,
    stream_info_matches_creation_options,
    ids_are_not_reused,
    default_streams_cannot_be_destroyed,
    unknown_stream_is_rejected,
    work_runs_in_submission_order,
    fills_copies_and_kernels_run_in_submission_order,
    query_reports_unfinished_work,
    streams_run_independently,
    event_wait_orders_two_streams,
    wait_uses_the_latest_record_before_it,
    wait_for_unrecorded_event_is_a_no_op,
    join_waits_for_every_branch,
    legacy_stream_waits_for_blocking_streams,
    blocking_streams_wait_for_legacy_stream,
    legacy_stream_query_includes_blocking_streams,
    non_blocking_streams_do_not_synchronize_with_legacy_stream,
    per_thread_stream_is_per_thread,
    per_thread_stream_synchronizes_with_legacy_stream,
    callbacks_run_once_and_in_order,
    callbacks_wait_for_earlier_work,
    later_work_waits_for_callbacks,
    driver_calls_in_callbacks_are_rejected,
    a_panic_in_a_callback_ends_the_callback_only,
    adopting_a_handle_returns_its_stream,
    destroyed_stream_finishes_its_work,
    any_thread_may_use_a_stream,
    random_multi_stream_programs_compute_correct_results,
    ; provoking hazards:
    destroyed_stream_is_rejected,
];

fn default_stream_ids_are_constant(context: &TestContext) -> CheckResult {
    let (legacy, per_thread) = (context.legacy_stream()?, context.per_thread_stream()?);
    expect(legacy != per_thread, "the two default streams are different")?;
    expect_eq("the legacy stream in a second query", context.driver.stream_default(context.device_id)?, legacy)?;
    let on_other_thread = context.on_new_thread(|| -> warpool_driver::Result<_> {
        Ok((context.driver.stream_default(context.device_id)?, context.driver.stream_per_thread(context.device_id)?))
    });
    expect_eq("both, queried on another thread", on_other_thread?, (legacy, per_thread))?;
    for stream in [legacy, per_thread] {
        let info = context.driver.stream_info(stream)?;
        expect_eq("its device", info.device, context.device_id)?;
        expect(!info.non_blocking, "a default stream is blocking")?;
        let handle = context.driver.stream_handle(stream)?;
        expect_eq("its handle", handle, StreamHandle { device: info.device, raw: info.raw })?;
    }
    Ok(())
}

fn priority_range_is_ordered(context: &TestContext) -> CheckResult {
    let range = context.driver.stream_priority_range(context.device_id)?;
    expect(range.greatest <= range.least, "the greatest priority has the lowest number")
}

fn priorities_are_clamped(context: &TestContext) -> CheckResult {
    let range = context.driver.stream_priority_range(context.device_id)?;
    for priority in [-1000, range.greatest - 1, range.greatest, -1, 0, range.least + 1, 1000] {
        let stream = context.stream_with(StreamOptions { non_blocking: true, priority })?;
        let got = context.driver.stream_info(stream)?.priority;
        expect_eq(&format!("priority {priority}"), got, range.clamp(priority))?;
    }
    Ok(())
}

fn stream_info_matches_creation_options(context: &TestContext) -> CheckResult {
    let mut raw = BTreeSet::new();
    for non_blocking in [true, false, true] {
        let stream = context.stream_with(StreamOptions { non_blocking, priority: 0 })?;
        let info = context.driver.stream_info(stream)?;
        expect_eq("its device", info.device, context.device_id)?;
        expect_eq("whether it is non-blocking", info.non_blocking, non_blocking)?;
        expect(info.raw.0 > 2, "the handle is none of the default streams'")?;
        let handle = context.driver.stream_handle(stream)?;
        expect_eq("its handle", handle, StreamHandle { device: info.device, raw: info.raw })?;
        expect(raw.insert(info.raw), "handles of live streams are different")?;
    }
    Ok(())
}

fn ids_are_not_reused(context: &TestContext) -> CheckResult {
    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        let stream = context.stream()?;
        expect(seen.insert(stream), "the stream id is new")?;
        context.destroy_stream(stream)?;
    }
    Ok(())
}

fn default_streams_cannot_be_destroyed(context: &TestContext) -> CheckResult {
    for stream in [context.legacy_stream()?, context.per_thread_stream()?] {
        expect_error(context.driver.stream_destroy(stream), InvalidHandle)?;
        let log = context.kernel_log(1)?;
        context.append(log, 9, stream)?;
        context.synchronize(stream)?;
        context.expect_log(log, &[9])?;
    }
    Ok(())
}

fn unknown_stream_is_rejected(context: &TestContext) -> CheckResult {
    expect_rejected(context, StreamId(u64::MAX))
}

fn destroyed_stream_is_rejected(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    context.destroy_stream(stream)?;
    expect_rejected(context, stream)
}

/// Every call that takes a stream must reject this one.
fn expect_rejected(context: &TestContext, stream: StreamId) -> CheckResult {
    let driver = &context.driver;
    let (event, memory, pinned) = (context.event()?, context.alloc(64)?, context.alloc_pinned(64)?);
    let spin = context.kernels()?.spin;
    let rejected = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidHandle);
    rejected("stream_info", driver.stream_info(stream).map(drop))?;
    rejected("stream_handle", driver.stream_handle(stream).map(drop))?;
    rejected("stream_query", driver.stream_query(stream).map(drop))?;
    rejected("stream_synchronize", driver.stream_synchronize(stream))?;
    rejected("stream_wait_event", driver.stream_wait_event(stream, event, EventScope::Plain))?;
    rejected("stream_host_callback", driver.stream_host_callback(stream, Arc::new(|| ())))?;
    rejected("event_record", driver.event_record(event, stream, EventScope::Plain))?;
    rejected("copy", driver.copy(memory.into(), pinned.into(), 16, stream))?;
    rejected("fill", driver.fill(memory, Pattern::U8(1), 16, stream))?;
    rejected("kernel_launch", context.launch_kernel(spin, LaunchShape::ONE, &[KernelArg::U64(0)], stream))?;
    rejected("capture_begin", driver.capture_begin(stream, CaptureMode::Relaxed))?;
    rejected("capture_state", driver.capture_state(stream).map(drop))?;
    rejected("capture_end", driver.capture_end(stream).map(drop))?;
    rejected("capture_dependencies", driver.capture_dependencies(stream).map(drop))?;
    rejected("graph_launch", context.launch_graph(GraphExecId(u64::MAX), stream))?;
    rejected("stream_destroy", driver.stream_destroy(stream))
}

fn work_runs_in_submission_order(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(100)?);
    let values: Vec<u32> = context.random_words(100);
    for &value in &values {
        context.append(log, value, stream)?;
    }
    context.synchronize(stream)?;
    context.expect_log(log, &values)
}

fn fills_copies_and_kernels_run_in_submission_order(context: &TestContext) -> CheckResult {
    let (stream, n) = (context.stream()?, 1000_u32);
    let start = context.random_words(n as usize);
    let pinned = context.alloc_pinned_bytes(&to_bytes(&start))?;
    let back = context.alloc_pinned(4 * u64::from(n))?;
    let (first, second) = (context.alloc(4 * u64::from(n))?, context.alloc(4 * u64::from(n))?);
    context.driver.copy(first.into(), pinned.into(), 4 * u64::from(n), stream)?;
    context.add_u32(first, n, 5, stream)?;
    context.driver.copy(second.into(), first.into(), 4 * u64::from(n), stream)?;
    context.driver.fill(first, Pattern::U32(3), u64::from(n), stream)?;
    context.add_u32(first, n, 1, stream)?;
    let mix = context.kernels()?.mix_u32;
    context.launch(mix, n, &[second.into(), first.into(), KernelArg::U32(n)], stream)?;
    context.driver.copy(back.into(), second.into(), 4 * u64::from(n), stream)?;
    context.driver.fill(second, Pattern::U8(0), 4 * u64::from(n), stream)?;
    context.synchronize(stream)?;
    let want: Vec<u32> = start.iter().map(|word| word.wrapping_add(5).wrapping_mul(5).wrapping_add(4)).collect();
    expect_slice_eq("the memory copied back", &context.read_pinned(back, 4 * n as usize)?, &to_bytes(&want))?;
    expect_slice_eq("the memory filled last", &context.read_words(second, n as usize)?, &vec![0; n as usize])
}

fn query_reports_unfinished_work(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    context.expect_idle("an empty stream", stream)?;
    context.keep_busy(stream)?;
    context.expect_busy("a busy stream", stream)?;
    context.synchronize(stream)?;
    context.expect_idle("the first stream", stream)
}

fn streams_run_independently(context: &TestContext) -> CheckResult {
    let (busy, free, log) = (context.stream()?, context.stream()?, context.kernel_log(10)?);
    context.keep_busy(busy)?;
    for value in 0..10 {
        context.append(log, value, free)?;
    }
    context.synchronize(free)?;
    context.expect_busy("the busy stream", busy)?;
    context.expect_log(log, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
}

fn event_wait_orders_two_streams(context: &TestContext) -> CheckResult {
    let (first, second, log) = (context.stream()?, context.stream()?, context.kernel_log(2)?);
    context.delay(first)?;
    context.append(log, 1, first)?;
    context.order(first, second)?;
    context.append(log, 2, second)?;
    context.synchronize(second)?;
    context.expect_idle("the first stream", first)?;
    context.expect_log(log, &[1, 2])
}

fn wait_uses_the_latest_record_before_it(context: &TestContext) -> CheckResult {
    let (first, second, event, log) = (context.stream()?, context.stream()?, context.event()?, context.kernel_log(2)?);
    context.append(log, 1, first)?;
    context.record(event, first)?;
    context.wait(second, event)?;
    context.keep_busy(first)?;
    context.record(event, first)?;
    context.append(log, 2, second)?;
    context.synchronize(second)?;
    context.expect_busy("the stream of the second record", first)?;
    context.expect_log(log, &[1, 2])
}

fn wait_for_unrecorded_event_is_a_no_op(context: &TestContext) -> CheckResult {
    let (first, second, event) = (context.stream()?, context.stream()?, context.event()?);
    context.keep_busy(first)?;
    context.wait(second, event)?;
    context.record(event, first)?;
    context.synchronize(second)?;
    context.expect_busy("the stream of the record after the wait", first)
}

fn join_waits_for_every_branch(context: &TestContext) -> CheckResult {
    let (root, n) = (context.stream()?, 256_u32);
    let total = context.alloc_words(&vec![0; n as usize])?;
    let mix = context.kernels()?.mix_u32;
    let mut want = vec![0_u32; n as usize];
    let mut parts = Vec::new();
    for branch in 0..8_u32 {
        let stream = context.stream()?;
        let start = context.random_words(n as usize);
        let data = context.alloc_words(&start)?;
        context.order(root, stream)?;
        if branch % 2 == 0 {
            context.delay(stream)?;
        }
        context.add_u32(data, n, branch, stream)?;
        context.order(stream, root)?;
        parts.push((data, start.iter().map(|word| word.wrapping_add(branch)).collect::<Vec<_>>()));
    }
    for (data, part) in &parts {
        context.launch(mix, n, &[total.into(), (*data).into(), KernelArg::U32(n)], root)?;
        want = mix_u32_on_host(&want, part);
    }
    context.synchronize(root)?;
    expect_slice_eq("the joined result", &context.read_words(total, n as usize)?, &want)
}

fn legacy_stream_query_includes_blocking_streams(context: &TestContext) -> CheckResult {
    let (legacy, blocking, other) = (context.legacy_stream()?, context.blocking_stream()?, context.stream()?);
    context.keep_busy(blocking)?;
    context.expect_busy("the legacy stream, which includes the blocking one,", legacy)?;
    context.synchronize(legacy)?;
    context.expect_idle("the blocking stream", blocking)?;
    // Not in the other direction, and not for a non-blocking stream.
    context.keep_busy(legacy)?;
    context.expect_idle("the blocking stream, while the legacy one is busy,", blocking)?;
    context.synchronize(legacy)?;
    context.keep_busy(other)?;
    context.expect_idle("the legacy stream", legacy)?;
    context.synchronize(other)
}

fn legacy_stream_waits_for_blocking_streams(context: &TestContext) -> CheckResult {
    let (legacy, blocking, log) = (context.legacy_stream()?, context.blocking_stream()?, context.kernel_log(2)?);
    context.delay(blocking)?;
    context.append(log, 1, blocking)?;
    context.append(log, 2, legacy)?;
    context.synchronize(legacy)?;
    context.expect_idle("the blocking stream", blocking)?;
    context.expect_log(log, &[1, 2])
}

fn blocking_streams_wait_for_legacy_stream(context: &TestContext) -> CheckResult {
    let (legacy, blocking, log) = (context.legacy_stream()?, context.blocking_stream()?, context.kernel_log(2)?);
    context.delay(legacy)?;
    context.append(log, 1, legacy)?;
    context.append(log, 2, blocking)?;
    context.synchronize(blocking)?;
    context.expect_log(log, &[1, 2])
}

fn non_blocking_streams_do_not_synchronize_with_legacy_stream(context: &TestContext) -> CheckResult {
    let (legacy, free) = (context.legacy_stream()?, context.stream()?);
    let (log, other) = (context.kernel_log(1)?, context.kernel_log(1)?);
    context.keep_busy(free)?;
    context.append(log, 1, legacy)?;
    context.synchronize(legacy)?;
    context.expect_busy("the non-blocking stream", free)?;
    context.expect_log(log, &[1])?;
    context.synchronize(free)?;
    context.keep_busy(legacy)?;
    context.append(other, 2, free)?;
    context.synchronize(free)?;
    context.expect_busy("the legacy stream", legacy)?;
    context.synchronize(legacy)?;
    context.expect_log(other, &[2])
}

fn per_thread_stream_is_per_thread(context: &TestContext) -> CheckResult {
    let (per_thread, log) = (context.per_thread_stream()?, context.kernel_log(1)?);
    context.keep_busy(per_thread)?;
    context.on_new_thread(|| {
        context.append(log, 1, per_thread)?;
        context.synchronize(per_thread)
    })?;
    context.expect_busy("the default stream of this thread", per_thread)?;
    context.synchronize(per_thread)?;
    context.expect_log(log, &[1])
}

fn per_thread_stream_synchronizes_with_legacy_stream(context: &TestContext) -> CheckResult {
    let (per_thread, legacy, log) = (context.per_thread_stream()?, context.legacy_stream()?, context.kernel_log(3)?);
    context.delay(per_thread)?;
    context.append(log, 1, per_thread)?;
    context.append(log, 2, legacy)?;
    context.append(log, 3, per_thread)?;
    context.synchronize(per_thread)?;
    context.expect_log(log, &[1, 2, 3])
}

fn callbacks_run_once_and_in_order(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(50)?);
    let seen = Arc::new(Mutex::new(Vec::new()));
    for value in 0..50_u32 {
        context.append(log, value, stream)?;
        let list = Arc::clone(&seen);
        let push = move || lock(&list).push(value);
        context.driver.stream_host_callback(stream, Arc::new(push))?;
    }
    context.synchronize(stream)?;
    let seen = lock(&seen).clone();
    expect_eq("the order of callbacks", seen, (0..50).collect())?;
    context.expect_log(log, &(0..50).collect::<Vec<_>>())
}

fn callbacks_wait_for_earlier_work(context: &TestContext) -> CheckResult {
    let (stream, flag) = (context.stream()?, Flag::default());
    context.keep_busy(stream)?;
    let marked = context.event()?;
    context.record(marked, stream)?;
    flag.set_in(context, stream)?;
    let early = flag.is_set();
    if !context.driver.event_query(marked)? {
        expect(!early, "no callback runs before the work in front of it is complete")?;
    }
    context.synchronize(stream)?;
    expect(flag.is_set(), "the callback ran")
}

fn later_work_waits_for_callbacks(context: &TestContext) -> CheckResult {
    let (first, second, event) = (context.stream()?, context.stream()?, context.event()?);
    let (flag, seen) = (Flag::default(), Flag::default());
    context.delay(first)?;
    flag.set_in(context, first)?;
    context.record(event, first)?;
    context.wait(second, event)?;
    let (up, copy) = (flag.clone(), seen.clone());
    context.driver.stream_host_callback(second, Arc::new(move || copy.0.store(up.is_set(), Ordering::SeqCst)))?;
    context.driver.event_synchronize(event)?;
    expect(flag.is_set(), "the callback ran before the event behind it")?;
    context.synchronize(second)?;
    expect(seen.is_set(), "the callback ran before work that waits for it")
}

fn driver_calls_in_callbacks_are_rejected(context: &TestContext) -> CheckResult {
    let (stream, event, memory) = (context.stream()?, context.event()?, context.alloc(64)?);
    let results = Arc::new(Mutex::new(Vec::new()));
    // Weak: a driver that stores the callback must not own itself.
    let (driver, list, device) = (Arc::downgrade(&context.driver), Arc::clone(&results), context.device_id);
    let callback = move || {
        if let Some(driver) = driver.upgrade() {
            let mut list = lock(&list);
            list.push(("mem_alloc", driver.mem_alloc(device, 4096).map(drop)));
            list.push(("mem_info", driver.mem_info(device).map(drop)));
            list.push(("stream_query", driver.stream_query(stream).map(drop)));
            list.push(("stream_create", driver.stream_create(device, StreamOptions::default()).map(drop)));
            list.push(("event_create", driver.event_create(device, EventOptions::default()).map(drop)));
            list.push(("event_record", driver.event_record(event, stream, EventScope::Plain)));
            list.push(("fill", driver.fill(memory, Pattern::U8(1), 64, stream)));
            list.push(("device_synchronize", driver.device_synchronize(device)));
            list.push(("device_count", driver.device_count().map(drop)));
        }
    };
    context.driver.stream_host_callback(stream, Arc::new(callback))?;
    context.synchronize(stream)?;
    let results = lock(&results);
    expect_eq("the number of calls", results.len(), 9)?;
    for (call, result) in results.iter() {
        expect_error_of(&format!("{call} in a callback"), result.clone(), NotPermitted)?;
    }
    Ok(())
}

fn a_panic_in_a_callback_ends_the_callback_only(context: &TestContext) -> CheckResult {
    let (stream, flag) = (context.stream()?, Flag::default());
    // Without the panic hook, which would print a report of a panic that is expected.
    context.driver.stream_host_callback(stream, Arc::new(|| std::panic::resume_unwind(Box::new("on purpose"))))?;
    flag.set_in(context, stream)?;
    context.synchronize(stream)?;
    expect(flag.is_set(), "the callback behind one that panicked ran")?;
    Ok(context.driver.device_synchronize(context.device_id)?)
}

fn adopting_a_handle_returns_its_stream(context: &TestContext) -> CheckResult {
    let (driver, device) = (&context.driver, context.device_id);
    expect_eq("handle 0", driver.stream_adopt(device, ForeignStream::NULL)?, context.legacy_stream()?)?;
    expect_eq("handle 1", driver.stream_adopt(device, ForeignStream::LEGACY)?, context.legacy_stream()?)?;
    expect_eq("handle 2", driver.stream_adopt(device, ForeignStream::PER_THREAD)?, context.per_thread_stream()?)?;
    let stream = context.stream()?;
    let foreign = context.foreign_stream(stream)?;
    expect_eq("the handle of a live stream", driver.stream_adopt(device, foreign)?, stream)?;
    expect_eq("the same handle a second time", driver.stream_adopt(device, foreign)?, stream)
}

fn destroyed_stream_finishes_its_work(context: &TestContext) -> CheckResult {
    let (stream, other, log) = (context.stream()?, context.stream()?, context.kernel_log(3)?);
    context.delay(stream)?;
    context.append(log, 1, stream)?;
    context.append(log, 2, stream)?;
    context.order(stream, other)?;
    context.destroy_stream(stream)?;
    context.append(log, 3, other)?;
    context.synchronize(other)?;
    context.expect_log(log, &[1, 2, 3])
}

fn any_thread_may_use_a_stream(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(8)?);
    for value in 0..8 {
        if value % 2 == 0 {
            context.append(log, value, stream)?;
        } else {
            context.on_new_thread(|| context.append(log, value, stream))?;
        }
    }
    context.on_new_thread(|| context.synchronize(stream))?;
    context.expect_log(log, &[0, 1, 2, 3, 4, 5, 6, 7])
}

/// A random program over several streams, in which events order exactly the work that uses the same data. It must
/// compute what a single stream would.
fn random_multi_stream_programs_compute_correct_results(context: &TestContext) -> CheckResult {
    const BUFFERS: usize = 6;
    const N: u32 = 128;
    /// One buffer: its copy on the host, and the event and stream of its last use.
    struct Buffer {
        ptr: DevicePtr,
        host: Vec<u32>,
        last: Option<(EventId, StreamId)>,
    }
    let streams = [context.stream()?, context.stream()?, context.stream()?, context.stream()?];
    let mix = context.kernels()?.mix_u32;
    let mut buffers = Vec::new();
    for _ in 0..BUFFERS {
        let host = context.random_words(N as usize);
        buffers.push(Buffer { ptr: context.alloc_words(&host)?, host, last: None });
    }
    for _ in 0..120 {
        let stream = streams[context.random_below(4) as usize];
        let to = context.random_below(BUFFERS as u64) as usize;
        let from = (to + 1 + context.random_below(BUFFERS as u64 - 1) as usize) % BUFFERS;
        for used in [to, from] {
            if let Some((event, other)) = buffers[used].last
                && other != stream
            {
                context.wait(stream, event)?;
            }
        }
        context.launch(mix, N, &[buffers[to].ptr.into(), buffers[from].ptr.into(), KernelArg::U32(N)], stream)?;
        buffers[to].host = mix_u32_on_host(&buffers[to].host, &buffers[from].host);
        let event = context.event()?;
        context.record(event, stream)?;
        for used in [to, from] {
            buffers[used].last = Some((event, stream));
        }
    }
    for stream in streams {
        context.synchronize(stream)?;
    }
    for (at, buffer) in buffers.iter().enumerate() {
        expect_slice_eq(&format!("buffer {at}"), &context.read_words(buffer.ptr, N as usize)?, &buffer.host)?;
    }
    Ok(())
}

/// A flag that a callback sets.
#[derive(Clone, Debug, Default)]
struct Flag(Arc<AtomicBool>);

impl Flag {
    fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn set_in(&self, context: &TestContext, stream: StreamId) -> CheckResult {
        let flag = Arc::clone(&self.0);
        Ok(context.driver.stream_host_callback(stream, Arc::new(move || flag.store(true, Ordering::SeqCst)))?)
    }
}
