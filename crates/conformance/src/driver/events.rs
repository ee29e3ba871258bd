//! Events: marks that can be asked about, waited for and timed.

use std::collections::BTreeSet;

use super::Check;
use super::bench::Bench;
use super::owned::Owned;
use crate::expect::{Checked, expect, expect_code, expect_code_of, expect_eq};
use warpool_driver::ErrorCode::{IllegalState, InvalidContext, InvalidHandle, InvalidValue, MapFailed, NotReady};
use warpool_driver::{EventId, EventOptions, EventScope, IpcEventHandle, StreamOptions};

pub(super) const CHECKS: &[Check] = super::checks![
    a_never_recorded_event_is_done,
    query_tells_running_from_done,
    synchronize_waits_for_its_mark_only,
    recording_again_moves_the_mark,
    elapsed_time_is_signed,
    elapsed_time_needs_finished_work,
    elapsed_time_needs_timing_and_a_mark,
    an_event_is_no_time_from_itself,
    a_blocking_event_waits_too,
    interprocess_excludes_timing,
    only_interprocess_events_are_exported,
    importing_ones_own_event_is_refused,
    external_use_needs_a_capture,
    ids_are_never_used_again,
    a_destroyed_event_is_still_waited_for,
    a_mark_on_the_default_stream_covers_blocking_streams,
    any_thread_may_use_an_event,
    an_event_belongs_to_one_device,
    a_wait_orders_two_devices,
    an_event_never_made_is_unknown,
    ; provoking:
    a_destroyed_event_is_unknown,
];

fn a_never_recorded_event_is_done(bench: &Bench<'_>) -> Checked {
    let event = bench.event()?;
    expect(bench.driver.event_query(event)?, "an event that marks nothing to be done")?;
    Ok(bench.driver.event_synchronize(event)?)
}

fn query_tells_running_from_done(bench: &Bench<'_>) -> Checked {
    let (stream, event) = (bench.stream()?, bench.event()?);
    bench.spin_long(stream)?;
    bench.record(event, stream)?;
    expect(!bench.driver.event_query(event)?, "an event behind running work not to be done")?;
    bench.driver.event_synchronize(event)?;
    expect(bench.driver.event_query(event)?, "an event that was waited for to be done")?;
    bench.sync(stream)
}

fn synchronize_waits_for_its_mark_only(bench: &Bench<'_>) -> Checked {
    let (stream, event, log) = (bench.stream()?, bench.event()?, bench.log(2)?);
    bench.spin(stream)?;
    bench.append(log, 1, stream)?;
    bench.record(event, stream)?;
    bench.spin_long(stream)?;
    bench.driver.event_synchronize(event)?;
    bench.expect_busy("the work behind the mark", stream)?;
    bench.expect_log(log, &[1])
}

fn recording_again_moves_the_mark(bench: &Bench<'_>) -> Checked {
    let (stream, event, log) = (bench.stream()?, bench.event()?, bench.log(2)?);
    bench.append(log, 1, stream)?;
    bench.record(event, stream)?;
    bench.driver.event_synchronize(event)?;
    bench.spin_long(stream)?;
    bench.append(log, 2, stream)?;
    bench.record(event, stream)?;
    expect(!bench.driver.event_query(event)?, "the new mark not to be done")?;
    bench.driver.event_synchronize(event)?;
    bench.expect_log(log, &[1, 2])
}

fn elapsed_time_is_signed(bench: &Bench<'_>) -> Checked {
    let (stream, start, end) = (bench.stream()?, bench.timed_event()?, bench.timed_event()?);
    bench.kernels()?;
    bench.record(start, stream)?;
    bench.spin(stream)?;
    bench.record(end, stream)?;
    bench.sync(stream)?;
    let there = bench.driver.event_elapsed_ms(start, end)?;
    let back = bench.driver.event_elapsed_ms(end, start)?;
    // The kernel in between spins for five milliseconds of the device's own clock.
    expect(there > 2.5, &format!("several milliseconds between the marks, got {there}"))?;
    expect_eq("the way back", back, -there)
}

fn elapsed_time_needs_finished_work(bench: &Bench<'_>) -> Checked {
    let (stream, start, end) = (bench.stream()?, bench.timed_event()?, bench.timed_event()?);
    bench.kernels()?;
    bench.record(start, stream)?;
    bench.spin_long(stream)?;
    bench.record(end, stream)?;
    expect_code(bench.driver.event_elapsed_ms(start, end), NotReady)?;
    expect_code(bench.driver.event_elapsed_ms(end, start), NotReady)?;
    bench.sync(stream)?;
    bench.driver.event_elapsed_ms(start, end)?;
    Ok(())
}

fn elapsed_time_needs_timing_and_a_mark(bench: &Bench<'_>) -> Checked {
    let (stream, timed, plain, never) = (bench.stream()?, bench.timed_event()?, bench.event()?, bench.timed_event()?);
    let elapsed = |start, end| bench.driver.event_elapsed_ms(start, end);
    expect_code(elapsed(timed, never), InvalidHandle)?;
    bench.record(timed, stream)?;
    bench.record(plain, stream)?;
    bench.sync(stream)?;
    expect_code(elapsed(plain, plain), InvalidHandle)?;
    expect_code(elapsed(timed, plain), InvalidHandle)?;
    expect_code(elapsed(plain, timed), InvalidHandle)?;
    expect_code(elapsed(timed, never), InvalidHandle)?;
    expect_code(elapsed(never, timed), InvalidHandle)
}

fn an_event_is_no_time_from_itself(bench: &Bench<'_>) -> Checked {
    let (stream, event) = (bench.stream()?, bench.timed_event()?);
    bench.record(event, stream)?;
    bench.sync(stream)?;
    expect_eq("the time", bench.driver.event_elapsed_ms(event, event)?, 0.0)
}

fn a_blocking_event_waits_too(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let event = bench.event_with(EventOptions { blocking: true, ..EventOptions::default() })?;
    let log = bench.log(1)?;
    bench.spin(stream)?;
    bench.append(log, 3, stream)?;
    bench.record(event, stream)?;
    bench.driver.event_synchronize(event)?;
    bench.expect_log(log, &[3])
}

fn interprocess_excludes_timing(bench: &Bench<'_>) -> Checked {
    let (stream, event) = (bench.stream()?, bench.interprocess_event()?);
    let both = EventOptions { timing: true, blocking: false, interprocess: true };
    expect_code(bench.driver.event_create(bench.device, both), InvalidValue)?;
    bench.record(event, stream)?;
    bench.driver.event_synchronize(event)?;
    expect(bench.driver.event_query(event)?, "it to work like any other")?;
    expect_code(bench.driver.event_elapsed_ms(event, event), InvalidHandle)
}

fn only_interprocess_events_are_exported(bench: &Bench<'_>) -> Checked {
    let (first, second) = (bench.interprocess_event()?, bench.interprocess_event()?);
    expect_code(bench.driver.event_export(bench.event()?), InvalidHandle)?;
    expect_code(bench.driver.event_export(bench.timed_event()?), InvalidHandle)?;
    let (first, second) = (bench.driver.event_export(first)?, bench.driver.event_export(second)?);
    expect(first != second, "two events to have two names")
}

fn importing_ones_own_event_is_refused(bench: &Bench<'_>) -> Checked {
    let handle = bench.driver.event_export(bench.interprocess_event()?)?;
    expect_code(bench.driver.event_import(bench.device, &handle), InvalidContext)?;
    expect_code(bench.driver.event_import(bench.device, &IpcEventHandle([7; 64])), MapFailed)
}

fn external_use_needs_a_capture(bench: &Bench<'_>) -> Checked {
    let (stream, event) = (bench.stream()?, bench.event()?);
    bench.spin_long(stream)?;
    expect_code(bench.driver.event_record(event, stream, EventScope::External), IllegalState)?;
    expect(bench.driver.event_query(event)?, "the event to mark nothing still")?;
    bench.sync(stream)?;
    expect_code(bench.driver.stream_wait_event(stream, event, EventScope::External), IllegalState)
}

fn ids_are_never_used_again(bench: &Bench<'_>) -> Checked {
    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        let event = bench.event()?;
        expect(seen.insert(event), "an event id that was never given before")?;
        bench.destroy_event(event)?;
    }
    Ok(())
}

fn a_destroyed_event_is_still_waited_for(bench: &Bench<'_>) -> Checked {
    let (first, second, event, log) = (bench.stream()?, bench.stream()?, bench.event()?, bench.log(2)?);
    bench.spin(first)?;
    bench.append(log, 1, first)?;
    bench.record(event, first)?;
    bench.wait(second, event)?;
    bench.destroy_event(event)?;
    bench.append(log, 2, second)?;
    bench.sync(second)?;
    bench.expect_log(log, &[1, 2])
}

fn a_mark_on_the_default_stream_covers_blocking_streams(bench: &Bench<'_>) -> Checked {
    let (legacy, blocking, event) = (bench.default_stream()?, bench.blocking_stream()?, bench.event()?);
    bench.spin_long(blocking)?;
    bench.record(event, legacy)?;
    expect(!bench.driver.event_query(event)?, "the mark to wait for the blocking stream")?;
    bench.driver.event_synchronize(event)?;
    bench.expect_idle("the blocking stream", blocking)
}

fn any_thread_may_use_an_event(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(1)?);
    bench.spin(stream)?;
    bench.append(log, 4, stream)?;
    let event = bench.elsewhere(|| -> Checked<EventId> {
        let event = bench.event()?;
        bench.record(event, stream)?;
        Ok(event)
    })?;
    bench.elsewhere(|| bench.driver.event_synchronize(event))?;
    expect(bench.driver.event_query(event)?, "the event to be done on this thread too")?;
    bench.expect_log(log, &[4])
}

fn an_event_belongs_to_one_device(bench: &Bench<'_>) -> Checked {
    let other = bench.second_device()?;
    let there = bench.stream_on(other, StreamOptions::default())?;
    let event = bench.event()?;
    expect_code(bench.driver.event_record(event, there, EventScope::Plain), InvalidHandle)?;
    expect(bench.driver.event_query(event)?, "the event to mark nothing still")
}

fn a_wait_orders_two_devices(bench: &Bench<'_>) -> Checked {
    let other = bench.second_device()?;
    let there = bench.stream_on(other, StreamOptions::default())?;
    let (here, event) = (bench.stream()?, bench.event()?);
    let far = bench.driver.event_create(other, EventOptions::default())?;
    bench.own(Owned::Event(far));
    bench.spin_long(here)?;
    bench.record(event, here)?;
    bench.wait(there, event)?;
    bench.driver.event_record(far, there, EventScope::Plain)?;
    expect(!bench.driver.event_query(far)?, "the other device to wait")?;
    bench.driver.event_synchronize(far)?;
    bench.expect_idle("the stream that was waited for", here)
}

fn an_event_never_made_is_unknown(bench: &Bench<'_>) -> Checked {
    unknown(bench, EventId(u64::MAX))
}

fn a_destroyed_event_is_unknown(bench: &Bench<'_>) -> Checked {
    let event = bench.event()?;
    bench.destroy_event(event)?;
    unknown(bench, event)
}

/// Every call that takes an event refuses this one.
fn unknown(bench: &Bench<'_>, event: EventId) -> Checked {
    let (driver, stream, timed) = (bench.driver, bench.stream()?, bench.timed_event()?);
    bench.record(timed, stream)?;
    bench.sync(stream)?;
    let refused = |call: &str, result: warpool_driver::Result<()>| expect_code_of(call, result, InvalidHandle);
    refused("event_query", driver.event_query(event).map(drop))?;
    refused("event_synchronize", driver.event_synchronize(event))?;
    refused("event_record", driver.event_record(event, stream, EventScope::Plain))?;
    refused("stream_wait_event", driver.stream_wait_event(stream, event, EventScope::Plain))?;
    refused("event_elapsed_ms from it", driver.event_elapsed_ms(event, timed).map(drop))?;
    refused("event_elapsed_ms to it", driver.event_elapsed_ms(timed, event).map(drop))?;
    refused("event_export", driver.event_export(event).map(drop))?;
    refused("event_destroy", driver.event_destroy(event))
}
