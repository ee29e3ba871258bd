//! Paused streams: work runs on request of the test or when the host waits for it, not by virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::fixture::{BYTES, DEVICE, Fixture};
use warpool_driver::sim::{SimConfig, SimDriver, WorkCosts};
use warpool_driver::*;

fn new_fixture() -> Result<Fixture> {
    Fixture::new(SimConfig::default())
}

/// Records a new event.
fn record(gpu: &SimDriver, stream: StreamId) -> Result<EventId> {
    let event = gpu.event_create(DEVICE, EventOptions::default())?;
    gpu.event_record(event, stream, EventScope::Plain)?;
    Ok(event)
}

/// Which of the events have been reached, as a picture. Queried twice: the passing of time changes nothing.
fn reached(gpu: &SimDriver, events: &[EventId]) -> Result<String> {
    let mut pictures = Vec::new();
    for _ in 0..2 {
        let reached = events.iter().map(|&event| Ok(if gpu.event_query(event)? { 'x' } else { '.' }));
        pictures.push(reached.collect::<Result<String>>()?);
        // Takes much virtual time.
        gpu.module_load(DEVICE, &crate::fixture::KERNELS)?;
    }
    assert_eq!(pictures[0], pictures[1]);
    Ok(pictures.remove(0))
}

#[test]
fn events_of_a_paused_stream_are_reached_when_run_and_in_order() -> Result<()> {
    let Fixture { gpu, one, two, .. } = new_fixture()?;
    gpu.pause_stream(one)?;
    let paused = [record(&gpu, one)?, record(&gpu, one)?, record(&gpu, one)?];
    let unpaused = record(&gpu, two)?;
    assert_eq!(reached(&gpu, &paused)?, "...");
    assert_eq!(reached(&gpu, &[unpaused])?, "x");
    assert!(!gpu.stream_query(one)?);
    assert_eq!(gpu.run_paused(one, 1)?, 1);
    assert_eq!(reached(&gpu, &paused)?, "x..");
    assert_eq!(gpu.run_paused(one, 0)?, 0);
    assert_eq!(gpu.run_paused(one, 9)?, 2, "only what is queued");
    assert_eq!(reached(&gpu, &paused)?, "xxx");
    assert!(gpu.stream_query(one)?);
    let later = record(&gpu, one)?;
    assert_eq!(reached(&gpu, &[later])?, ".");
    gpu.resume_stream(one)?;
    assert_eq!(reached(&gpu, &[later])?, "x");
    Ok(())
}

#[test]
fn operations_that_are_run_take_no_time() -> Result<()> {
    let work = WorkCosts { fill_start: 1_000_000_000, ..WorkCosts::h200() };
    let fixture = Fixture::new(SimConfig { work, ..SimConfig::default() })?;
    let exec = fixture.capture(|| (0..5).try_for_each(|n| fixture.fill(n, fixture.one)))?;
    fixture.gpu.pause_stream(fixture.one)?;
    fixture.fill(5, fixture.one)?;
    fixture.gpu.graph_launch(exec, fixture.one)?;
    let event = record(&fixture.gpu, fixture.one)?;
    assert!(!fixture.gpu.event_query(event)?);
    let before = fixture.gpu.now();
    assert_eq!(fixture.gpu.run_paused(fixture.one, 3)?, 3);
    assert!(fixture.gpu.event_query(event)?, "the next call");
    assert!(fixture.gpu.now() - before < std::time::Duration::from_micros(100), "virtual time");
    Ok(())
}

#[test]
fn started_work_continues_when_its_stream_is_paused() -> Result<()> {
    let fixture = new_fixture()?;
    fixture.fill(1, fixture.one)?;
    let event = record(&fixture.gpu, fixture.one)?;
    fixture.gpu.pause_stream(fixture.one)?;
    fixture.gpu.pause_stream(fixture.one)?;
    assert_eq!(reached(&fixture.gpu, &[event])?, ".");
    assert_eq!(fixture.gpu.run_paused(fixture.one, 5)?, 1, "the fill had started");
    assert_eq!(reached(&fixture.gpu, &[event])?, "x");
    Ok(())
}

/// A wait of the host, and which of three events of a paused stream are reached by it.
fn check_wait(picture: &str, wait: impl FnOnce(&Fixture, &[EventId]) -> Result<()>) -> Result<()> {
    let mut fixture = new_fixture()?;
    let stream =
        |non_blocking| fixture.gpu.stream_create(DEVICE, StreamOptions { non_blocking, ..StreamOptions::default() });
    let (blocking, other) = (stream(false)?, stream(true)?);
    fixture.one = blocking;
    fixture.gpu.pause_stream(fixture.one)?;
    fixture.gpu.pause_stream(other)?;
    let events =
        [record(&fixture.gpu, fixture.one)?, record(&fixture.gpu, fixture.one)?, record(&fixture.gpu, fixture.one)?];
    let unrelated = record(&fixture.gpu, other)?;
    wait(&fixture, &events)?;
    assert_eq!(reached(&fixture.gpu, &events)?, picture);
    assert!(!fixture.gpu.event_query(unrelated)?, "that stream was not waited for");
    // The stream is still paused.
    let next = record(&fixture.gpu, fixture.one)?;
    assert_eq!(reached(&fixture.gpu, &[next])?, ".");
    assert_eq!(fixture.gpu.hazards(), []);
    Ok(())
}

#[test]
fn a_wait_of_the_host_runs_what_it_waits_for_and_no_more() -> Result<()> {
    check_wait("...", |_, _| Ok(()))?;
    check_wait("xx.", |fixture, events| fixture.gpu.event_synchronize(events[1]))?;
    check_wait("xxx", |fixture, _| fixture.gpu.stream_synchronize(fixture.one))?;
    // The default stream is ordered after blocking ones.
    check_wait("xxx", |fixture, _| fixture.gpu.stream_synchronize(fixture.gpu.stream_default(DEVICE)?))?;
    check_wait("xxx", |fixture, _| fixture.gpu.upload(DEVICE, fixture.memory, &[1]))?;
    // Another stream that waits for the second.
    check_wait("xx.", |fixture, events| {
        fixture.gpu.pause_stream(fixture.two)?;
        fixture.gpu.stream_wait_event(fixture.two, events[1], EventScope::Plain)?;
        fixture.gpu.event_record(fixture.event, fixture.two, EventScope::Plain)?;
        fixture.gpu.event_synchronize(fixture.event)
    })
}

#[test]
fn a_wait_for_the_device_runs_everything_on_it() -> Result<()> {
    type Wait = fn(&Fixture) -> Result<()>;
    let waits: [Wait; 2] =
        [|fixture| fixture.gpu.device_synchronize(DEVICE), |fixture| fixture.gpu.mem_free(fixture.memory)];
    for wait in waits {
        let fixture = new_fixture()?;
        fixture.gpu.pause_stream(fixture.one)?;
        fixture.gpu.pause_stream(fixture.two)?;
        let events = [record(&fixture.gpu, fixture.one)?, record(&fixture.gpu, fixture.two)?];
        wait(&fixture)?;
        assert_eq!(reached(&fixture.gpu, &events)?, "xx");
        let later = [record(&fixture.gpu, fixture.one)?, record(&fixture.gpu, fixture.two)?];
        assert_eq!(reached(&fixture.gpu, &later)?, "..");
    }
    Ok(())
}

#[test]
fn the_queue_of_a_paused_stream_has_no_limit() -> Result<()> {
    let config = SimConfig { queue_depth: 4, ..SimConfig::default() };
    let Fixture { gpu, one, .. } = Fixture::new(config)?;
    gpu.pause_stream(one)?;
    let events = (0..6).map(|_| record(&gpu, one)).collect::<Result<Vec<_>>>()?;
    assert_eq!(reached(&gpu, &events)?, "......");
    gpu.resume_stream(one)?;
    record(&gpu, one)?;
    assert_eq!(reached(&gpu, &events)?, "xxxxxx");
    Ok(())
}

#[test]
fn operations_that_are_run_still_wait_for_other_streams() -> Result<()> {
    let Fixture { gpu, one, two, .. } = new_fixture()?;
    gpu.pause_stream(one)?;
    gpu.pause_stream(two)?;
    let first = record(&gpu, one)?;
    gpu.stream_wait_event(two, first, EventScope::Plain)?;
    let second = record(&gpu, two)?;
    assert_eq!(gpu.run_paused(two, 2)?, 2);
    assert_eq!(reached(&gpu, &[first, second])?, "..");
    gpu.run_paused(one, 1)?;
    assert_eq!(reached(&gpu, &[first, second])?, "xx");
    Ok(())
}

#[test]
fn paused_work_takes_effect_when_it_is_run() -> Result<()> {
    let fixture = new_fixture()?;
    let calls = Arc::new(AtomicU32::new(0));
    let inner = Arc::clone(&calls);
    fixture.fill(1, fixture.one)?;
    fixture.gpu.stream_synchronize(fixture.one)?;
    fixture.gpu.pause_stream(fixture.one)?;
    fixture.fill(2, fixture.one)?;
    fixture.gpu.stream_host_callback(fixture.one, Arc::new(move || _ = inner.fetch_add(1, Ordering::Relaxed)))?;
    fixture.gpu.device_count()?;
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    fixture.gpu.run_paused(fixture.one, 2)?;
    fixture.gpu.device_count()?;
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    fixture.gpu.resume_stream(fixture.one)?;
    let mut back = vec![0; BYTES as usize];
    fixture.gpu.stream_synchronize(fixture.one)?;
    fixture.gpu.download(DEVICE, fixture.memory, &mut back)?;
    assert!(back.iter().all(|&byte| byte == 2));
    Ok(())
}

#[test]
fn destroying_a_stream_ends_its_pause() -> Result<()> {
    let Fixture { gpu, one, .. } = new_fixture()?;
    gpu.pause_stream(one)?;
    let event = record(&gpu, one)?;
    gpu.stream_destroy(one)?;
    assert_eq!(reached(&gpu, &[event])?, "x");
    for outcome in [gpu.pause_stream(one), gpu.resume_stream(one), gpu.run_paused(one, 1).map(drop)] {
        assert_eq!(outcome.map_err(|error| error.code), Err(ErrorCode::InvalidHandle));
    }
    assert_eq!(gpu.hazards(), [], "these calls do not use the stream");
    Ok(())
}

#[test]
fn run_paused_needs_a_paused_stream() -> Result<()> {
    let Fixture { gpu, one, .. } = new_fixture()?;
    gpu.resume_stream(one)?;
    let error = gpu.run_paused(one, 1).expect_err("it is not paused");
    assert_eq!(error.code, ErrorCode::InvalidValue);
    assert!(error.to_string().contains("is not paused"), "{error}");
    Ok(())
}

#[test]
fn runs_with_paused_streams_are_deterministic() -> Result<()> {
    let run = || -> Result<_> {
        let fixture = new_fixture()?;
        let mut seen = Vec::new();
        fixture.gpu.pause_stream(fixture.one)?;
        for n in 0..50u8 {
            fixture.fill(n, fixture.one)?;
            fixture.order(fixture.one, fixture.two)?;
            fixture.fill(n, fixture.two)?;
            if n % 3 == 0 {
                fixture.gpu.run_paused(fixture.one, u64::from(n % 7))?;
            }
            if n % 20 == 19 {
                fixture.gpu.event_synchronize(fixture.event)?;
            }
            seen.push((
                fixture.gpu.stream_query(fixture.one)?,
                fixture.gpu.stream_query(fixture.two)?,
                fixture.gpu.now(),
            ));
        }
        fixture.gpu.device_synchronize(DEVICE)?;
        Ok((seen, fixture.gpu.now(), fixture.gpu.hazards()))
    };
    assert_eq!(run()?, run()?);
    Ok(())
}

#[test]
fn paused_work_is_counted() -> Result<()> {
    let Fixture { gpu, one, .. } = new_fixture()?;
    assert_eq!(gpu.paused_work(one)?, 0);
    gpu.pause_stream(one)?;
    let events = [record(&gpu, one)?, record(&gpu, one)?, record(&gpu, one)?];
    assert_eq!(gpu.paused_work(one)?, 3);
    gpu.run_paused(one, 1)?;
    assert_eq!(gpu.paused_work(one)?, 2);
    gpu.event_synchronize(events[1])?;
    assert_eq!(gpu.paused_work(one)?, 1, "the wait of the host ran one");
    gpu.resume_stream(one)?;
    assert_eq!(gpu.paused_work(one)?, 0);
    Ok(())
}
