//! Events: record, query, wait, elapsed time, export.

use std::collections::BTreeSet;

use warpool_driver::ErrorCode::{IllegalState, InvalidContext, InvalidHandle, InvalidValue, MapFailed, NotReady};
use warpool_driver::{EventId, EventOptions, EventScope, IpcEventHandle, StreamOptions};

use crate::check::Check;
use crate::context::{Resource, TestContext};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of};

pub(crate) const CHECKS: &[Check] = crate::checks![
    unrecorded_event_is_complete,
    query_reports_unfinished_work,
    synchronize_waits_only_for_work_before_the_record,
    second_record_replaces_the_first,
    elapsed_time_is_signed,
    elapsed_time_requires_complete_events,
    elapsed_time_requires_recorded_timing_events,
    elapsed_time_to_itself_is_zero,
    blocking_sync_event_can_be_synchronized,
    interprocess_event_cannot_have_timing,
    only_interprocess_events_can_be_exported,
    own_event_cannot_be_imported,
    external_scope_requires_a_capture,
    ids_are_not_reused,
    destroying_an_event_keeps_its_waits,
    record_on_legacy_stream_includes_blocking_streams,
    any_thread_may_use_an_event,
    event_is_recorded_only_on_its_device,
    event_wait_orders_two_devices,
    event_of_a_context_waits_for_all_its_streams,
    event_of_a_context_waits_for_destroyed_streams,
    unknown_event_is_rejected,
    ; provoking hazards:
    destroyed_event_is_rejected,
];

fn unrecorded_event_is_complete(context: &TestContext) -> CheckResult {
    let event = context.event()?;
    expect(context.driver.event_query(event)?, "an unrecorded event is complete")?;
    Ok(context.driver.event_synchronize(event)?)
}

fn query_reports_unfinished_work(context: &TestContext) -> CheckResult {
    let (stream, event) = (context.stream()?, context.event()?);
    context.keep_busy(stream)?;
    context.record(event, stream)?;
    expect(!context.driver.event_query(event)?, "an event behind running work is not complete")?;
    context.driver.event_synchronize(event)?;
    expect(context.driver.event_query(event)?, "a synchronized event is complete")?;
    context.synchronize(stream)
}

fn synchronize_waits_only_for_work_before_the_record(context: &TestContext) -> CheckResult {
    let (stream, event, log) = (context.stream()?, context.event()?, context.kernel_log(2)?);
    context.delay(stream)?;
    context.append(log, 1, stream)?;
    context.record(event, stream)?;
    context.keep_busy(stream)?;
    context.driver.event_synchronize(event)?;
    context.expect_busy("the work after the record", stream)?;
    context.expect_log(log, &[1])
}

fn second_record_replaces_the_first(context: &TestContext) -> CheckResult {
    let (stream, event, log) = (context.stream()?, context.event()?, context.kernel_log(2)?);
    context.append(log, 1, stream)?;
    context.record(event, stream)?;
    context.driver.event_synchronize(event)?;
    context.keep_busy(stream)?;
    context.append(log, 2, stream)?;
    context.record(event, stream)?;
    expect(!context.driver.event_query(event)?, "the second record is not complete")?;
    context.driver.event_synchronize(event)?;
    context.expect_log(log, &[1, 2])
}

fn elapsed_time_is_signed(context: &TestContext) -> CheckResult {
    let (stream, start, end) = (context.stream()?, context.timing_event()?, context.timing_event()?);
    context.kernels()?;
    context.record(start, stream)?;
    context.delay(stream)?;
    context.record(end, stream)?;
    context.synchronize(stream)?;
    let there = context.driver.event_elapsed_ms(start, end)?;
    let back = context.driver.event_elapsed_ms(end, start)?;
    // The kernel in between spins for five milliseconds of the device's clock.
    expect(there > 2.5, &format!("several milliseconds between the records, got {there}"))?;
    expect_eq("the time in the other direction", back, -there)
}

fn elapsed_time_requires_complete_events(context: &TestContext) -> CheckResult {
    let (stream, start, end) = (context.stream()?, context.timing_event()?, context.timing_event()?);
    context.kernels()?;
    context.record(start, stream)?;
    context.keep_busy(stream)?;
    context.record(end, stream)?;
    expect_error(context.driver.event_elapsed_ms(start, end), NotReady)?;
    expect_error(context.driver.event_elapsed_ms(end, start), NotReady)?;
    context.synchronize(stream)?;
    context.driver.event_elapsed_ms(start, end)?;
    Ok(())
}

fn elapsed_time_requires_recorded_timing_events(context: &TestContext) -> CheckResult {
    let (stream, timed, plain, never) =
        (context.stream()?, context.timing_event()?, context.event()?, context.timing_event()?);
    let elapsed = |start, end| context.driver.event_elapsed_ms(start, end);
    expect_error(elapsed(timed, never), InvalidHandle)?;
    context.record(timed, stream)?;
    context.record(plain, stream)?;
    context.synchronize(stream)?;
    expect_error(elapsed(plain, plain), InvalidHandle)?;
    expect_error(elapsed(timed, plain), InvalidHandle)?;
    expect_error(elapsed(plain, timed), InvalidHandle)?;
    expect_error(elapsed(timed, never), InvalidHandle)?;
    expect_error(elapsed(never, timed), InvalidHandle)
}

fn elapsed_time_to_itself_is_zero(context: &TestContext) -> CheckResult {
    let (stream, event) = (context.stream()?, context.timing_event()?);
    context.record(event, stream)?;
    context.synchronize(stream)?;
    expect_eq("the time", context.driver.event_elapsed_ms(event, event)?, 0.0)
}

fn blocking_sync_event_can_be_synchronized(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let event = context.event_with(EventOptions { blocking: true, ..EventOptions::default() })?;
    let log = context.kernel_log(1)?;
    context.delay(stream)?;
    context.append(log, 3, stream)?;
    context.record(event, stream)?;
    context.driver.event_synchronize(event)?;
    context.expect_log(log, &[3])
}

fn interprocess_event_cannot_have_timing(context: &TestContext) -> CheckResult {
    let (stream, event) = (context.stream()?, context.interprocess_event()?);
    let both = EventOptions { timing: true, blocking: false, interprocess: true };
    expect_error(context.driver.event_create(context.device_id, both), InvalidValue)?;
    context.record(event, stream)?;
    context.driver.event_synchronize(event)?;
    expect(context.driver.event_query(event)?, "the event is complete")?;
    expect_error(context.driver.event_elapsed_ms(event, event), InvalidHandle)
}

fn only_interprocess_events_can_be_exported(context: &TestContext) -> CheckResult {
    let (first, second) = (context.interprocess_event()?, context.interprocess_event()?);
    expect_error(context.driver.event_export(context.event()?), InvalidHandle)?;
    expect_error(context.driver.event_export(context.timing_event()?), InvalidHandle)?;
    let (first, second) = (context.driver.event_export(first)?, context.driver.event_export(second)?);
    expect(first != second, "two events have different handles")
}

fn own_event_cannot_be_imported(context: &TestContext) -> CheckResult {
    let handle = context.driver.event_export(context.interprocess_event()?)?;
    expect_error(context.driver.event_import(context.device_id, &handle), InvalidContext)?;
    expect_error(context.driver.event_import(context.device_id, &IpcEventHandle([7; 64])), MapFailed)
}

fn external_scope_requires_a_capture(context: &TestContext) -> CheckResult {
    let (stream, event) = (context.stream()?, context.event()?);
    context.keep_busy(stream)?;
    expect_error(context.driver.event_record(event, stream, EventScope::External), IllegalState)?;
    expect(context.driver.event_query(event)?, "the event is still unrecorded")?;
    context.synchronize(stream)?;
    expect_error(context.driver.stream_wait_event(stream, event, EventScope::External), IllegalState)
}

fn ids_are_not_reused(context: &TestContext) -> CheckResult {
    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        let event = context.event()?;
        expect(seen.insert(event), "the event id is new")?;
        context.destroy_event(event)?;
    }
    Ok(())
}

fn destroying_an_event_keeps_its_waits(context: &TestContext) -> CheckResult {
    let (first, second, event, log) = (context.stream()?, context.stream()?, context.event()?, context.kernel_log(2)?);
    context.delay(first)?;
    context.append(log, 1, first)?;
    context.record(event, first)?;
    context.wait(second, event)?;
    context.destroy_event(event)?;
    context.append(log, 2, second)?;
    context.synchronize(second)?;
    context.expect_log(log, &[1, 2])
}

fn record_on_legacy_stream_includes_blocking_streams(context: &TestContext) -> CheckResult {
    let (legacy, blocking, event) = (context.legacy_stream()?, context.blocking_stream()?, context.event()?);
    context.keep_busy(blocking)?;
    context.record(event, legacy)?;
    expect(!context.driver.event_query(event)?, "the record waits for the blocking stream")?;
    context.driver.event_synchronize(event)?;
    context.expect_idle("the blocking stream", blocking)
}

fn any_thread_may_use_an_event(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(1)?);
    context.delay(stream)?;
    context.append(log, 4, stream)?;
    let event = context.on_new_thread(|| -> CheckResult<EventId> {
        let event = context.event()?;
        context.record(event, stream)?;
        Ok(event)
    })?;
    context.on_new_thread(|| context.driver.event_synchronize(event))?;
    expect(context.driver.event_query(event)?, "the event is complete on this thread too")?;
    context.expect_log(log, &[4])
}

fn event_is_recorded_only_on_its_device(context: &TestContext) -> CheckResult {
    let other = context.second_device_id()?;
    let there = context.stream_on(other, StreamOptions::default())?;
    let event = context.event()?;
    expect_error(context.driver.event_record(event, there, EventScope::Plain), InvalidHandle)?;
    expect(context.driver.event_query(event)?, "the event is still unrecorded")
}

fn event_wait_orders_two_devices(context: &TestContext) -> CheckResult {
    let other = context.second_device_id()?;
    let there = context.stream_on(other, StreamOptions::default())?;
    let (here, event) = (context.stream()?, context.event()?);
    let far = context.driver.event_create(other, EventOptions::default())?;
    context.track(Resource::Event(far));
    context.keep_busy(here)?;
    context.record(event, here)?;
    context.wait(there, event)?;
    context.driver.event_record(far, there, EventScope::Plain)?;
    expect(!context.driver.event_query(far)?, "the other device waits")?;
    context.driver.event_synchronize(far)?;
    context.expect_idle("the stream of the recorded event", here)
}

fn event_of_a_context_waits_for_all_its_streams(context: &TestContext) -> CheckResult {
    if !context.records_contexts()? {
        return Ok(());
    }
    let (first, second, event, log) = (context.stream()?, context.stream()?, context.event()?, context.kernel_log(2)?);
    let legacy = context.driver.stream_default(context.device_id)?;
    context.kernels()?;
    context.keep_busy(first)?;
    context.append(log, 1, first)?;
    context.driver.event_record_context(event)?;
    expect(!context.driver.event_query(event)?, "an event of a context with running work is not complete")?;
    // Another stream waits on the device. Work after the record is not waited for.
    context.driver.stream_wait_event(second, event, EventScope::Plain)?;
    context.append(log, 2, second)?;
    context.keep_busy(first)?;
    context.driver.event_synchronize(event)?;
    context.expect_busy("the work after the record", first)?;
    context.synchronize(second)?;
    context.expect_log(log, &[1, 2])?;
    context.synchronize(first)?;
    context.keep_busy(legacy)?;
    context.driver.event_record_context(event)?;
    expect(!context.driver.event_query(event)?, "the default stream belongs to the context")?;
    context.synchronize(legacy)
}

fn event_of_a_context_waits_for_destroyed_streams(context: &TestContext) -> CheckResult {
    if !context.records_contexts()? {
        return Ok(());
    }
    let (stream, event, log) = (context.stream()?, context.event()?, context.kernel_log(1)?);
    context.kernels()?;
    context.keep_busy(stream)?;
    context.append(log, 1, stream)?;
    context.driver.stream_destroy(stream)?;
    context.untrack(Resource::Stream(stream));
    context.driver.event_record_context(event)?;
    expect(!context.driver.event_query(event)?, "work of a destroyed stream belongs to the context")?;
    context.driver.event_synchronize(event)?;
    context.expect_log(log, &[1])
}

fn unknown_event_is_rejected(context: &TestContext) -> CheckResult {
    expect_rejected(context, EventId(u64::MAX))
}

fn destroyed_event_is_rejected(context: &TestContext) -> CheckResult {
    let event = context.event()?;
    context.destroy_event(event)?;
    expect_rejected(context, event)
}

/// Every call that takes an event must reject this one.
fn expect_rejected(context: &TestContext, event: EventId) -> CheckResult {
    let (driver, stream, timed) = (&context.driver, context.stream()?, context.timing_event()?);
    context.record(timed, stream)?;
    context.synchronize(stream)?;
    let rejected = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidHandle);
    rejected("event_query", driver.event_query(event).map(drop))?;
    rejected("event_synchronize", driver.event_synchronize(event))?;
    rejected("event_record", driver.event_record(event, stream, EventScope::Plain))?;
    rejected("stream_wait_event", driver.stream_wait_event(stream, event, EventScope::Plain))?;
    rejected("event_elapsed_ms (start)", driver.event_elapsed_ms(event, timed).map(drop))?;
    rejected("event_elapsed_ms (end)", driver.event_elapsed_ms(timed, event).map(drop))?;
    rejected("event_export", driver.event_export(event).map(drop))?;
    rejected("event_destroy", driver.event_destroy(event))
}
