//! Tuned settings in sentences and as JSON: `docs/json.md` is the schema.

use std::path::PathBuf;

use serde_json::{Value, json};
use warpool_trace::tune::Tuned;

use crate::bytes_text::text;

/// The best candidate that fits and whose figures are not just a lower bound.
#[must_use]
pub fn best(tuned: &[Tuned]) -> Option<&Tuned> {
    tuned.iter().find(|tuned| tuned.fits() && !tuned.candidate.is_lower_bound)
}

/// What to set, and the gain, in a sentence.
#[must_use]
pub fn recommendation(tuned: &[Tuned]) -> String {
    let recorded = tuned.iter().find(|tuned| tuned.candidate.is_recorded());
    let Some(best) = best(tuned) else { return "Nothing that was tried fits.".to_owned() };
    let Some(recorded) = recorded.filter(|_| !best.candidate.is_recorded()) else {
        return "The recorded settings serve best.".to_owned();
    };
    let (now, before) = (best.peak_reserved_bytes(), recorded.peak_reserved_bytes());
    let seconds = best.driver_seconds() - recorded.driver_seconds();
    let time = format!("{:.3} s {} in driver calls", seconds.abs(), if seconds < 0.0 { "less" } else { "more" });
    let reserves = match recorded.fits() {
        true => format!("reserves {} instead of {}", text(now), text(before)),
        false => format!("fits with {}, where the recorded settings do not fit", text(now)),
    };
    format!("Recommended: it {reserves}, with {time}.")
}

/// The least margin that stays unreserved.
#[must_use]
pub fn margin(tuned: &Tuned) -> Option<u64> {
    let margins =
        tuned.reports.iter().map(|report| report.orders.margin_bytes_least.filter(|_| report.orders.all_fit()));
    margins.collect::<Option<Vec<u64>>>()?.into_iter().min()
}

/// A candidate with its rank, as JSON.
#[must_use]
pub fn object(rank: usize, tuned: &Tuned, files: &[PathBuf]) -> Value {
    json!({
        "schema_version": 1,
        "rank": rank,
        "name": tuned.candidate.name,
        "set": tuned.candidate.set,
        "variable": tuned.candidate.variable,
        "recorded": tuned.candidate.is_recorded(),
        "lower_bound": tuned.candidate.is_lower_bound,
        "fits": tuned.fits(),
        "margin_bytes": margin(tuned),
        "peak_reserved_bytes": tuned.peak_reserved_bytes(),
        "driver_seconds_modelled": tuned.driver_seconds(),
        "apply": tuned.candidate.apply(),
        "smallest_device_bytes": tuned.smallest_device.map(|device| device.bytes),
        "smallest_device_tolerance_bytes": tuned.smallest_device.map(|device| device.tolerance_bytes),
        "files": files.iter().map(|file| file.to_string_lossy()).collect::<Vec<_>>(),
        "devices": tuned.reports.iter().map(|report| json!({
            "device": report.device,
            "orders_run": report.orders.run,
            "orders_fit": report.orders.fit,
            "peak_reserved_bytes_least": report.orders.peak_reserved_bytes_least,
            "peak_reserved_bytes_most": report.orders.peak_reserved_bytes_most,
            "peak_live_bytes": report.peak_live_bytes,
            "retries": report.retries,
        })).collect::<Vec<_>>(),
    })
}
