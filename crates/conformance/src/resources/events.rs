//! Events and their pool: creation at the first record, reuse, order, errors.

use warpool::{Endpoint, Error, Event, EventOptions};
use warpool_driver::Pattern;

use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq, expect_slice_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    unrecorded_event_is_complete,
    event_is_created_at_its_first_record,
    dropped_events_are_reused,
    pool_can_be_filled_and_trimmed,
    event_orders_two_streams,
    record_once_records_only_once,
    event_is_recorded_only_on_its_device,
    elapsed_time_reports_wrong_use,
    elapsed_time_of_work_is_positive,
    exported_handle_has_64_bytes,
];

fn unrecorded_event_is_complete(context: &TestContext) -> CheckResult {
    let event = context.instance().event();
    expect(event.query()?, "an unrecorded event is complete")?;
    event.synchronize()?;
    event.wait(&context.device().pool_stream()?)?;
    expect_eq("its device", event.device(), None)
}

fn event_is_created_at_its_first_record(context: &TestContext) -> CheckResult {
    let mut event = context.instance().event();
    expect_eq("its id before the first record", event.id(), None)?;
    event.record(&context.device().pool_stream()?)?;
    expect_eq("its device", event.device(), Some(context.device_id))?;
    event.synchronize()?;
    expect(event.query()? && event.is_recorded(), "the recorded event is complete")
}

fn dropped_events_are_reused(context: &TestContext) -> CheckResult {
    let stream = context.device().pool_stream()?;
    let mut ids = Vec::new();
    for _ in 0..100 {
        let mut event = context.instance().event();
        event.record(&stream)?;
        ids.extend(event.id());
    }
    ids.dedup();
    expect_eq("created events", ids.len(), 1)
}

fn pool_can_be_filled_and_trimmed(context: &TestContext) -> CheckResult {
    let pool = context.device().event_pool();
    pool.reserve(8)?;
    expect_eq("idle events", pool.idle(), 8)?;
    let taken = (0..8).map(|_| pool.take()).collect::<warpool::Result<Vec<_>>>()?;
    expect_eq("idle events while all are in use", pool.idle(), 0)?;
    drop(taken);
    expect_eq("events destroyed by a trim", pool.trim()?, 8)
}

fn event_orders_two_streams(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 16 << 20;
    let (first, second) = (context.device().lease_stream()?, context.device().lease_stream()?);
    let ptr = context.alloc(BYTES)?;
    let mut event = context.instance().event();
    context.driver.fill(ptr, Pattern::U8(1), BYTES, first.id())?;
    event.record(&first)?;
    event.wait(&second)?;
    // Recorded again at once: the wait is for the first record.
    event.record(&second)?;
    context.driver.fill(ptr, Pattern::U8(2), BYTES, second.id())?;
    second.synchronize()?;
    expect_slice_eq("the memory filled last", &context.read_bytes(ptr.offset(BYTES - 32), 32)?, &[2; 32])
}

fn record_once_records_only_once(context: &TestContext) -> CheckResult {
    let (stream, mut event) = (context.device().pool_stream()?, context.instance().event());
    expect_eq(
        "whether each of two calls recorded",
        (event.record_once(&stream)?, event.record_once(&stream)?),
        (true, false),
    )
}

fn event_is_recorded_only_on_its_device(context: &TestContext) -> CheckResult {
    let (here, there) = (context.device().pool_stream()?, context.second_device()?.pool_stream()?);
    let mut event = context.instance().event();
    event.record(&here)?;
    let wrong = Error::EventDevice { event: here.device_id(), stream: there.device_id() };
    expect_eq("recording on the other device", event.record(&there), Err(wrong))?;
    Ok(event.wait(&there)?)
}

fn elapsed_time_reports_wrong_use(context: &TestContext) -> CheckResult {
    let stream = context.device().pool_stream()?;
    let (mut plain, mut timed, unused) =
        (context.instance().event(), context.instance().timing_event(), context.instance().timing_event());
    plain.record(&stream)?;
    timed.record(&stream)?;
    let untimed = Err(Error::ElapsedWithoutTiming { which: Endpoint::End });
    expect_eq("to an event without timing", timed.elapsed_ms(&plain), untimed)?;
    let unrecorded = Err(Error::ElapsedNotRecorded { which: Endpoint::End });
    expect_eq("to an event never recorded", timed.elapsed_ms(&unused), unrecorded)
}

fn elapsed_time_of_work_is_positive(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 64 << 20;
    let stream = context.device().lease_stream()?;
    let (mut start, mut end) = (context.instance().timing_event(), context.instance().timing_event());
    let ptr = context.alloc(BYTES)?;
    start.record(&stream)?;
    context.driver.fill(ptr, Pattern::U8(1), BYTES, stream.id())?;
    end.record(&stream)?;
    end.synchronize()?;
    let (forward, backward) = (start.elapsed_ms(&end)?, end.elapsed_ms(&start)?);
    expect(
        forward > 0.0 && (forward + backward).abs() < 1e-3,
        &format!("a positive time and its negative, got {forward} and {backward}"),
    )
}

fn exported_handle_has_64_bytes(context: &TestContext) -> CheckResult {
    require(context.device().properties().ipc_events, "the device shares no events between processes")?;
    let mut event = context.instance().event_with(EventOptions { interprocess: true, ..EventOptions::default() })?;
    let bytes = event.export(context.device())?;
    expect_eq(
        "the error for a short handle",
        Event::import(context.device(), &bytes[1..]).err(),
        Some(Error::IpcHandleLength { bytes: 63 }),
    )?;
    expect(Event::import(context.device(), &bytes).is_err(), "the exporting process cannot import the event")
}
