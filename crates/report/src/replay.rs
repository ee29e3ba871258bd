//! Replays as JSON: `docs/json.md` is the schema.

use std::path::Path;

use serde_json::{Value, json};
use warpool::memory::report::{BlockState, Snapshot};
use warpool_trace::RecordingFormat;
use warpool_trace::cards::DeviceOrigin;
use warpool_trace::replay::{AddressOrders, Fidelity, InForce, Inferences, LimitOrigin, Outcome, ReplayReport, Round};

/// The version of the schema, which is raised when a key changes its meaning or is removed.
const SCHEMA_VERSION: u32 = 1;

/// The cost of reading a recording.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Reading and decompressing the file.
    pub input_seconds: f64,
    /// Parsing its content.
    pub parse_seconds: f64,
    /// Its bytes after decompression.
    pub bytes_decompressed: u64,
    /// Its format.
    pub format: RecordingFormat,
}

/// The totals of a device's segments in a snapshot.
#[derive(Clone, Debug)]
pub struct SegmentTotals {
    /// The device.
    pub device: i32,
    /// How many segments there are.
    pub segments: u64,
    /// Their bytes.
    pub bytes_reserved: u64,
    /// Those that are allocated.
    pub bytes_allocated: u64,
    /// Those that are pending free.
    pub bytes_pending: u64,
}

/// The totals of each device.
#[must_use]
pub fn segment_totals(snapshot: &Snapshot) -> Vec<SegmentTotals> {
    let mut totals: Vec<SegmentTotals> = Vec::new();
    for segment in &snapshot.segments {
        let device = segment.device;
        let at = totals.iter().position(|totals| totals.device == device).unwrap_or_else(|| {
            let (segments, bytes_reserved, bytes_allocated, bytes_pending) = (0, 0, 0, 0);
            totals.push(SegmentTotals { device, segments, bytes_reserved, bytes_allocated, bytes_pending });
            totals.len() - 1
        });
        let in_state = |state: BlockState| {
            let blocks = segment.blocks.iter().filter(move |block| block.state == state);
            blocks.fold(0, |sum: u64, block| sum.saturating_add(block.size))
        };
        let totals = &mut totals[at];
        totals.segments += 1;
        totals.bytes_reserved = totals.bytes_reserved.saturating_add(segment.total_size);
        totals.bytes_allocated = totals.bytes_allocated.saturating_add(in_state(BlockState::ActiveAllocated));
        totals.bytes_pending = totals.bytes_pending.saturating_add(in_state(BlockState::ActivePendingFree));
    }
    totals.sort_unstable_by_key(|totals| totals.device);
    totals
}

/// The message of an out-of-memory error. If the limit represents a full device, settings cannot raise it.
#[must_use]
pub fn advice(message: &str, report: &ReplayReport, format: RecordingFormat) -> String {
    const RAISE: &str =
        "raise the lower of the memory fraction and memory_cap_mb (without a limit: fraction 1.0 and no cap)";
    // A program with RMM has no PyTorch settings to change.
    let message = match format {
        RecordingFormat::RmmLog => message.replace(": set expandable_segments:True to avoid that.", "."),
        RecordingFormat::TorchSnapshot => message.to_owned(),
    };
    let message = match report.in_force.device_bytes_total {
        Some(_) => message,
        None => without_device(&message),
    };
    match report.in_force.limit_origin {
        LimitOrigin::RecordedDeviceFull => message.replace(RAISE, "that is all that the recorded device had"),
        _ => message.replace(
            RAISE,
            "to lift it, --set per_process_memory_fraction:1.0, in the program set_per_process_memory_fraction(1.0)",
        ),
    }
}

/// The message without what it says about the device: an unknown one is simulated with more memory than it had.
fn without_device(message: &str) -> String {
    let mut message = message.to_owned();
    for (begins, ends) in
        [(" GPU ", " is free."), (". ", " is held by others (contexts, other libraries, other processes)")]
    {
        let Some(end) = message.find(ends) else { continue };
        if let Some(start) = message[..end].rfind(begins) {
            message.replace_range(start..end + ends.len(), "");
        }
    }
    message
}

/// A device of a snapshot without a history, as JSON.
#[must_use]
pub fn segments_object(file: &Path, totals: &SegmentTotals) -> Value {
    json!({
        "schema_version": SCHEMA_VERSION,
        "file": file.to_string_lossy(),
        "device": totals.device,
        "outcome": "no_history",
        "segments": totals.segments,
        "reserved_bytes": totals.bytes_reserved,
        "allocated_bytes": totals.bytes_allocated,
        "pending_bytes": totals.bytes_pending,
    })
}

fn orders_object(orders: &AddressOrders) -> Value {
    json!({
        "run": orders.run,
        "fit": orders.fit,
        "peak_reserved_bytes_least": orders.peak_reserved_bytes_least,
        "peak_reserved_bytes_most": orders.peak_reserved_bytes_most,
        "margin_bytes_least": orders.margin_bytes_least,
    })
}

/// The report of one device, as JSON.
#[must_use]
pub fn object(file: &Path, reading: &Reading, report: &ReplayReport) -> Value {
    let Reading { input_seconds, parse_seconds, bytes_decompressed, format } = *reading;
    let Fidelity { checked, exact, addresses_equal, addresses_total, .. } = &report.fidelity;
    json!({
        "schema_version": SCHEMA_VERSION,
        "file": file.to_string_lossy(),
        "device": report.device,
        "events": report.events,
        "allocations": report.allocations,
        "outcome": report.outcome.name(),
        "peak_live_bytes": report.peak_live_bytes,
        "peak_reserved_bytes": report.peak_reserved_bytes,
        "segments_allocated": report.segments_allocated,
        "retries": report.retries,
        "ooms": report.ooms,
        "driver_calls": report.driver_calls,
        "forced_syncs": report.forced_syncs,
        "driver_seconds_modelled": report.driver_seconds_modelled,
        "recorded_seconds": report.recorded_seconds,
        "steady": report.steady.map(|steady| json!({
            "recorded_seconds": steady.recorded_seconds,
            "driver_calls": steady.driver_calls,
            "driver_seconds_modelled": steady.driver_seconds_modelled,
            "remap_seconds_modelled": steady.remap_seconds_modelled,
            "bytes_remapped": steady.bytes_remapped,
        })),
        "replay_seconds": report.replay_seconds,
        "run_seconds": report.run_seconds,
        "parse_seconds": parse_seconds,
        "input_seconds": input_seconds,
        "bytes_decompressed": bytes_decompressed,
        "fidelity": {
            "checked": checked,
            "exact": exact,
            "addresses_equal": addresses_equal,
            "addresses_total": addresses_total,
            "recorded_peak_reserved_bytes": report.fidelity.recorded_peak_reserved_bytes,
            "recorded_segments_allocated": report.fidelity.recorded_segments_allocated,
            "first_difference": report.fidelity.first_difference.as_ref().map(ToString::to_string),
        },
        "oom": match &report.outcome {
            Outcome::Completed => Value::Null,
            Outcome::OutOfMemory { event, report: oom } => json!({
                "event": event,
                "message": advice(&oom.to_string(), report, format),
                "bytes_requested": oom.bytes_requested,
                "bytes_segment": oom.bytes_segment,
            }),
        },
        "orders": orders_object(&report.orders),
        "rounds": rounds_list(&report.rounds),
        "control": report.control.as_ref().map(orders_object),
        "in_force": in_force_object(&report.in_force),
        "inferred": inferred_object(&report.inferred),
        "warnings": report.warnings,
    })
}

/// What the recording does not contain.
fn inferred_object(inferred: &Inferences) -> Value {
    json!({
        "cap_bytes": inferred.memory_limit.map(|limit| limit.used),
        "cap_at_least_bytes": inferred.memory_limit.map(|limit| limit.at_least),
        "cap_below_bytes": inferred.memory_limit.map(|limit| limit.below),
        "device_had_bytes_least": inferred.memory_limit.and_then(|limit| limit.device_had).map(|had| had.0),
        "device_had_bytes_most": inferred.memory_limit.and_then(|limit| limit.device_had).map(|had| had.1),
        "device_full": inferred.memory_limit.is_some_and(|limit| limit.device_full),
        "free_block_order": inferred.free_block_order.name(),
        "pools_recorded": inferred.pools_recorded.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "pools_inferred": inferred.pools_inferred,
        "segments_inferred": inferred.segments_inferred,
        "segments_assumed": inferred.segments_assumed,
        "bytes_unknown_origin": inferred.bytes_unknown_origin,
        "bytes_reserved_at_start": inferred.bytes_reserved_at_start,
        "notes": inferred.remarks,
    })
}

fn rounds_list(rounds: &[Round]) -> Value {
    let object = |round: &Round| {
        json!({
            "peak_live_bytes": round.peak_live_bytes,
            "peak_reserved_bytes": round.peak_reserved_bytes,
            "ooms": round.ooms,
        })
    };
    rounds.iter().map(object).collect()
}

/// What was in force, as JSON.
#[must_use]
pub fn in_force_object(in_force: &InForce) -> Value {
    json!({
        "settings": in_force.settings,
        "settings_recorded": in_force.settings_recorded,
        "changes": in_force.changes.iter().map(|change| json!({
            "key": change.key,
            "recorded": change.recorded,
            "used": change.used,
        })).collect::<Vec<_>>(),
        "allocator": in_force.allocator.name(),
        "allocator_recorded": in_force.allocator_recorded.name(),
        "device_bytes_total": in_force.device_bytes_total,
        "device_origin": in_force.device_origin.name(),
        "device_name": in_force.device_name,
        "device_assumed": in_force.device_origin == DeviceOrigin::Unknown,
        "device_bytes_simulated": in_force.device_bytes_simulated,
        "bytes_available": in_force.bytes_available,
        "memory_limit_bytes": in_force.memory_limit,
        "memory_limit_origin": in_force.limit_origin.name(),
        "memory_limit_lifted_bytes": in_force.limit_lifted,
    })
}
