//! `warpool tune`: which settings serve recorded programs best; `many.rs` is about the ranks of a job.

mod many;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use warpool_report::tune::{best, margin, object, recommendation};
use warpool_trace::RecordingFormat;
use warpool_trace::replay::{DeviceReplay, DeviceReplays, ReplayOptions};
use warpool_trace::tune::{Candidate, TrialOptions, Tuned, candidates, tune};

use crate::capacity::CapacityArgs;
use crate::files::{expand, short_names};
use crate::inputs::{self, Opened, in_parallel, replay_error};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::ranks::JobArgs;
use crate::size;

/// Finds the settings that serve recorded programs best, by replays
///
/// Replays allocators and the settings that have an effect on the recordings, the recorded settings among them as a
/// control, and ranks them: those that fit first, by peak reserved bytes, then by driver time. Another allocator is
/// ranked before PyTorch's settings only if it saves 2% and 256 MiB more than these. A candidate is ranked before the
/// recorded settings only if it saves more than other address orders change. With several recordings it finds one
/// setting for all. Of more than eight, it tries candidates on one of each group of equal ranks (as `warpool explain`
/// finds them; at most eight), and replays the best on all others.
///
/// The smallest device is the whole card, with its context: `warpool replay --capacity` fits there in the same address
/// orders. It is found to within 1% or 64 MiB: on a device that is smaller by twice that, it does not fit.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 success, 1 nothing that was tried fits, 2 a file cannot be read or needs more \
    than --memory-limit.\n\n\
    Examples:\n  \
    warpool tune train.pickle\n  \
    warpool tune rank0.pickle rank1.pickle --gpu h100-80gb\n  \
    warpool tune snapshots/\n  \
    warpool tune train.pickle --json")]
pub struct Args {
    /// Recordings, or folders or patterns of them; `-` is the standard input: a recording, or a list of files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    jobs: JobArgs,
    #[command(flatten)]
    capacity: CapacityArgs,
    /// A further candidate, in the format of PYTORCH_CUDA_ALLOC_CONF; may be repeated
    #[arg(long, value_name = "STRING")]
    r#try: Vec<String>,
    /// In how many address orders a candidate is replayed, where addresses can matter
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    orders: u32,
    /// The most memory of this machine that one file may take, for example 16GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory_limit: Option<u64>,
    /// One JSON object per candidate, the best first
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, quiet: bool, output: &mut Output) -> Result<Verdict> {
    let start = Instant::now();
    let extra = parse_extra(&args.r#try)?;
    let many::Chosen { tried: files, checked: others, unreadable } = many::choose(expand(&args.files)?, args, quiet)?;
    let names = short_names(&files);
    let opened = open_all(&files, args, quiet)?;
    let mut replays = Vec::new();
    for (file, opened) in files.iter().zip(&opened) {
        let options = ReplayOptions { memory_limit: Some(opened.memory_limit), ..ReplayOptions::default() };
        let replay = DeviceReplays::new(&opened.recording.snapshot, &options);
        replays.push(replay.map_err(|error| CommandError::Usage(output::printable(&replay_error(file, &error))))?);
    }
    let devices: Vec<&DeviceReplay<'_>> = replays.iter().flat_map(DeviceReplays::devices).collect();
    let mut tried = candidates(&devices);
    tried.extend(extra);
    let bar = progress_bar(quiet, tried.len() * devices.len());
    let progress = |done: usize, _: usize| bar.set_position(done as u64);
    let options = TrialOptions {
        capacity: args.capacity.bytes(),
        address_orders: args.orders,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        progress: Some(&progress),
    };
    let tuned = tune(&devices, tried, &options);
    bar.finish_and_clear();
    let tuned = tuned.map_err(|error| CommandError::Usage(error.to_string()))?;
    let exact = devices.iter().all(|device| device.is_exact());
    let best = best(&tuned).map(|best| &best.candidate);
    let checked = match best.filter(|_| !others.is_empty()) {
        Some(best) => Some(many::check(&others, best, args, quiet)?),
        None => None,
    };
    for (rank, tuned) in tuned.iter().enumerate() {
        let mut object = object(rank, tuned, &files);
        if let Some(checked) = checked.as_ref().filter(|_| best.is_some_and(|best| best.name == tuned.candidate.name)) {
            object["checked"] = json!({ "recordings": checked.recordings, "not_on": checked.not_on });
        }
        output.object(&object)?;
    }
    let is_rmm = opened.iter().any(|opened| opened.recording.format == RecordingFormat::RmmLog);
    write(&tuned, &names, exact, is_rmm, output)?;
    if let Some(many::Checked { recordings, not_on }) = &checked {
        let on = match not_on.len() {
            0 => "it fits on all of them".to_owned(),
            count => format!("it does not fit on {count}: {}", not_on.join("; ")),
        };
        output.paragraph(&format!(
            "Tried on {} recordings, one of each group of equal ranks. The best was replayed on the other \
             {recordings}, and {on}.",
            files.len()
        ))?;
    }
    if !quiet {
        output.line(format!("{} candidates in {:.1} s", tuned.len(), start.elapsed().as_secs_f64()))?;
    }
    if !unreadable.is_empty() {
        return Err(CommandError::Usage(
            unreadable.iter().map(|it| output::printable(it)).collect::<Vec<_>>().join("\nwarpool: "),
        ));
    }
    let fits = tuned.iter().any(Tuned::fits) && checked.is_none_or(|checked| checked.not_on.is_empty());
    Ok(if fits { Verdict::Success } else { Verdict::Failure })
}

/// The candidates of `--try`.
fn parse_extra(strings: &[String]) -> Result<Vec<Candidate>> {
    let parse =
        |string: &String| Candidate::replaced(string).map_err(|error| CommandError::Usage(format!("--try: {error}")));
    strings.iter().map(parse).collect()
}

fn open_all(files: &[PathBuf], args: &Args, quiet: bool) -> Result<Vec<Opened>> {
    let (mut opened, mut unreadable) = (Vec::new(), Vec::new());
    let work = |file: &Path, bar: &ProgressBar| inputs::open(file, false, args.memory_limit, bar);
    in_parallel(files, quiet, work, |_, result| {
        match result {
            Ok(recording) => opened.push(recording),
            Err(error) => unreadable.push(output::printable(&error)),
        }
        Ok(())
    })?;
    if unreadable.is_empty() { Ok(opened) } else { Err(CommandError::Usage(unreadable.join("\nwarpool: "))) }
}

/// The table, and the line to paste.
fn write(tuned: &[Tuned], names: &[String], exact: bool, is_rmm: bool, output: &mut Output) -> io::Result<()> {
    let columns = ["settings", "fits", ">reserved", ">margin", ">driver time", ">retries", ">smallest device"];
    let mut table = output::table(&columns);
    for tuned in tuned {
        let bound = if tuned.candidate.is_lower_bound { " (lower bound)" } else { "" };
        let margin = margin(tuned).map_or_else(|| "-".to_owned(), size::format);
        let device = tuned.smallest_device.map_or_else(|| "-".to_owned(), |device| size::format_up(device.bytes));
        table.add_row([
            format!("{}{bound}", tuned.candidate.name),
            fits(tuned),
            size::format(tuned.peak_reserved_bytes()),
            margin,
            format!("{:.3} s", tuned.driver_seconds()),
            tuned.reports.iter().map(|report| report.retries).sum::<u64>().to_string(),
            device,
        ]);
    }
    let what = if names.len() == 1 { names[0].clone() } else { format!("{} recordings", names.len()) };
    output.table(&format!("Settings for {what}, the best first"), &table)?;
    if is_rmm {
        return output.paragraph(
            "An RMM log: the table shows what PyTorch's caching allocator with those settings, and Warpool's, would \
             reserve for the same requests. RMM has none of these settings, and its own allocators are not modelled.",
        );
    }
    if !exact {
        output.paragraph("The model is not proven on every recording: the figures are estimates.")?;
    }
    // The widest range of all controls.
    let controls = tuned.iter().filter_map(Tuned::control_range);
    let widest = controls.max_by_key(|(least, most)| most - least);
    let widest = widest.filter(|&(least, most)| size::format(least) != size::format(most));
    if let Some((least, most)) = widest {
        output.paragraph(&format!(
            "Control: at other addresses the recorded settings reserve {} to {}. Smaller differences mean nothing.",
            size::format(least),
            size::format(most)
        ))?;
    }
    if let Some(tolerance) = tuned.iter().filter_map(|tuned| tuned.smallest_device).map(|it| it.tolerance_bytes).max() {
        output.paragraph(&format!(
            "The smallest device is the whole card, of which a context takes 0.5 GiB; it is found by replays to within \
             {}.",
            size::format(tolerance)
        ))?;
    }
    output.paragraph(&recommendation(tuned))?;
    let Some(best) = best(tuned).filter(|best| !best.candidate.is_recorded()) else { return Ok(()) };
    output.line(how_to(&best.candidate))?;
    // The best of the other kind: with PyTorch's own allocator, or with Warpool's.
    let mut fitting = tuned.iter().filter(|tuned| tuned.fits() && !tuned.candidate.is_lower_bound);
    let other = fitting.find(|tuned| tuned.candidate.variable != best.candidate.variable);
    if let Some(Tuned { candidate, .. }) = other.filter(|other| !other.candidate.is_recorded()) {
        let whose =
            if candidate.variable == WARPOOL_CONF { "Warpool's paged allocator" } else { "PyTorch's allocator" };
        output.line(format!("Or with {whose}, {}:{}", candidate.name, how_to(candidate)))?;
    }
    Ok(())
}

const WARPOOL_CONF: &str = "WARPOOL_CONF";

/// The lines that switch a candidate on, and where they go.
fn how_to(candidate: &Candidate) -> String {
    let apply = candidate.apply();
    match apply.split_once('\n') {
        Some((install, call)) => format!("\n\n{install}\n{call}    # in the program, before CUDA is used\n"),
        None => format!("\n\n{apply}    # before the program starts (newer: PYTORCH_ALLOC_CONF)\n"),
    }
}

fn fits(tuned: &Tuned) -> String {
    let (fit, run) =
        tuned.reports.iter().fold((0, 0), |(fit, run), report| (fit + report.orders.fit, run + report.orders.run));
    match (fit, run) {
        (fit, run) if fit == run => "yes".to_owned(),
        (0, _) => "no".to_owned(),
        (fit, run) => format!("{fit} of {run} orders"),
    }
}

/// A progress bar among those that Ctrl-C removes.
fn progress_bar(quiet: bool, trials: usize) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(trials.max(1) as u64), ProgressDrawTarget::hidden());
    if let Ok(style) = ProgressStyle::with_template("replaying {bar:30} {pos} of {len}") {
        bar.set_style(style);
    }
    inputs::progress_bars(quiet).add(bar)
}
