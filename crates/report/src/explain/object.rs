//! The JSON of an explanation: `docs/json.md` is its schema.

use std::path::Path;

use serde_json::{Map, Value, json};
use warpool_trace::cards::DeviceOrigin;
use warpool_trace::explain::{Explanation, Fit, Holder, Moment, Parts};

use crate::replay::in_force_object;

/// The version of the schema, which is raised when a key changes its meaning or goes.
const SCHEMA_VERSION: u32 = 1;

/// How many groups of holders an object has.
const HOLDERS_MAX: usize = 100;

/// One device of one file.
pub fn object(file: &Path, explanation: &Explanation) -> Value {
    let moment = explanation.moment();
    json!({
        "schema_version": SCHEMA_VERSION,
        "file": file.to_string_lossy(),
        "device": explanation.device,
        "device_bytes_total": explanation.device_bytes_total,
        "device_origin": explanation.device_origin.name(),
        "device_name": explanation.device_name,
        "device_assumed": explanation.device_origin == DeviceOrigin::Unknown,
        "moment": moment_object(moment),
        "verdict": moment.verdict.name(),
        "evidence": moment.evidence,
        "parts": parts_object(&moment.parts),
        "holders": holders_list(&moment.holders.groups),
        "holders_by_line": holders_list(&moment.holders.by_line),
        "holders_by_module": holders_list(&moment.holders.by_module),
        "holders_by_age": holders_list(&moment.holders.by_age),
        "bytes_with_stack": moment.holders.bytes_with_stack,
        "fits": explanation.fits.iter().map(fit_object).collect::<Vec<_>>(),
        "growth": explanation.growth.as_ref().map(|growth| json!({
            "iterations": growth.iterations,
            "iterations_grown": growth.iterations_grown,
            "bytes": growth.bytes,
            "holders": holders_list(&growth.holders),
        })),
        "ooms": explanation.ooms,
        "moments": explanation.moments.iter().map(|moment| json!({
            "moment": moment_object(moment),
            "verdict": moment.verdict.name(),
            "evidence": moment.evidence,
            "parts": parts_object(&moment.parts),
        })).collect::<Vec<_>>(),
        "exact": explanation.exact,
        "in_force": explanation.in_force.as_ref().map(in_force_object),
        "remarks": explanation.remarks,
    })
}

fn moment_object(moment: &Moment) -> Value {
    json!({
        "kind": moment.kind.name(),
        "event": moment.event,
        "time_us": moment.time_us,
        "bytes_requested": moment.bytes_requested,
        "bytes_segment": moment.bytes_segment,
        "device_free_bytes": moment.device_free,
        "reserved_bytes": moment.bytes_reserved,
        "largest_free_bytes": moment.largest_free,
    })
}

fn parts_object(parts: &Parts) -> Value {
    let parts = parts.named().into_iter().map(|(name, bytes)| (name.to_owned(), Value::from(bytes)));
    Value::Object(parts.collect::<Map<String, Value>>())
}

fn holders_list(holders: &[Holder]) -> Vec<Value> {
    holders.iter().take(HOLDERS_MAX).map(holder_object).collect()
}

/// A group of blocks.
fn holder_object(holder: &Holder) -> Value {
    json!({
        "name": holder.name,
        "line": holder.line,
        "path": holder.path,
        "bytes": holder.bytes,
        "count": holder.count,
    })
}

/// A change that was replayed.
fn fit_object(fit: &Fit) -> Value {
    json!({
        "change": fit.change.name(),
        "set": fit.set,
        "variable": fit.variable,
        "fits": fit.fits,
        "orders_run": fit.orders.run,
        "orders_fit": fit.orders.fit,
        "margin_bytes": fit.orders.margin_bytes_least,
        "peak_reserved_bytes": fit.orders.peak_reserved_bytes_most,
        "driver_seconds_modelled": fit.driver_seconds,
        "driver_seconds_more": fit.driver_seconds_more,
        "retries": fit.retries,
        "device_bytes_total": fit.device_bytes_total,
    })
}
