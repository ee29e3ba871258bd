//! Streams: what they are, how their work is ordered, and how it is not.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::Check;
use super::bench::{Bench, to_bytes};
use super::kernels::mixed;
use super::lent::Lent;
use crate::expect::{Checked, expect, expect_code, expect_code_of, expect_eq, expect_same};
use crate::launch::{launch_graph, launch_kernel};
use warpool_driver::ErrorCode::{InvalidHandle, NotPermitted};
use warpool_driver::{
    CaptureMode, DevicePtr, EventId, EventOptions, EventScope, ForeignStream, GraphExecId, KernelArg, LaunchShape,
    Pattern, StreamHandle, StreamId, StreamOptions,
};

pub(super) const CHECKS: &[Check] = super::checks![
    the_default_streams_are_always_the_same,
    priorities_have_an_order,
    priorities_are_clamped,
    a_stream_says_how_it_was_made,
    ids_are_never_used_again,
    the_default_streams_cannot_be_destroyed,
    a_stream_never_made_is_unknown,
    work_keeps_its_order,
    fills_copies_and_kernels_keep_their_order,
    query_tells_running_from_done,
    streams_do_not_wait_for_each_other,
    a_wait_orders_two_streams,
    a_wait_takes_the_record_of_its_time,
    waiting_for_a_never_recorded_event_is_nothing,
    a_join_waits_for_every_branch,
    the_default_stream_waits_for_blocking_streams,
    blocking_streams_wait_for_the_default_stream,
    the_default_stream_is_done_when_blocking_streams_are,
    non_blocking_streams_and_the_default_ignore_each_other,
    every_thread_has_a_default_stream_of_its_own,
    a_threads_default_stream_is_ordered_with_the_legacy_one,
    callbacks_run_once_and_in_order,
    callbacks_wait_for_earlier_work,
    later_work_waits_for_callbacks,
    callbacks_cannot_call_the_driver,
    adopting_a_handle_finds_the_stream,
    a_destroyed_stream_finishes_its_work,
    any_thread_may_use_a_stream,
    random_programs_compute_what_their_order_says,
    ; provoking:
    a_destroyed_stream_is_unknown,
];

fn the_default_streams_are_always_the_same(bench: &Bench<'_>) -> Checked {
    let (legacy, own) = (bench.default_stream()?, bench.thread_stream()?);
    expect(legacy != own, "two different default streams")?;
    expect_eq("the legacy one, asked again", bench.driver.stream_default(bench.device)?, legacy)?;
    let beside = bench.elsewhere(|| -> warpool_driver::Result<_> {
        Ok((bench.driver.stream_default(bench.device)?, bench.driver.stream_per_thread(bench.device)?))
    });
    expect_eq("both, asked on another thread", beside?, (legacy, own))?;
    for stream in [legacy, own] {
        let info = bench.driver.stream_info(stream)?;
        expect_eq("its device", info.device, bench.device)?;
        expect(!info.non_blocking, "a blocking stream")?;
        let handle = bench.driver.stream_handle(stream)?;
        expect_eq("its handle alone", handle, StreamHandle { device: info.device, raw: info.raw })?;
    }
    Ok(())
}

fn priorities_have_an_order(bench: &Bench<'_>) -> Checked {
    let range = bench.driver.stream_priority_range(bench.device)?;
    expect(range.greatest <= range.least, "the most urgent priority not above the least urgent")
}

fn priorities_are_clamped(bench: &Bench<'_>) -> Checked {
    let range = bench.driver.stream_priority_range(bench.device)?;
    for priority in [-1000, range.greatest - 1, range.greatest, -1, 0, range.least + 1, 1000] {
        let stream = bench.stream_with(StreamOptions { non_blocking: true, priority })?;
        let got = bench.driver.stream_info(stream)?.priority;
        expect_eq(&format!("priority {priority}"), got, range.clamp(priority))?;
    }
    Ok(())
}

fn a_stream_says_how_it_was_made(bench: &Bench<'_>) -> Checked {
    let mut raw = BTreeSet::new();
    for non_blocking in [true, false, true] {
        let stream = bench.stream_with(StreamOptions { non_blocking, priority: 0 })?;
        let info = bench.driver.stream_info(stream)?;
        expect_eq("its device", info.device, bench.device)?;
        expect_eq("whether it ignores the default stream", info.non_blocking, non_blocking)?;
        expect(info.raw.0 > 2, "a handle that is none of the default streams'")?;
        let handle = bench.driver.stream_handle(stream)?;
        expect_eq("its handle alone", handle, StreamHandle { device: info.device, raw: info.raw })?;
        expect(raw.insert(info.raw), "handles of live streams that differ")?;
    }
    Ok(())
}

fn ids_are_never_used_again(bench: &Bench<'_>) -> Checked {
    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        let stream = bench.stream()?;
        expect(seen.insert(stream), "a stream id that was never given before")?;
        bench.destroy_stream(stream)?;
    }
    Ok(())
}

fn the_default_streams_cannot_be_destroyed(bench: &Bench<'_>) -> Checked {
    for stream in [bench.default_stream()?, bench.thread_stream()?] {
        expect_code(bench.driver.stream_destroy(stream), InvalidHandle)?;
        let log = bench.log(1)?;
        bench.append(log, 9, stream)?;
        bench.sync(stream)?;
        bench.expect_log(log, &[9])?;
    }
    Ok(())
}

fn a_stream_never_made_is_unknown(bench: &Bench<'_>) -> Checked {
    unknown(bench, StreamId(u64::MAX))
}

fn a_destroyed_stream_is_unknown(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    bench.destroy_stream(stream)?;
    unknown(bench, stream)
}

/// Every call that takes a stream refuses this one.
fn unknown(bench: &Bench<'_>, stream: StreamId) -> Checked {
    let driver = bench.driver;
    let (event, memory, pinned) = (bench.event()?, bench.memory(64)?, bench.pinned(64)?);
    let spin = bench.kernels()?.spin;
    let refused = |call: &str, result: warpool_driver::Result<()>| expect_code_of(call, result, InvalidHandle);
    refused("stream_info", driver.stream_info(stream).map(drop))?;
    refused("stream_handle", driver.stream_handle(stream).map(drop))?;
    refused("stream_query", driver.stream_query(stream).map(drop))?;
    refused("stream_synchronize", driver.stream_synchronize(stream))?;
    refused("stream_wait_event", driver.stream_wait_event(stream, event, EventScope::Plain))?;
    refused("stream_host_callback", driver.stream_host_callback(stream, Arc::new(|| ())))?;
    refused("event_record", driver.event_record(event, stream, EventScope::Plain))?;
    refused("copy", driver.copy(memory.into(), pinned.into(), 16, stream))?;
    refused("fill", driver.fill(memory, Pattern::U8(1), 16, stream))?;
    refused("kernel_launch", launch_kernel(driver, spin, LaunchShape::ONE, &[KernelArg::U64(0)], stream))?;
    refused("capture_begin", driver.capture_begin(stream, CaptureMode::Relaxed))?;
    refused("capture_state", driver.capture_state(stream).map(drop))?;
    refused("capture_end", driver.capture_end(stream).map(drop))?;
    refused("capture_dependencies", driver.capture_dependencies(stream).map(drop))?;
    refused("graph_launch", launch_graph(driver, GraphExecId(u64::MAX), stream))?;
    refused("stream_destroy", driver.stream_destroy(stream))
}

fn work_keeps_its_order(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(100)?);
    let values: Vec<u32> = bench.random_words(100);
    for &value in &values {
        bench.append(log, value, stream)?;
    }
    bench.sync(stream)?;
    bench.expect_log(log, &values)
}

fn fills_copies_and_kernels_keep_their_order(bench: &Bench<'_>) -> Checked {
    let (stream, n) = (bench.stream()?, 1000_u32);
    let start = bench.random_words(n as usize);
    let pinned = bench.pinned_of(&to_bytes(&start))?;
    let back = bench.pinned(4 * u64::from(n))?;
    let (first, second) = (bench.memory(4 * u64::from(n))?, bench.memory(4 * u64::from(n))?);
    bench.driver.copy(first.into(), pinned.into(), 4 * u64::from(n), stream)?;
    bench.add(first, n, 5, stream)?;
    bench.driver.copy(second.into(), first.into(), 4 * u64::from(n), stream)?;
    bench.driver.fill(first, Pattern::U32(3), u64::from(n), stream)?;
    bench.add(first, n, 1, stream)?;
    let mix = bench.kernels()?.mix_u32;
    bench.launch(mix, n, &[second.into(), first.into(), KernelArg::U32(n)], stream)?;
    bench.driver.copy(back.into(), second.into(), 4 * u64::from(n), stream)?;
    bench.driver.fill(second, Pattern::U8(0), 4 * u64::from(n), stream)?;
    bench.sync(stream)?;
    let want: Vec<u32> = start.iter().map(|word| word.wrapping_add(5).wrapping_mul(5).wrapping_add(4)).collect();
    expect_same("what was copied back", &bench.pinned_bytes(back, 4 * n as usize)?, &to_bytes(&want))?;
    expect_same("what was filled last", &bench.words_at(second, n as usize)?, &vec![0; n as usize])
}

fn query_tells_running_from_done(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    bench.expect_idle("an empty stream", stream)?;
    bench.spin_long(stream)?;
    bench.expect_busy("a spinning stream", stream)?;
    bench.sync(stream)?;
    bench.expect_idle("the stream that was waited for", stream)
}

fn streams_do_not_wait_for_each_other(bench: &Bench<'_>) -> Checked {
    let (busy, free, log) = (bench.stream()?, bench.stream()?, bench.log(10)?);
    bench.spin_long(busy)?;
    for value in 0..10 {
        bench.append(log, value, free)?;
    }
    bench.sync(free)?;
    bench.expect_busy("the spinning stream", busy)?;
    bench.expect_log(log, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
}

fn a_wait_orders_two_streams(bench: &Bench<'_>) -> Checked {
    let (first, second, log) = (bench.stream()?, bench.stream()?, bench.log(2)?);
    bench.spin(first)?;
    bench.append(log, 1, first)?;
    bench.order(first, second)?;
    bench.append(log, 2, second)?;
    bench.sync(second)?;
    bench.expect_idle("the stream that was waited for", first)?;
    bench.expect_log(log, &[1, 2])
}

fn a_wait_takes_the_record_of_its_time(bench: &Bench<'_>) -> Checked {
    let (first, second, event, log) = (bench.stream()?, bench.stream()?, bench.event()?, bench.log(2)?);
    bench.append(log, 1, first)?;
    bench.record(event, first)?;
    bench.wait(second, event)?;
    bench.spin_long(first)?;
    bench.record(event, first)?;
    bench.append(log, 2, second)?;
    bench.sync(second)?;
    bench.expect_busy("the stream that recorded again", first)?;
    bench.expect_log(log, &[1, 2])
}

fn waiting_for_a_never_recorded_event_is_nothing(bench: &Bench<'_>) -> Checked {
    let (first, second, event) = (bench.stream()?, bench.stream()?, bench.event()?);
    bench.spin_long(first)?;
    bench.wait(second, event)?;
    bench.record(event, first)?;
    bench.sync(second)?;
    bench.expect_busy("the stream that recorded after the wait", first)
}

fn a_join_waits_for_every_branch(bench: &Bench<'_>) -> Checked {
    let (root, n) = (bench.stream()?, 256_u32);
    let total = bench.words_of(&vec![0; n as usize])?;
    let mix = bench.kernels()?.mix_u32;
    let mut want = vec![0_u32; n as usize];
    let mut parts = Vec::new();
    for branch in 0..8_u32 {
        let stream = bench.stream()?;
        let start = bench.random_words(n as usize);
        let data = bench.words_of(&start)?;
        bench.order(root, stream)?;
        if branch % 2 == 0 {
            bench.spin(stream)?;
        }
        bench.add(data, n, branch, stream)?;
        bench.order(stream, root)?;
        parts.push((data, start.iter().map(|word| word.wrapping_add(branch)).collect::<Vec<_>>()));
    }
    for (data, part) in &parts {
        bench.launch(mix, n, &[total.into(), (*data).into(), KernelArg::U32(n)], root)?;
        want = mixed(&want, part);
    }
    bench.sync(root)?;
    expect_same("the joined result", &bench.words_at(total, n as usize)?, &want)
}

fn the_default_stream_is_done_when_blocking_streams_are(bench: &Bench<'_>) -> Checked {
    let (legacy, blocking, other) = (bench.default_stream()?, bench.blocking_stream()?, bench.stream()?);
    bench.spin_long(blocking)?;
    bench.expect_busy("the default stream, for the blocking one,", legacy)?;
    bench.sync(legacy)?;
    bench.expect_idle("the blocking stream", blocking)?;
    // Not the other way round, and a non-blocking stream does not count.
    bench.spin_long(legacy)?;
    bench.expect_idle("the blocking stream, whatever the default one does,", blocking)?;
    bench.sync(legacy)?;
    bench.spin_long(other)?;
    bench.expect_idle("the default stream", legacy)?;
    bench.sync(other)
}

fn the_default_stream_waits_for_blocking_streams(bench: &Bench<'_>) -> Checked {
    let (legacy, blocking, log) = (bench.default_stream()?, bench.blocking_stream()?, bench.log(2)?);
    bench.spin(blocking)?;
    bench.append(log, 1, blocking)?;
    bench.append(log, 2, legacy)?;
    bench.sync(legacy)?;
    bench.expect_idle("the blocking stream", blocking)?;
    bench.expect_log(log, &[1, 2])
}

fn blocking_streams_wait_for_the_default_stream(bench: &Bench<'_>) -> Checked {
    let (legacy, blocking, log) = (bench.default_stream()?, bench.blocking_stream()?, bench.log(2)?);
    bench.spin(legacy)?;
    bench.append(log, 1, legacy)?;
    bench.append(log, 2, blocking)?;
    bench.sync(blocking)?;
    bench.expect_log(log, &[1, 2])
}

fn non_blocking_streams_and_the_default_ignore_each_other(bench: &Bench<'_>) -> Checked {
    let (legacy, free) = (bench.default_stream()?, bench.stream()?);
    let (log, other) = (bench.log(1)?, bench.log(1)?);
    bench.spin_long(free)?;
    bench.append(log, 1, legacy)?;
    bench.sync(legacy)?;
    bench.expect_busy("the non-blocking stream", free)?;
    bench.expect_log(log, &[1])?;
    bench.sync(free)?;
    bench.spin_long(legacy)?;
    bench.append(other, 2, free)?;
    bench.sync(free)?;
    bench.expect_busy("the default stream", legacy)?;
    bench.sync(legacy)?;
    bench.expect_log(other, &[2])
}

fn every_thread_has_a_default_stream_of_its_own(bench: &Bench<'_>) -> Checked {
    let (own, log) = (bench.thread_stream()?, bench.log(1)?);
    bench.spin_long(own)?;
    bench.elsewhere(|| {
        bench.append(log, 1, own)?;
        bench.sync(own)
    })?;
    bench.expect_busy("this thread's default stream", own)?;
    bench.sync(own)?;
    bench.expect_log(log, &[1])
}

fn a_threads_default_stream_is_ordered_with_the_legacy_one(bench: &Bench<'_>) -> Checked {
    let (own, legacy, log) = (bench.thread_stream()?, bench.default_stream()?, bench.log(3)?);
    bench.spin(own)?;
    bench.append(log, 1, own)?;
    bench.append(log, 2, legacy)?;
    bench.append(log, 3, own)?;
    bench.sync(own)?;
    bench.expect_log(log, &[1, 2, 3])
}

fn callbacks_run_once_and_in_order(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(50)?);
    let seen = Arc::new(Mutex::new(Vec::new()));
    for value in 0..50_u32 {
        bench.append(log, value, stream)?;
        let list = Arc::clone(&seen);
        let push = move || list.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(value);
        bench.driver.stream_host_callback(stream, Arc::new(push))?;
    }
    bench.sync(stream)?;
    let seen = seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    expect_eq("the callbacks that ran", seen, (0..50).collect())?;
    bench.expect_log(log, &(0..50).collect::<Vec<_>>())
}

fn callbacks_wait_for_earlier_work(bench: &Bench<'_>) -> Checked {
    let (stream, flag) = (bench.stream()?, Flag::default());
    bench.spin_long(stream)?;
    let marked = bench.event()?;
    bench.record(marked, stream)?;
    flag.raise_in(bench, stream)?;
    let early = flag.is_up();
    if !bench.driver.event_query(marked)? {
        expect(!early, "no callback before the work in front of it is done")?;
    }
    bench.sync(stream)?;
    expect(flag.is_up(), "a callback that ran")
}

fn later_work_waits_for_callbacks(bench: &Bench<'_>) -> Checked {
    let (first, second, event) = (bench.stream()?, bench.stream()?, bench.event()?);
    let (flag, seen) = (Flag::default(), Flag::default());
    bench.spin(first)?;
    flag.raise_in(bench, first)?;
    bench.record(event, first)?;
    bench.wait(second, event)?;
    let (up, copy) = (flag.clone(), seen.clone());
    bench.driver.stream_host_callback(second, Arc::new(move || copy.0.store(up.is_up(), Ordering::SeqCst)))?;
    bench.driver.event_synchronize(event)?;
    expect(flag.is_up(), "a callback that ran before the event behind it")?;
    bench.sync(second)?;
    expect(seen.is_up(), "a callback that ran before work that waited for it")
}

fn callbacks_cannot_call_the_driver(bench: &Bench<'_>) -> Checked {
    let (stream, event, memory) = (bench.stream()?, bench.event()?, bench.memory(64)?);
    let lent = Lent::new(bench.driver);
    let answers = Arc::new(Mutex::new(Vec::new()));
    let (inside, list, device) = (lent.slot(), Arc::clone(&answers), bench.device);
    let ask = move || {
        inside.with(|driver| {
            let mut list = list.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            list.push(("mem_alloc", driver.mem_alloc(device, 4096).map(drop)));
            list.push(("mem_info", driver.mem_info(device).map(drop)));
            list.push(("stream_query", driver.stream_query(stream).map(drop)));
            list.push(("stream_create", driver.stream_create(device, StreamOptions::default()).map(drop)));
            list.push(("event_create", driver.event_create(device, EventOptions::default()).map(drop)));
            list.push(("event_record", driver.event_record(event, stream, EventScope::Plain)));
            list.push(("fill", driver.fill(memory, Pattern::U8(1), 64, stream)));
            list.push(("device_synchronize", driver.device_synchronize(device)));
            list.push(("device_count", driver.device_count().map(drop)));
        });
    };
    bench.driver.stream_host_callback(stream, Arc::new(ask))?;
    bench.sync(stream)?;
    let answers = answers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    expect_eq("the calls that were tried", answers.len(), 9)?;
    for (call, answer) in answers.iter() {
        expect_code_of(&format!("{call} in a callback"), answer.clone(), NotPermitted)?;
    }
    Ok(())
}

fn adopting_a_handle_finds_the_stream(bench: &Bench<'_>) -> Checked {
    let (driver, device) = (bench.driver, bench.device);
    expect_eq("handle 0", driver.stream_adopt(device, ForeignStream::NULL)?, bench.default_stream()?)?;
    expect_eq("handle 1", driver.stream_adopt(device, ForeignStream::LEGACY)?, bench.default_stream()?)?;
    expect_eq("handle 2", driver.stream_adopt(device, ForeignStream::PER_THREAD)?, bench.thread_stream()?)?;
    let stream = bench.stream()?;
    // SAFETY: the stream lives until the bench is cleared.
    let foreign = unsafe { ForeignStream::new(driver.stream_handle(stream)?.raw) };
    expect_eq("the handle of a live stream", driver.stream_adopt(device, foreign)?, stream)?;
    expect_eq("the same again", driver.stream_adopt(device, foreign)?, stream)
}

fn a_destroyed_stream_finishes_its_work(bench: &Bench<'_>) -> Checked {
    let (stream, other, log) = (bench.stream()?, bench.stream()?, bench.log(3)?);
    bench.spin(stream)?;
    bench.append(log, 1, stream)?;
    bench.append(log, 2, stream)?;
    bench.order(stream, other)?;
    bench.destroy_stream(stream)?;
    bench.append(log, 3, other)?;
    bench.sync(other)?;
    bench.expect_log(log, &[1, 2, 3])
}

fn any_thread_may_use_a_stream(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(8)?);
    for value in 0..8 {
        if value % 2 == 0 {
            bench.append(log, value, stream)?;
        } else {
            bench.elsewhere(|| bench.append(log, value, stream))?;
        }
    }
    bench.elsewhere(|| bench.sync(stream))?;
    bench.expect_log(log, &[0, 1, 2, 3, 4, 5, 6, 7])
}

/// A random program over several streams, in which events order exactly what touches the same data; it must compute
/// what a single stream would have.
fn random_programs_compute_what_their_order_says(bench: &Bench<'_>) -> Checked {
    const BUFFERS: usize = 6;
    const N: u32 = 128;
    /// One buffer: its copy on the host, and the event and stream of its last use.
    struct Buffer {
        ptr: DevicePtr,
        host: Vec<u32>,
        last: Option<(EventId, StreamId)>,
    }
    let streams = [bench.stream()?, bench.stream()?, bench.stream()?, bench.stream()?];
    let mix = bench.kernels()?.mix_u32;
    let mut buffers = Vec::new();
    for _ in 0..BUFFERS {
        let host = bench.random_words(N as usize);
        buffers.push(Buffer { ptr: bench.words_of(&host)?, host, last: None });
    }
    for _ in 0..120 {
        let stream = streams[bench.below(4) as usize];
        let to = bench.below(BUFFERS as u64) as usize;
        let from = (to + 1 + bench.below(BUFFERS as u64 - 1) as usize) % BUFFERS;
        for used in [to, from] {
            if let Some((event, other)) = buffers[used].last
                && other != stream
            {
                bench.wait(stream, event)?;
            }
        }
        bench.launch(mix, N, &[buffers[to].ptr.into(), buffers[from].ptr.into(), KernelArg::U32(N)], stream)?;
        buffers[to].host = mixed(&buffers[to].host, &buffers[from].host);
        let event = bench.event()?;
        bench.record(event, stream)?;
        for used in [to, from] {
            buffers[used].last = Some((event, stream));
        }
    }
    for stream in streams {
        bench.sync(stream)?;
    }
    for (at, buffer) in buffers.iter().enumerate() {
        expect_same(&format!("buffer {at}"), &bench.words_at(buffer.ptr, N as usize)?, &buffer.host)?;
    }
    Ok(())
}

/// A flag that a callback raises.
#[derive(Clone, Debug, Default)]
struct Flag(Arc<AtomicBool>);

impl Flag {
    fn is_up(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn raise_in(&self, bench: &Bench<'_>, stream: StreamId) -> Checked {
        let flag = Arc::clone(&self.0);
        Ok(bench.driver.stream_host_callback(stream, Arc::new(move || flag.store(true, Ordering::SeqCst)))?)
    }
}
