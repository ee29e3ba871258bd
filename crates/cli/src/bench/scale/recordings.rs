//! Replays of recordings of any size.

use warpool_trace::growth::GrowthCase;
use warpool_trace::replay::{ReplayOptions, replay};

use super::clock::ThreadTime;
use crate::bench::measure::ns_each;
use crate::output::{CommandError, Result};

/// Per event, an allocation or free on each of n streams in expandable segments.
pub fn many_streams(n: u64) -> Result<f64> {
    per_event(GrowthCase::Streams, n)
}

/// Per event, a recording that starts with n free blocks.
pub fn late_start(n: u64) -> Result<f64> {
    per_event(GrowthCase::LateStart, n)
}

/// Per event, the release of n private pools with a segment each.
pub fn releases(n: u64) -> Result<f64> {
    per_event(GrowthCase::Releases, n)
}

/// Per event, n segments that are freed and released one after another.
pub fn trims(n: u64) -> Result<f64> {
    per_event(GrowthCase::Trims, n)
}

fn per_event(case: GrowthCase, n: u64) -> Result<f64> {
    let recording = case.recording(n);
    let events = recording.traces.iter().map(|entries| entries.len() as u64).sum();
    let start = ThreadTime::now();
    replay(&recording, &ReplayOptions::default()).map_err(|error| CommandError::Usage(error.to_string()))?;
    Ok(ns_each(start.elapsed(), events))
}
