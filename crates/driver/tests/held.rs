//! Held streams: work completes when the test says so, or when the host waits for it, and not by the clock.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{BYTES, DEVICE, Lab};
use warpool_driver::sim::{SimConfig, SimDriver, WorkCosts};
use warpool_driver::*;

fn lab() -> Result<Lab> {
    Lab::new(SimConfig::default())
}

/// Records a fresh event.
fn record(gpu: &SimDriver, stream: StreamId) -> Result<EventId> {
    let event = gpu.event_create(DEVICE, EventOptions::default())?;
    gpu.event_record(event, stream, EventScope::Plain)?;
    Ok(event)
}

/// Which of the events have been reached, as a picture. Asked twice: time alone changes nothing.
fn reached(gpu: &SimDriver, events: &[EventId]) -> Result<String> {
    let mut pictures = Vec::new();
    for _ in 0..2 {
        let marks = events.iter().map(|&event| Ok(if gpu.event_query(event)? { 'x' } else { '.' }));
        pictures.push(marks.collect::<Result<String>>()?);
        // Lets a lot of time pass.
        gpu.module_load(DEVICE, &common::KERNELS)?;
    }
    assert_eq!(pictures[0], pictures[1]);
    Ok(pictures.remove(0))
}

#[test]
fn events_of_a_held_stream_are_reached_when_let_through_and_in_order() -> Result<()> {
    let Lab { gpu, one, two, .. } = lab()?;
    gpu.pause_stream(one)?;
    let held = [record(&gpu, one)?, record(&gpu, one)?, record(&gpu, one)?];
    let free = record(&gpu, two)?;
    assert_eq!(reached(&gpu, &held)?, "...");
    assert_eq!(reached(&gpu, &[free])?, "x");
    assert!(!gpu.stream_query(one)?);
    assert_eq!(gpu.run_paused(one, 1)?, 1);
    assert_eq!(reached(&gpu, &held)?, "x..");
    assert_eq!(gpu.run_paused(one, 0)?, 0);
    assert_eq!(gpu.run_paused(one, 9)?, 2, "only what is queued");
    assert_eq!(reached(&gpu, &held)?, "xxx");
    assert!(gpu.stream_query(one)?);
    let later = record(&gpu, one)?;
    assert_eq!(reached(&gpu, &[later])?, ".");
    gpu.resume_stream(one)?;
    assert_eq!(reached(&gpu, &[later])?, "x");
    Ok(())
}

#[test]
fn what_is_let_through_is_done_by_the_next_call_however_long_it_would_take() -> Result<()> {
    let work = WorkCosts { fill_start: 1_000_000_000, ..WorkCosts::h200() };
    let lab = Lab::new(SimConfig { work, ..SimConfig::default() })?;
    let exec = lab.capture(|| (0..5).try_for_each(|n| lab.fill(n, lab.one)))?;
    lab.gpu.pause_stream(lab.one)?;
    lab.fill(5, lab.one)?;
    lab.gpu.graph_launch(exec, lab.one)?;
    let event = record(&lab.gpu, lab.one)?;
    assert!(!lab.gpu.event_query(event)?);
    let before = lab.gpu.now();
    assert_eq!(lab.gpu.run_paused(lab.one, 3)?, 3);
    assert!(lab.gpu.event_query(event)?, "the next call");
    assert!(lab.gpu.now() - before < std::time::Duration::from_micros(100), "virtual time, and so no luck");
    Ok(())
}

#[test]
fn work_that_had_begun_goes_on_and_the_rest_is_held() -> Result<()> {
    let lab = lab()?;
    lab.fill(1, lab.one)?;
    let event = record(&lab.gpu, lab.one)?;
    lab.gpu.pause_stream(lab.one)?;
    lab.gpu.pause_stream(lab.one)?;
    assert_eq!(reached(&lab.gpu, &[event])?, ".");
    assert_eq!(lab.gpu.run_paused(lab.one, 5)?, 1, "the fill had begun");
    assert_eq!(reached(&lab.gpu, &[event])?, "x");
    Ok(())
}

/// What the host waits for, and how far the three records of the held stream come by that.
fn check_wait(picture: &str, wait: impl FnOnce(&Lab, &[EventId]) -> Result<()>) -> Result<()> {
    let mut lab = lab()?;
    let stream =
        |non_blocking| lab.gpu.stream_create(DEVICE, StreamOptions { non_blocking, ..StreamOptions::default() });
    let (blocking, other) = (stream(false)?, stream(true)?);
    lab.one = blocking;
    lab.gpu.pause_stream(lab.one)?;
    lab.gpu.pause_stream(other)?;
    let events = [record(&lab.gpu, lab.one)?, record(&lab.gpu, lab.one)?, record(&lab.gpu, lab.one)?];
    let unasked = record(&lab.gpu, other)?;
    wait(&lab, &events)?;
    assert_eq!(reached(&lab.gpu, &events)?, picture);
    assert!(!lab.gpu.event_query(unasked)?, "nobody waited for that stream");
    // The hold is still there.
    let next = record(&lab.gpu, lab.one)?;
    assert_eq!(reached(&lab.gpu, &[next])?, ".");
    assert_eq!(lab.gpu.hazards(), []);
    Ok(())
}

#[test]
fn a_host_that_waits_gets_what_it_waits_for_and_no_more() -> Result<()> {
    check_wait("...", |_, _| Ok(()))?;
    check_wait("xx.", |lab, events| lab.gpu.event_synchronize(events[1]))?;
    check_wait("xxx", |lab, _| lab.gpu.stream_synchronize(lab.one))?;
    // The default stream comes after blocking ones.
    check_wait("xxx", |lab, _| lab.gpu.stream_synchronize(lab.gpu.stream_default(DEVICE)?))?;
    check_wait("xxx", |lab, _| lab.gpu.upload(DEVICE, lab.memory, &[1]))?;
    // Another stream that waits for the second.
    check_wait("xx.", |lab, events| {
        lab.gpu.pause_stream(lab.two)?;
        lab.gpu.stream_wait_event(lab.two, events[1], EventScope::Plain)?;
        lab.gpu.event_record(lab.event, lab.two, EventScope::Plain)?;
        lab.gpu.event_synchronize(lab.event)
    })
}

#[test]
fn waiting_for_the_device_or_freeing_lets_everything_on_it_through() -> Result<()> {
    type Wait = fn(&Lab) -> Result<()>;
    let waits: [Wait; 2] = [|lab| lab.gpu.device_synchronize(DEVICE), |lab| lab.gpu.mem_free(lab.memory)];
    for wait in waits {
        let lab = lab()?;
        lab.gpu.pause_stream(lab.one)?;
        lab.gpu.pause_stream(lab.two)?;
        let events = [record(&lab.gpu, lab.one)?, record(&lab.gpu, lab.two)?];
        wait(&lab)?;
        assert_eq!(reached(&lab.gpu, &events)?, "xx");
        let later = [record(&lab.gpu, lab.one)?, record(&lab.gpu, lab.two)?];
        assert_eq!(reached(&lab.gpu, &later)?, "..");
    }
    Ok(())
}

#[test]
fn the_queue_of_a_held_stream_takes_as_much_as_comes() -> Result<()> {
    let config = SimConfig { queue_depth: 4, ..SimConfig::default() };
    let Lab { gpu, one, .. } = Lab::new(config)?;
    gpu.pause_stream(one)?;
    let events = (0..6).map(|_| record(&gpu, one)).collect::<Result<Vec<_>>>()?;
    assert_eq!(reached(&gpu, &events)?, "......");
    gpu.resume_stream(one)?;
    record(&gpu, one)?;
    assert_eq!(reached(&gpu, &events)?, "xxxxxx");
    Ok(())
}

#[test]
fn work_that_is_let_through_still_waits_for_other_streams() -> Result<()> {
    let Lab { gpu, one, two, .. } = lab()?;
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
fn held_work_takes_effect_when_it_is_let_through() -> Result<()> {
    let lab = lab()?;
    let calls = Arc::new(AtomicU32::new(0));
    let inner = Arc::clone(&calls);
    lab.fill(1, lab.one)?;
    lab.gpu.stream_synchronize(lab.one)?;
    lab.gpu.pause_stream(lab.one)?;
    lab.fill(2, lab.one)?;
    lab.gpu.stream_host_callback(lab.one, Arc::new(move || _ = inner.fetch_add(1, Ordering::Relaxed)))?;
    lab.gpu.device_count()?;
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    lab.gpu.run_paused(lab.one, 2)?;
    lab.gpu.device_count()?;
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    lab.gpu.resume_stream(lab.one)?;
    let mut back = vec![0; BYTES as usize];
    lab.gpu.stream_synchronize(lab.one)?;
    lab.gpu.download(DEVICE, lab.memory, &mut back)?;
    assert!(back.iter().all(|&byte| byte == 2));
    Ok(())
}

#[test]
fn a_destroyed_stream_is_no_longer_held() -> Result<()> {
    let Lab { gpu, one, .. } = lab()?;
    gpu.pause_stream(one)?;
    let event = record(&gpu, one)?;
    gpu.stream_destroy(one)?;
    assert_eq!(reached(&gpu, &[event])?, "x");
    for outcome in [gpu.pause_stream(one), gpu.resume_stream(one), gpu.run_paused(one, 1).map(drop)] {
        assert_eq!(outcome.map_err(|error| error.code), Err(ErrorCode::InvalidHandle));
    }
    assert_eq!(gpu.hazards(), [], "asking is no use of it");
    Ok(())
}

#[test]
fn only_a_held_stream_lets_through() -> Result<()> {
    let Lab { gpu, one, .. } = lab()?;
    gpu.resume_stream(one)?;
    let error = gpu.run_paused(one, 1).expect_err("it is not held");
    assert_eq!(error.code, ErrorCode::InvalidValue);
    assert!(error.to_string().contains("is not paused"), "{error}");
    Ok(())
}

#[test]
fn two_runs_under_holds_are_one_run() -> Result<()> {
    let run = || -> Result<_> {
        let lab = lab()?;
        let mut seen = Vec::new();
        lab.gpu.pause_stream(lab.one)?;
        for n in 0..50u8 {
            lab.fill(n, lab.one)?;
            lab.order(lab.one, lab.two)?;
            lab.fill(n, lab.two)?;
            if n % 3 == 0 {
                lab.gpu.run_paused(lab.one, u64::from(n % 7))?;
            }
            if n % 20 == 19 {
                lab.gpu.event_synchronize(lab.event)?;
            }
            seen.push((lab.gpu.stream_query(lab.one)?, lab.gpu.stream_query(lab.two)?, lab.gpu.now()));
        }
        lab.gpu.device_synchronize(DEVICE)?;
        Ok((seen, lab.gpu.now(), lab.gpu.hazards()))
    };
    assert_eq!(run()?, run()?);
    Ok(())
}

#[test]
fn what_is_held_is_counted() -> Result<()> {
    let Lab { gpu, one, .. } = lab()?;
    assert_eq!(gpu.paused_work(one)?, 0);
    gpu.pause_stream(one)?;
    let events = [record(&gpu, one)?, record(&gpu, one)?, record(&gpu, one)?];
    assert_eq!(gpu.paused_work(one)?, 3);
    gpu.run_paused(one, 1)?;
    assert_eq!(gpu.paused_work(one)?, 2);
    gpu.event_synchronize(events[1])?;
    assert_eq!(gpu.paused_work(one)?, 1, "a host that waited let one through");
    gpu.resume_stream(one)?;
    assert_eq!(gpu.paused_work(one)?, 0);
    Ok(())
}
