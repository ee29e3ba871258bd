//! `warpool bench scale`: the cost of an operation beside n idle objects (streams, blocks, pools, segments), and beside
//! 10 n of them. A cost may grow with the requested work, not with the number of existing objects: the ratio of a flat
//! case is about 1, of a logarithmic one below 2; 10 means that everything is visited. Rows "per page" and "per event"
//! divide the cost of work by its amount, and rows of threads compare one thread with sixteen.
//!
//! The baseline of a row is the same operation at n, measured right before. All cases run on the simulated GPU: what is
//! measured is bookkeeping on the host, and no real GPU has 100,000 streams.
//!
//! Rows of one thread count its processor time (`clock.rs`), so that other programs on the machine do not matter. Rows
//! that concern several threads count elapsed time, since waiting for each other is what they are about.

mod captures;
mod clock;
mod device;
mod host;
mod paged;
mod recordings;
mod simulated;

use serde_json::json;

use super::measure::Measurement;
use super::{Args, Report, Row};
use crate::output::{CommandError, Result, Verdict};

/// A ratio above this is a negative result for an operation beside idle objects. More than 1, because of caches: ten
/// times as many streams fill ten times the memory, and every first access misses.
const BESIDE_MAX: f64 = 1.5;

/// The same for growing work, divided by its amount: searches are logarithmic, and the data no longer fit into the
/// caches (1.1 to 1.9 in several runs).
const WORK_MAX: f64 = 2.5;

/// The same for sixteen threads. Where sizes are random, threads share the heap: 4.1 to 4.9 on 16 cores.
const THREADS_MAX: f64 = 6.0;

/// Rounds at each size, in turns; the fastest counts.
const ROUNDS: u64 = 5;

/// Something whose cost is measured at two sizes.
struct Case {
    name: &'static str,
    /// The kind of object whose number is n.
    of: &'static str,
    small: u64,
    large: u64,
    /// Sets up n of them and returns the nanoseconds of one operation.
    cost: fn(u64) -> Result<f64>,
    ratio_max: f64,
    time: Time,
}

/// Which time a row counts.
#[derive(Clone, Copy)]
enum Time {
    /// Processor time of the one thread.
    Processor,
    /// Elapsed time of several threads.
    Elapsed,
}

impl Time {
    fn name(self) -> &'static str {
        match self {
            Self::Processor if clock::IS_OF_THREAD => "processor",
            Self::Processor | Self::Elapsed => "elapsed",
        }
    }
}

impl Case {
    /// An operation beside n and 10 n idle objects.
    const fn beside(name: &'static str, of: &'static str, n: u64, cost: fn(u64) -> Result<f64>) -> Self {
        Self { name, of, small: n, large: 10 * n, cost, ratio_max: BESIDE_MAX, time: Time::Processor }
    }

    /// Work on n and on 10 n objects, divided by its amount.
    const fn work(name: &'static str, of: &'static str, n: u64, cost: fn(u64) -> Result<f64>) -> Self {
        Self { name, of, small: n, large: 10 * n, cost, ratio_max: WORK_MAX, time: Time::Processor }
    }

    /// An operation of one thread, and of sixteen.
    const fn threads(name: &'static str, cost: fn(u64) -> Result<f64>) -> Self {
        Self { name, of: "threads", small: 1, large: 16, cost, ratio_max: THREADS_MAX, time: Time::Elapsed }
    }

    /// Both sizes; the larger is at most `limit`.
    fn sizes(&self, limit: Option<u64>) -> (u64, u64) {
        let large = limit.unwrap_or(u64::MAX).min(self.large);
        ((large * self.small / self.large).max(1), large)
    }
}

const CASES: &[Case] = &[
    Case::beside("first allocation on a stream", "streams", 2_000, device::first_allocation),
    Case::beside("simulated mem_free", "streams", 2_000, simulated::mem_free),
    Case::beside("pair beside deferred frees", "frees deferred by a capture", 2_000, captures::pair_beside_deferred),
    Case::beside("pair beside pending frees", "streams with a pending free", 1_000, device::pair_beside_pending),
    Case::beside("pair beside pool scopes", "open scopes", 100, device::pair_beside_scopes),
    Case::beside("replay on the last stream", "streams a graph ran on", 2_000, captures::replay_on_last_stream),
    Case::beside("checkpoint of one block", "blocks of other pools", 10_000, device::checkpoint),
    Case::beside("paged: pages of another stream", "streams that have gone", 1_000, paged::take_beside_gone),
    Case::beside("paged: pages of another stream", "idle streams with memory", 1_000, paged::take_beside_idle),
    Case::beside("paged: pages of another stream", "streams that take them in turns", 50, paged::take_in_turns),
    Case::work("replay, per event: streams", "streams", 2_000, recordings::many_streams),
    Case::work("replay, per event: late start", "free blocks at the start", 4_000, recordings::late_start),
    Case::work("replay, per event: releases", "pools released", 1_600, recordings::releases),
    Case::work("replay, per event: trims", "segments in use", 1_600, recordings::trims),
    Case::work("paged: request, per page", "scattered pages", 2_000, paged::scattered_pages),
    Case::work("paged: trim, per page", "pages", 3_500, paged::trim),
    Case::threads("paged: pair on one stream", paged::pair_of_threads),
    Case::threads("pair on one stream", paged::caching_pair_of_threads),
    Case::threads("random pinned sizes", host::random_sizes),
];

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    if args.driver.as_deref().is_some_and(|name| name != "sim") {
        let message =
            "'bench scale' measures bookkeeping on the host, and runs on the simulated GPU only: --driver sim";
        return Err(CommandError::Usage(message.to_owned()));
    }
    let mut worst: Option<(&Case, f64)> = None;
    for case in CASES {
        let (small, large) = case.sizes(args.ops);
        let mut fastest = Measurement::MAX;
        for _ in 0..ROUNDS {
            let baseline_ns = (case.cost)(small)?;
            fastest = fastest.min(Measurement { ns: (case.cost)(large)?, baseline_ns });
        }
        let time = case.time.name();
        let (of, before, now) = (case.of, fastest.baseline_ns, fastest.ns);
        let details = format!("{small} {of}: {before:.0} ns; {large}: {now:.0} ns ({time} time)");
        let fields = vec![
            ("of", json!(case.of)),
            ("n_baseline", json!(small)),
            ("n", json!(large)),
            ("ratio_max", json!(case.ratio_max)),
            ("time", json!(time)),
        ];
        report.add(Row { baseline: "the same beside fewer", fields, details, ..Row::new(case.name, fastest) })?;
        let of_limit = |(case, ratio): (&Case, f64)| ratio / case.ratio_max;
        if worst.is_none_or(|worst| of_limit((case, fastest.ratio())) > of_limit(worst)) {
            worst = Some((case, fastest.ratio()));
        }
    }
    let Some((case, ratio)) = worst else { return Ok(Verdict::Success) };
    report.remark(format!("closest to its limit: {ratio:.2} of {} ({})", case.ratio_max, case.name));
    Ok(if ratio <= case.ratio_max { Verdict::Success } else { Verdict::Failure })
}
