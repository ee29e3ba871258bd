//! `warpool bench record`: what a history that is always on costs. A pair of an allocation and its free is compared
//! with the same pair without a history; the longest pair while a snapshot is taken with the longest in the same time
//! without one. Call stacks come from a hook that returns one of a few, so that the cost of walking frames is not in
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use warpool::Instance;
use warpool::memory::raw::Request;
use warpool::memory::report::{Frame, HistoryOptions, SnapshotOptions, Stack, StackHook, StackLevel};
use warpool::memory::{CachingAllocator, DeviceAllocator, PagedAllocator, Settings};

use super::measure::{Measurement, fastest, ns_each, timed};
use super::{Args, Report, Row};
use crate::driver;
use crate::output::{Result, Verdict};

const BYTES: u64 = 64 << 10;

/// Rounds of each; the fastest counts.
const ROUNDS: u64 = 9;

/// Pairs of a round.
const PAIRS: u64 = 20_000;

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    let driver = args.open_driver()?;
    let device = driver::device(&*driver, args.device)?;
    driver.set_current_device(device)?;
    let instance = Instance::new(driver)?;
    let stream = instance.device(device.0)?.pool_stream()?;
    let entries = usize::try_from(args.ops.unwrap_or(1_000_000)).unwrap_or(usize::MAX);
    let request = Request::new(device, stream.id(), BYTES);
    let make = |paged: bool| -> warpool::Result<Arc<dyn DeviceAllocator>> {
        match paged {
            false => Ok(Arc::new(CachingAllocator::new(&instance, Settings::default()))),
            true => Ok(Arc::new(PagedAllocator::new(&instance, Settings::default())?)),
        }
    };
    let has_pages = stream.device().properties().virtual_memory;
    for paged in [false, true].into_iter().filter(|&paged| has_pages || !paged) {
        let (plain, recording) = (make(paged)?, make(paged)?);
        recording.observers().set_stack_hook(Some(stacks()));
        recording.record_history(Some(HistoryOptions {
            entries_max: entries,
            stacks: StackLevel::Alloc,
            ..HistoryOptions::default()
        }))?;
        let kind = if paged { "paged, " } else { "" };
        let round = |allocator: &dyn DeviceAllocator| -> warpool::Result<f64> {
            Ok(ns_each(timed(PAIRS, || pair(allocator, request))?, PAIRS))
        };
        let measurement = fastest(ROUNDS, || round(&*plain), || round(&*recording))?;
        let baseline = "the same without a history";
        report.add(Row { baseline, ..Row::new(format!("{kind}pair of 64 KiB, history with stacks"), measurement) })?;
        // A pair is two entries.
        (0..entries.div_ceil(2)).try_for_each(|_| pair(&*recording, request))?;
        let case = format!("{kind}longest pair while a snapshot is taken");
        report.add(pauses(case, &*recording, request, entries)?)?;
    }
    Ok(Verdict::Success)
}

/// The longest pair of a thread while another takes a snapshot.
fn pauses(case: String, allocator: &dyn DeviceAllocator, request: Request, entries: usize) -> warpool::Result<Row> {
    let (mut shortest, mut measured) = (Duration::MAX, Measurement::MAX);
    for _ in 0..ROUNDS {
        let mut took = Duration::ZERO;
        let ns = longest_pair(allocator, request, || {
            let start = Instant::now();
            let snapshot = allocator.snapshot(SnapshotOptions::default())?;
            took = start.elapsed();
            drop(snapshot);
            Ok(())
        })?;
        let baseline_ns = longest_pair(allocator, request, || {
            thread::sleep(took);
            Ok(())
        })?;
        shortest = shortest.min(took);
        measured = measured.min(Measurement { ns, baseline_ns });
    }
    let snapshot_ms = shortest.as_secs_f64() * 1e3;
    Ok(Row {
        baseline: "the longest in that time without one",
        fields: vec![("entries", json!(entries)), ("snapshot_ms", json!(snapshot_ms))],
        details: format!("a snapshot of {entries} entries takes {snapshot_ms:.1} ms"),
        ..Row::new(case, measured)
    })
}

/// The nanoseconds of the longest pair on a thread while `act` runs here.
fn longest_pair(
    allocator: &dyn DeviceAllocator,
    request: Request,
    act: impl FnOnce() -> warpool::Result<()>,
) -> warpool::Result<f64> {
    let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    let pairs = || -> warpool::Result<Duration> {
        let mut longest = Duration::ZERO;
        while !ended.load(Ordering::Relaxed) {
            longest = longest.max(timed(1, || pair(allocator, request))?);
            begun.store(true, Ordering::Relaxed);
        }
        Ok(longest)
    };
    thread::scope(|scope| {
        let running = scope.spawn(pairs);
        while !begun.load(Ordering::Relaxed) && !running.is_finished() {
            thread::yield_now();
        }
        let acted = act();
        ended.store(true, Ordering::Relaxed);
        let longest = running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        acted?;
        Ok(ns_each(longest, 1))
    })
}

fn pair(allocator: &dyn DeviceAllocator, request: Request) -> warpool::Result<()> {
    allocator.free_raw(allocator.allocate_raw(request)?.ptr)
}

/// Returns one of a few call stacks in turn.
fn stacks() -> StackHook {
    let frame = |line| Frame { name: "forward".to_owned(), filename: "model.py".to_owned(), line };
    let stacks: Vec<Stack> = (0..64).map(|line| Arc::new([frame(line)]) as Stack).collect();
    let next = AtomicUsize::new(0);
    Arc::new(move || Some(Arc::clone(&stacks[next.fetch_add(1, Ordering::Relaxed) % stacks.len()])))
}
