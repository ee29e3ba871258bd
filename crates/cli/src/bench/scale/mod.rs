//! `warpool bench scale`: what an operation costs beside n idle things (streams, blocks, pools, segments), and beside
//! ten times as many. A cost may grow with the work that is requested, not with what merely exists: the ratio of a flat
//! case is about 1, of a logarithmic one below 2; 10 means that everything is visited.
//!
//! The baseline of a row is the same operation at n, measured right before. All cases run on the simulated GPU: what is
//! measured is bookkeeping on the host, and no real GPU has 100,000 streams.

mod captures;
mod device;
mod host;
mod recordings;
mod simulated;

use serde_json::json;

use super::measure::Measurement;
use super::{Args, Report, Row};
use crate::output::{CommandError, Result, Verdict};

/// A ratio above this is reported as a negative result. Generous, because of caches: ten times as many streams fill
/// ten times the memory, and every first access misses.
const RATIO_MAX: f64 = 4.0;

/// Rounds at each size, in turns; the fastest counts.
const ROUNDS: u64 = 3;

/// Something whose cost is measured at two sizes.
struct Case {
    name: &'static str,
    /// What there are n of.
    of: &'static str,
    small: u64,
    large: u64,
    /// Sets up n of them and returns the nanoseconds of one operation.
    cost: fn(u64) -> Result<f64>,
}

impl Case {
    /// A case at n and at 10 n.
    const fn tenfold(name: &'static str, of: &'static str, n: u64, cost: fn(u64) -> Result<f64>) -> Self {
        Self { name, of, small: n, large: 10 * n, cost }
    }

    /// Both sizes; the larger is at most `limit`.
    fn sizes(&self, limit: Option<u64>) -> (u64, u64) {
        let large = limit.unwrap_or(u64::MAX).min(self.large);
        ((large * self.small / self.large).max(1), large)
    }
}

const CASES: &[Case] = &[
    Case::tenfold("first allocation on a stream", "streams", 10_000, device::first_allocation),
    Case::tenfold("simulated mem_free", "streams", 10_000, simulated::mem_free),
    Case::tenfold("pair beside deferred frees", "frees deferred by a capture", 2_000, captures::pair_beside_deferred),
    Case::tenfold("pair beside pending frees", "streams with a pending free", 1_000, device::pair_beside_pending),
    Case::tenfold("pair beside pool scopes", "open scopes", 100, device::pair_beside_scopes),
    Case::tenfold("replay on the last stream", "streams a graph ran on", 2_000, captures::replay_on_last_stream),
    Case::tenfold("checkpoint of one block", "blocks of other pools", 10_000, device::checkpoint),
    Case::tenfold("replay, per event: streams", "streams", 2_000, recordings::many_streams),
    Case::tenfold("replay, per event: late start", "free blocks at the start", 4_000, recordings::late_start),
    Case::tenfold("replay, per event: releases", "pools released", 1_600, recordings::releases),
    Case::tenfold("replay, per event: trims", "segments in use", 1_600, recordings::trims),
    Case { name: "random pinned sizes", of: "threads", small: 1, large: 16, cost: host::random_sizes },
];

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    if args.driver.as_deref().is_some_and(|name| name != "sim") {
        let message =
            "'bench scale' measures bookkeeping on the host, and runs on the simulated GPU only: --driver sim";
        return Err(CommandError::Usage(message.to_owned()));
    }
    let mut worst = None;
    for case in CASES {
        let (small, large) = case.sizes(args.ops);
        let mut fastest = Measurement::MAX;
        for _ in 0..ROUNDS {
            let baseline_ns = (case.cost)(small)?;
            fastest = fastest.min(Measurement { ns: (case.cost)(large)?, baseline_ns });
        }
        let details = format!("{small} {}: {:.0} ns; {large}: {:.0} ns", case.of, fastest.baseline_ns, fastest.ns);
        let fields = vec![("of", json!(case.of)), ("n_baseline", json!(small)), ("n", json!(large))];
        report.add(Row { baseline: "the same beside fewer", fields, details, ..Row::new(case.name, fastest) })?;
        if worst.is_none_or(|(_, ratio)| fastest.ratio() > ratio) {
            worst = Some((case.name, fastest.ratio()));
        }
    }
    let Some((case, ratio)) = worst else { return Ok(Verdict::Success) };
    report.remark(format!("the largest growth is {ratio:.2} ({case}); limit: {RATIO_MAX}"));
    Ok(if ratio <= RATIO_MAX { Verdict::Success } else { Verdict::Failure })
}
