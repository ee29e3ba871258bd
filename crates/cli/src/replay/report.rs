//! The report of replays: a table with remarks and a legend for people, one JSON object per file for programs.

use std::io;
use std::path::Path;

use comfy_table::Table;
use warpool_report::replay::{SegmentTotals, advice, object, segments_object};
use warpool_trace::RecordingFormat;
use warpool_trace::cards::DeviceOrigin;
use warpool_trace::replay::{
    AddressOrders, AllocatorChoice, Fidelity, InForce, Inferences, LimitOrigin, Outcome, ReplayReport, Steady,
};

use super::rounds::RoundTable;
use super::{Args, Content, Replayed};
use crate::output::{self, Output};
use crate::size;

/// The table of all files, filled one by one.
pub struct ReplayTable {
    table: Table,
    /// Lines below the table.
    remarks: Vec<String>,
    rows: usize,
    rounds: RoundTable,
    /// What differs from the recording (settings, allocator, capacity); empty if nothing.
    what_if: String,
    legend: bool,
}

impl ReplayTable {
    pub fn new(args: &Args) -> Self {
        let mut what_if = Vec::new();
        what_if.extend(args.settings.as_ref().map(|settings| format!("with settings {settings:?}")));
        if !args.set.is_empty() {
            what_if.push(format!("with {} changed", args.set.join(",")));
        }
        if args.allocator.name() != "caching" {
            what_if.push(format!("with the {} allocator", args.allocator.name()));
        }
        what_if.extend(args.capacity.in_words().map(|device| format!("on a device of {device}")));
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
        let what_if = what_if.join(", ");
        Self {
            table: output::table(&columns),
            remarks: Vec::new(),
            rows: 0,
            rounds: RoundTable::default(),
            what_if,
            legend: args.legend,
        }
    }

    /// Adds a file: its JSON objects are written at once, its rows are kept for [`finish`](Self::finish).
    pub fn add(&mut self, file: &Path, name: &str, replayed: &Replayed, output: &mut Output) -> io::Result<()> {
        match &replayed.content {
            Content::Reports(reports) => {
                for report in reports {
                    let name =
                        if reports.len() == 1 { name.to_owned() } else { format!("{name} GPU {}", report.device) };
                    output.object(&object(file, &replayed.reading, report))?;
                    self.add_report(&name, report, replayed.reading.format);
                }
            }
            Content::SegmentsOnly(devices) => {
                for totals in devices {
                    let name =
                        if devices.len() == 1 { name.to_owned() } else { format!("{name} GPU {}", totals.device) };
                    output.object(&segments_object(file, totals))?;
                    self.add_totals(&name, totals);
                }
            }
        }
        Ok(())
    }

    fn add_report(&mut self, name: &str, report: &ReplayReport, format: RecordingFormat) {
        self.rows += 1;
        let is_driver_pool = report.in_force.allocator == AllocatorChoice::DriverPool;
        self.table.add_row([
            name.to_owned(),
            size::format(report.peak_live_bytes),
            reserved(&report.orders),
            overhead(report),
            recorded(&report.fidelity),
            report.driver_calls.to_string(),
            format!("{:.3} s", report.driver_seconds_modelled),
            report.steady.as_ref().map_or_else(|| "-".to_owned(), steady),
            self.outcome(report),
            if is_driver_pool { "lower bound" } else { fidelity(&report.fidelity) }.to_owned(),
        ]);
        self.rounds.add(name, &report.rounds);
        let asks = !self.what_if.is_empty();
        if format == RecordingFormat::RmmLog {
            self.remarks.push(format!("{name}: {RMM_REMARK}"));
        }
        let answers = if asks { answers(report, format) } else { Vec::new() };
        self.remarks.extend(answers.into_iter().map(|remark| format!("{name}: {remark}")));
        self.remarks.extend(remarks(report, asks, format).into_iter().map(|remark| format!("{name}: {remark}")));
    }

    fn add_totals(&mut self, name: &str, totals: &SegmentTotals) {
        self.rows += 1;
        let (live, reserved) = (totals.bytes_allocated, totals.bytes_reserved);
        let none = || "-".to_owned();
        self.table.add_row([
            name.to_owned(),
            size::format(live),
            size::format(reserved),
            share(reserved.saturating_sub(live), reserved),
            none(),
            none(),
            none(),
            none(),
            "no history".to_owned(),
            "not checked".to_owned(),
        ]);
        let pending = match totals.bytes_pending {
            0 => String::new(),
            bytes => format!(", {} of it freed and waiting for streams", size::format(bytes)),
        };
        self.remarks.push(format!(
            "{name}: the snapshot has no history, so nothing can be replayed; when it was taken, {} were reserved in \
             {} segments{pending}. For a history, call torch.cuda.memory._record_memory_history() before the program \
             runs",
            size::format(reserved),
            totals.segments,
        ));
    }

    /// Writes the table, the remarks and, if asked for, the legend.
    pub fn finish(self, quiet: bool, output: &mut Output) -> io::Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        let what = if self.what_if.is_empty() { "as recorded".to_owned() } else { self.what_if };
        output.table(&format!("Replayed {what}"), &self.table)?;
        self.rounds.finish(output)?;
        if !quiet {
            for remark in &self.remarks {
                output.remark(remark, 2)?;
            }
        }
        match (self.legend, quiet) {
            (true, _) => {
                output.line("")?;
                LEGEND.lines().try_for_each(|line| output.remark(line, LEGEND_INDENT))
            }
            (false, false) => output.line("\n--legend explains the columns"),
            (false, true) => Ok(()),
        }
    }

    fn outcome(&self, report: &ReplayReport) -> String {
        let AddressOrders { run, fit, .. } = report.orders;
        match &report.outcome {
            Outcome::Completed if run > 1 => format!("fits in {fit} of {run} orders"),
            Outcome::Completed => "completed".to_owned(),
            Outcome::OutOfMemory { .. } if run > 1 => format!("fits in {fit} of {run} orders"),
            Outcome::OutOfMemory { event, .. } => {
                let recorded = self.what_if.is_empty() && report.fidelity.exact;
                format!("out of memory at event {event}{}", if recorded { ", as recorded" } else { "" })
            }
        }
    }
}

/// The answer to a what-if, in sentences: whether it fits, and what was in force.
fn answers(report: &ReplayReport, format: RecordingFormat) -> Vec<String> {
    let mut answers = vec![verdict(report)];
    answers.extend(
        report
            .control
            .as_ref()
            .map(|control| format!("control: the recorded program, in the same address orders, {}", range(control))),
    );
    answers.push(in_force(&report.in_force, format));
    answers
}

/// Whether it fits, by how much, and how that compares with the recording.
fn verdict(report: &ReplayReport) -> String {
    let AddressOrders { run, fit, margin_bytes_least, .. } = report.orders;
    let margin = margin_bytes_least.map_or_else(String::new, |bytes| format!(", by at least {}", size::format(bytes)));
    let orders = |run: u32| if run == 1 { "with the recorded addresses" } else { "address orders" };
    let fitting = match (fit, run) {
        (1, 1) => format!("fits{}", margin.replace("at least ", "")),
        (0, 1) => "does not fit".to_owned(),
        (0, run) => format!("does not fit in any of {run} {}", orders(run)),
        (fit, run) if fit == run => format!("fits in {fit} of {run} {}{margin}", orders(run)),
        (fit, run) => format!("fits in {fit} of {run} {}: too close to call", orders(run)),
    };
    let peak = range_of_peaks(&report.orders);
    let recorded = report.fidelity.recorded_peak_reserved_bytes;
    let failed = match &report.outcome {
        Outcome::OutOfMemory { event, report: oom } => {
            format!("; out of memory at event {event} for {}", request(oom.bytes_requested, oom.bytes_segment))
        }
        Outcome::Completed => String::new(),
    };
    if !report.fidelity.checked || recorded == 0 {
        return format!("{fitting}: reserves {peak} at its peak{failed}");
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let change = 100.0 * (report.peak_reserved_bytes as f64 / recorded as f64 - 1.0);
    let compared = match change {
        _ if change.abs() < 0.05 => ", as recorded".to_owned(),
        _ if change < 0.0 => format!(" instead of {}, {:.1}% less", size::format(recorded), -change),
        _ => format!(" instead of {}, {change:.1}% more", size::format(recorded)),
    };
    let compared = if failed.is_empty() { compared } else { String::new() };
    format!("{fitting}: reserves {peak} at its peak{compared}{failed}")
}

/// The requested bytes, and those requested from the driver where that is more.
fn request(asked: u64, segment: u64) -> String {
    match segment > asked {
        true => format!("a request of {} (a segment of {})", size::format(asked), size::format(segment)),
        false => format!("a request of {}", size::format(asked)),
    }
}

/// The result over several orders, as the end of a sentence.
fn range(orders: &AddressOrders) -> String {
    let AddressOrders { run, fit, .. } = *orders;
    let fits = if fit == run { "fits in all".to_owned() } else { format!("fits in {fit} of {run}") };
    format!("{fits} and reserves {}", range_of_peaks(orders))
}

fn range_of_peaks(orders: &AddressOrders) -> String {
    let (least, most) = (size::format(orders.peak_reserved_bytes_least), size::format(orders.peak_reserved_bytes_most));
    // 6 GiB and a little less than that are both shown as six.
    if least.replace(".0 ", " ") == most.replace(".0 ", " ") { most } else { format!("{least} to {most}") }
}

/// The conditions of the run, and how they differ from the recorded ones.
fn in_force(in_force: &InForce, format: RecordingFormat) -> String {
    let named = |settings: &str| match settings {
        "" => "the defaults".to_owned(),
        settings => settings.to_owned(),
    };
    let mut parts = vec![match in_force.changes.is_empty() {
        true if format == RecordingFormat::RmmLog => "PyTorch's default settings".to_owned(),
        true => format!("settings {}, as recorded", named(&in_force.settings)),
        false => {
            let change = in_force.changes.iter().map(|change| format!("{} was {}", change.key, change.recorded));
            format!("settings {} ({})", named(&in_force.settings), change.collect::<Vec<_>>().join(", "))
        }
    }];
    if in_force.allocator != in_force.allocator_recorded {
        parts.push(format!(
            "allocator {} instead of {}",
            in_force.allocator.name(),
            in_force.allocator_recorded.name()
        ));
    }
    parts.push(device(in_force));
    if let Some(limit) = in_force.memory_limit {
        let limit = size::format(limit);
        parts.push(match in_force.limit_origin {
            LimitOrigin::RecordedDeviceFull => format!("of which the recorded program had {limit}"),
            LimitOrigin::Recorded => format!("the recorded memory limit of {limit}"),
            LimitOrigin::Settings | LimitOrigin::None => format!("a memory limit of {limit}"),
        });
    }
    if let Some(lifted) = in_force.limit_lifted {
        let why = match in_force.device_origin {
            DeviceOrigin::Argument => "another device",
            DeviceOrigin::Inferred | DeviceOrigin::Unknown => "the settings",
        };
        parts.push(format!("the recorded limit of {} lifted by {why}", size::format(lifted)));
    }
    format!("in force: {}", parts.join("; "))
}

/// The device, and where its size comes from.
fn device(in_force: &InForce) -> String {
    let Some(total) = in_force.device_bytes_total else { return "a device of unknown size".to_owned() };
    let total = size::format(total);
    match (&in_force.device_name, in_force.device_origin) {
        (Some(name), DeviceOrigin::Inferred) => format!("a device of {total} (inferred: {name})"),
        (Some(name), _) => format!("a device of {total} ({name})"),
        (None, _) => format!("a device of {total}"),
    }
}

/// Where the explanations begin.
const LEGEND_INDENT: usize = 13;

const RMM_REMARK: &str = "an RMM log; replayed with PyTorch's caching allocator, since RMM's own are not modelled";

const LEGEND: &str = "\
live         peak of the bytes that the program had allocated
reserved     peak of the bytes that the allocator held from the driver; the range over address orders of a what-if
overhead     reserved minus live: fragmentation, rounding and cached blocks
recorded     peak of the reserved bytes in the recording
driver time  modelled time of the driver calls on an H200
steady       what driver calls take of the second half of the recorded time, and of that remapping
fidelity     exact: with the recorded settings, every address and every segment is as recorded";

/// The part of the reserved memory that was not live.
fn overhead(report: &ReplayReport) -> String {
    share(report.peak_reserved_bytes.saturating_sub(report.peak_live_bytes), report.peak_reserved_bytes)
}

/// Bytes, and their share of a whole.
fn share(bytes: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let fraction = bytes as f64 / whole as f64;
    format!("{} ({:.1}%)", size::format(bytes), 100.0 * fraction)
}

/// The peak of reserved bytes, or its range.
fn reserved(orders: &AddressOrders) -> String {
    range_of_peaks(orders)
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
fn remarks(report: &ReplayReport, is_what_if: bool, format: RecordingFormat) -> Vec<String> {
    let mut remarks: Vec<String> = report.warnings.iter().map(|warning| format!("warning: {warning}")).collect();
    let Fidelity { checked, exact, addresses_equal, addresses_total, first_difference, .. } = &report.fidelity;
    if *checked && !exact {
        let first = first_difference.as_ref().map_or_else(String::new, |first| format!("; first difference: {first}"));
        remarks.push(format!("{addresses_equal} of {addresses_total} addresses are as recorded{first}"));
    }
    if let Outcome::OutOfMemory { report: oom, .. } = &report.outcome {
        remarks.push(advice(&oom.to_string(), report, format));
    }
    if report.retries > 0 {
        let times = if report.retries == 1 { "once".to_owned() } else { format!("{} times", report.retries) };
        remarks.push(format!("the whole cache was returned to the driver {times} to make room"));
    }
    let inferred = &report.inferred;
    let Inferences { pools_inferred, segments_inferred, bytes_unknown_origin, .. } = inferred;
    if let Some(limit) = inferred.memory_limit {
        let (least, below) = (size::format(limit.at_least), size::format(limit.below));
        let used = if is_what_if { String::new() } else { format!("; replayed with {}", size::format(limit.used)) };
        remarks.push(match limit.device_full {
            true => format!("the recorded device was full: it had {} for the program", size::format(limit.used)),
            false => format!("recorded with a memory limit of at least {least} and below {below}{used}"),
        });
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
