//! The figures that the page shows, as JSON: `--json` prints them, and the page has the same.

use serde_json::{Value, json};
use warpool_trace::cards::DeviceOrigin;
use warpool_trace::timeline::{MarkKind, Sample, Timeline};

use crate::account;

/// The figures of one device.
pub fn object(timeline: &Timeline) -> Value {
    let count = |kind: MarkKind| timeline.marks.iter().filter(|mark| mark.kind == kind).count();
    let explanation = &timeline.explanation;
    let moment = explanation.moment();
    // Without times the duration is 0.
    let has_times = timeline.duration_us > 0;
    let sample = |of: &Sample| sample(of, has_times);
    json!({
        "device": timeline.device,
        "events": timeline.events,
        "duration_us": timeline.duration_us,
        "allocations": timeline.allocations.len() as u64 + timeline.allocations_left_out,
        "allocations_left_out": timeline.allocations_left_out,
        "positions_per_sample": timeline.levels.first().map_or(1, |level| level.positions),
        "peak_live": sample(&timeline.peak_live),
        "peak_reserved": sample(&timeline.peak_reserved),
        "ooms": count(MarkKind::OutOfMemory),
        "retries": count(MarkKind::Retry),
        "verdict": explanation.verdict.name(),
        "moment": { "kind": moment.kind.name(), "event": moment.event, "time_us": moment.time_us },
        "device_bytes_total": explanation.device_bytes_total,
        "device_origin": explanation.device_origin.name(),
        "device_name": explanation.device_name,
        "device_assumed": explanation.device_origin == DeviceOrigin::Unknown,
        "account": explanation.account.as_ref().map(account::object),
    })
}

fn sample(sample: &Sample, has_times: bool) -> Value {
    json!({
        "position": sample.position,
        "time_us": has_times.then_some(sample.time_us),
        "live_bytes": sample.live(),
        "reserved_bytes": sample.reserved,
        "parts": {
            "allocated": sample.allocated,
            "rounding": sample.rounding,
            "waiting": sample.waiting,
            "fragmentation": sample.fragmentation(),
            "cached": sample.cached,
        },
    })
}
