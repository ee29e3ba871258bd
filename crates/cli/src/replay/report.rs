//! The report of replays: a table with remarks and a legend for people, one JSON object per file for programs.

use std::io;
use std::path::Path;

use comfy_table::Table;
use serde_json::{Value, json};
use warpool_trace::replay::{AllocatorChoice, Fidelity, Inferences, Outcome, ReplayReport, Steady};

use super::{Args, Replayed};
use crate::output::{self, Output};
use crate::size;

/// The table of all files, filled one by one.
pub struct ReplayTable {
    table: Table,
    /// Lines below the table.
    remarks: Vec<String>,
    rows: usize,
    /// What differs from the recording (settings, allocator, capacity); empty if nothing.
    what_if: String,
    is_driver_pool: bool,
}

impl ReplayTable {
    pub fn new(args: &Args) -> Self {
        let mut what_if = Vec::new();
        what_if.extend(args.settings.as_ref().map(|settings| format!("with settings {settings:?}")));
        if args.allocator.name() != "caching" {
            what_if.push(format!("with the {} allocator", args.allocator.name()));
        }
        what_if.extend(args.capacity.map(|bytes| format!("on a device of {}", size::format(bytes))));
        let columns = [
            "file",
            ">live",
            ">reserved",
            ">overhead",
            ">recorded",
            ">driver calls",
            ">driver time",
            ">steady",
            "outcome",
            "fidelity",
        ];
        let is_driver_pool = args.allocator == AllocatorChoice::DriverPool;
        let what_if = what_if.join(", ");
        Self { table: output::table(&columns), remarks: Vec::new(), rows: 0, what_if, is_driver_pool }
    }

    /// Adds a file: its JSON object is written at once, its row is kept for [`finish`](Self::finish).
    pub fn add(&mut self, file: &Path, replayed: &Replayed, output: &mut Output) -> io::Result<()> {
        output.object(&object(file, replayed))?;
        let report = &replayed.report;
        let name = output::printable(&file.file_name().unwrap_or(file.as_os_str()).to_string_lossy());
        self.rows += 1;
        self.table.add_row([
            name.clone(),
            size::format(report.peak_live_bytes),
            size::format(report.peak_reserved_bytes),
            overhead(report),
            recorded(&report.fidelity),
            report.driver_calls.to_string(),
            format!("{:.3} s", report.driver_seconds_modelled),
            report.steady.as_ref().map_or_else(|| "-".to_owned(), steady),
            self.outcome(report),
            if self.is_driver_pool { "lower bound" } else { fidelity(&report.fidelity) }.to_owned(),
        ]);
        self.remarks.extend(self.comparison(report).map(|remark| format!("{name}: {remark}")));
        self.remarks.extend(remarks(report).into_iter().map(|remark| format!("{name}: {remark}")));
        Ok(())
    }

    /// Writes the table, the remarks and the legend.
    pub fn finish(self, output: &mut Output) -> io::Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        let what = if self.what_if.is_empty() { "as recorded".to_owned() } else { self.what_if };
        output.table(&format!("Replayed {what}"), &self.table)?;
        let has_remarks = !self.remarks.is_empty();
        for remark in self.remarks {
            output.line(remark)?;
        }
        if has_remarks {
            output.line("")?;
        }
        output.line(LEGEND)
    }

    fn outcome(&self, report: &ReplayReport) -> String {
        match &report.outcome {
            Outcome::Completed => "completed".to_owned(),
            Outcome::OutOfMemory { event, .. } => {
                let as_recorded = if self.what_if.is_empty() && report.fidelity.exact { ", as recorded" } else { "" };
                format!("out of memory at event {event}{as_recorded}")
            }
        }
    }

    /// The result of a what-if replay compared with the recording, in a sentence.
    fn comparison(&self, report: &ReplayReport) -> Option<String> {
        let (now, before) = (report.peak_reserved_bytes, report.fidelity.recorded_peak_reserved_bytes);
        if self.what_if.is_empty() || !report.fidelity.checked || before == 0 {
            return None;
        }
        if let Outcome::OutOfMemory { event, report } = &report.outcome {
            let bytes = size::format(report.bytes_requested);
            return Some(format!("does not fit: out of memory for a request of {bytes} at event {event}"));
        }
        #[expect(clippy::cast_precision_loss, reason = "a percentage")]
        let change = 100.0 * (now as f64 / before as f64 - 1.0);
        let (now, before) = (size::format(now), size::format(before));
        Some(match change {
            _ if change.abs() < 0.05 => format!("reserves {now} at its peak, as recorded"),
            _ if change < 0.0 => format!("reserves {now} at its peak instead of {before}, {:.1}% less", -change),
            _ => format!("reserves {now} at its peak instead of {before}, {change:.1}% more"),
        })
    }
}

const LEGEND: &str = "\
live         peak of the bytes that the program had allocated
reserved     peak of the bytes that the allocator held from the driver
overhead     reserved minus live: fragmentation, rounding and cached blocks
recorded     peak of the reserved bytes in the recording
driver time  modelled time of the driver calls on an H200
steady       what driver calls take of the second half of the recorded time, and of that remapping: mapping memory
             that was mapped before, not growth
fidelity     exact: with the recorded settings, every address and every segment is as recorded";

/// The part of the reserved memory that was not live.
fn overhead(report: &ReplayReport) -> String {
    if report.peak_reserved_bytes == 0 {
        return "-".to_owned();
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let fraction = 1.0 - report.peak_live_bytes as f64 / report.peak_reserved_bytes as f64;
    let bytes = report.peak_reserved_bytes.saturating_sub(report.peak_live_bytes);
    format!("{} ({:.1}%)", size::format(bytes), 100.0 * fraction.max(0.0))
}

/// The share of the second half that driver calls take.
fn steady(steady: &Steady) -> String {
    let percent = |seconds: f64| 100.0 * seconds / steady.recorded_seconds;
    let all = percent(steady.driver_seconds_modelled);
    match steady.bytes_remapped {
        0 => format!("{all:.2}%"),
        _ => format!("{all:.2}% (remapping {:.2}%)", percent(steady.remap_seconds_modelled)),
    }
}

fn recorded(fidelity: &Fidelity) -> String {
    if fidelity.checked { size::format(fidelity.recorded_peak_reserved_bytes) } else { "-".to_owned() }
}

fn fidelity(fidelity: &Fidelity) -> &'static str {
    match (fidelity.checked, fidelity.exact) {
        (false, _) => "not checked",
        (true, true) => "exact",
        (true, false) => "NOT exact",
    }
}

/// Warnings, differences from the recording, and what was inferred.
fn remarks(report: &ReplayReport) -> Vec<String> {
    let mut remarks: Vec<String> = report.warnings.iter().map(|warning| format!("warning: {warning}")).collect();
    let Fidelity { checked, exact, addresses_equal, addresses_total, first_difference, .. } = &report.fidelity;
    if *checked && !exact {
        let first = first_difference.as_ref().map_or_else(String::new, |first| format!("; first difference: {first}"));
        remarks.push(format!("{addresses_equal} of {addresses_total} addresses are as recorded{first}"));
    }
    if let Outcome::OutOfMemory { report: oom, .. } = &report.outcome {
        remarks.push(oom.to_string());
    }
    if report.retries > 0 {
        let times = if report.retries == 1 { "once".to_owned() } else { format!("{} times", report.retries) };
        remarks.push(format!("the whole cache was returned to the driver {times} to make room"));
    }
    let inferred = &report.inferred;
    let Inferences { pools_inferred, segments_inferred, bytes_unknown_origin, .. } = inferred;
    if let Some(limit) = inferred.memory_limit {
        let (least, below) = (size::format(limit.at_least), size::format(limit.below));
        remarks.push(format!(
            "recorded with a memory limit of at least {least} and below {below}; replayed with {}",
            size::format(limit.used)
        ));
    }
    if *pools_inferred > 0 || *segments_inferred > 0 {
        let pools = format!("{pools_inferred} private pools that the recording does not name");
        remarks.push(format!("{pools}, and the pool of {segments_inferred} segments, were inferred"));
    }
    if *bytes_unknown_origin > 0 {
        let bytes = size::format(*bytes_unknown_origin);
        remarks.push(format!("{bytes} were allocated before the history starts, by unknown code"));
    }
    remarks.extend(inferred.remarks.iter().cloned());
    remarks
}

fn object(file: &Path, replayed: &Replayed) -> Value {
    let Replayed { report, input_seconds, parse_seconds, bytes_decompressed } = replayed;
    let Fidelity { checked, exact, addresses_equal, addresses_total, .. } = &report.fidelity;
    let inferred = &report.inferred;
    json!({
        "file": file.to_string_lossy(),
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
            Outcome::OutOfMemory { event, report } => json!({ "event": event, "message": report.to_string() }),
        },
        "inferred": {
            "cap_bytes": inferred.memory_limit.map(|limit| limit.used),
            "free_block_order": inferred.free_block_order.name(),
            "pools_recorded": inferred.pools_recorded.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "pools_inferred": inferred.pools_inferred,
            "segments_inferred": inferred.segments_inferred,
            "segments_assumed": inferred.segments_assumed,
            "bytes_unknown_origin": inferred.bytes_unknown_origin,
            "bytes_reserved_at_start": inferred.bytes_reserved_at_start,
            "notes": inferred.remarks,
        },
        "warnings": report.warnings,
    })
}
