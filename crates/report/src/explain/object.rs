//! The JSON of an explanation: `docs/json.md` is its schema.

use std::path::Path;

use serde_json::{Map, Value, json};
use warpool_trace::cards::DeviceOrigin;
use warpool_trace::explain::{
    Advice, AllocatedBlock, CategoryShare, Explanation, Fit, Holder, Moment, OnDevice, Parts, Peak,
};

use super::prose;
use crate::account;
use crate::replay::in_force_object;

/// The version of the schema, which is raised when a key changes its meaning or is removed.
pub const SCHEMA_VERSION: u32 = 2;

/// How many groups of holders an object has.
const HOLDERS_MAX: usize = 100;

/// One device of one file.
#[must_use]
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
        "headline": prose::headline(explanation),
        "sentences": prose::sentences(explanation),
        "moment": moment_object(moment),
        "peaks": explanation.peaks.map(|peaks| json!({
            "requested": peak_object(peaks.requested),
            "allocated": peak_object(peaks.allocated),
            "reserved": peak_object(peaks.reserved),
        })),
        "verdict": explanation.verdict.name(),
        "evidence": explanation.evidence,
        "parts": parts_object(&moment.parts),
        "account": explanation.account.as_ref().map(account::object),
        "categories": categories_list(moment),
        "holders": holders_list(&moment.holders.groups),
        "holders_by_line": holders_list(&moment.holders.by_line),
        "holders_by_module": holders_list(&moment.holders.by_module),
        "holders_by_age": holders_list(&moment.holders.by_age),
        "bytes_with_stack": moment.holders.bytes_with_stack,
        "bytes_before_history": moment.holders.bytes_before_history,
        "advice": explanation.advice.iter().map(advice_object).collect::<Vec<_>>(),
        "on_device": explanation.on_device.as_ref().map(on_device_object),
        "fits": explanation.fits.iter().map(fit_object).collect::<Vec<_>>(),
        "growth": explanation.growth.as_ref().map(|growth| json!({
            "iterations": growth.iterations,
            "iterations_grown": growth.iterations_grown,
            "bytes": growth.bytes,
            "holders": holders_list(&growth.holders),
        })),
        "events": explanation.events,
        "ooms": explanation.ooms,
        "moments": explanation.moments.iter().map(|moment| json!({
            "moment": moment_object(moment),
            "parts": parts_object(&moment.parts),
        })).collect::<Vec<_>>(),
        "exact": explanation.exact,
        "in_force": explanation.in_force.as_ref().map(in_force_object),
        "remarks": explanation.remarks,
        "blocks": blocks_list(moment),
    })
}

/// The blocks one by one; `null` if they were not requested.
fn blocks_list(moment: &Moment) -> Value {
    let object = |block: &AllocatedBlock| {
        json!({
            "address": block.addr,
            "bytes": block.bytes,
            "event": block.event,
            "category": block.category.name(),
            "rule": block.rule.name(),
        })
    };
    match moment.blocks.is_empty() {
        true => Value::Null,
        false => moment.blocks.iter().map(object).collect(),
    }
}

fn peak_object(peak: Peak) -> Value {
    json!({ "bytes": peak.bytes, "event": peak.event })
}

fn moment_object(moment: &Moment) -> Value {
    let request = moment.request;
    json!({
        "kind": moment.kind.name(),
        "event": moment.event,
        "time_us": moment.time_us,
        "requested_bytes": moment.bytes_requested,
        "allocated_bytes": moment.bytes_allocated,
        "reserved_bytes": moment.bytes_reserved,
        "largest_free_bytes": moment.largest_free,
        "bytes_requested": request.map(|request| request.bytes),
        "bytes_segment": request.map(|request| request.bytes_segment),
        "device_free_bytes": request.and_then(|request| request.device_free),
    })
}

fn parts_object(parts: &Parts) -> Value {
    let parts = parts.named().into_iter().map(|(name, bytes)| (name.to_owned(), Value::from(bytes)));
    Value::Object(parts.collect::<Map<String, Value>>())
}

/// The categories of a moment, with their shares of the requested bytes.
#[must_use]
pub fn categories_list(moment: &Moment) -> Vec<Value> {
    let whole = moment.bytes_requested;
    let object = |share: &CategoryShare| {
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let part = if whole == 0 { 0.0 } else { share.bytes as f64 / whole as f64 };
        json!({
            "name": share.category.name(),
            "bytes": share.bytes,
            "share": part,
            "count": share.count,
            "rules": share.rules.iter().map(|(rule, bytes)| json!({
                "rule": rule.name(),
                "words": rule.words(),
                "bytes": bytes,
            })).collect::<Vec<_>>(),
        })
    };
    moment.categories.iter().map(object).collect()
}

fn holders_list(holders: &[Holder]) -> Vec<Value> {
    holders.iter().take(HOLDERS_MAX).map(holder_object).collect()
}

/// A group of blocks.
pub fn holder_object(holder: &Holder) -> Value {
    json!({
        "name": holder.name,
        "line": holder.line,
        "forward_line": holder.forward_line,
        "path": holder.path,
        "bytes": holder.bytes,
        "count": holder.count,
        "category": holder.category.name(),
    })
}

/// One thing to do.
#[must_use]
pub fn advice_object(advice: &Advice) -> Value {
    json!({
        "kind": advice.kind.name(),
        "title": advice.title,
        "detail": advice.detail,
        "apply": advice.apply,
        "fits": advice.fits,
        "bytes_saved": advice.bytes_saved,
        "margin_bytes": advice.margin_bytes,
        "proof": advice.proof.name(),
    })
}

fn on_device_object(on: &OnDevice) -> Value {
    json!({
        "device_bytes_total": on.bytes_total,
        "fits": on.orders.all_fit(),
        "orders_run": on.orders.run,
        "orders_fit": on.orders.fit,
        "peak_reserved_bytes": on.orders.peak_reserved_bytes_most,
        "margin_bytes": on.orders.margin_bytes_least,
        "oom_event": on.oom_event,
        "oom_bytes_requested": on.oom_bytes,
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
