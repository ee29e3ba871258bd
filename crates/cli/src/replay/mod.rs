//! `warpool replay`: replays recordings on the simulated GPU.
//! Files are replayed in parallel and reported in the order of the arguments; `report.rs` formats the results.

mod report;
mod rounds;

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use warpool::memory::Settings;
use warpool::memory::settings::{Backend, Lint, SettingsError, lint};
use warpool_report::replay::{Reading, SegmentTotals, segment_totals};
use warpool_trace::RecordingFormat;
use warpool_trace::replay::{
    ADDRESS_ORDERS, AllocatorChoice, ReplayError, ReplayOptions, ReplayReport, replay_devices,
};

use crate::capacity::CapacityArgs;
use crate::files::short_names;
use crate::inputs::{self, in_parallel, replay_error, show_progress, threads_each};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::size;

/// Replays recorded programs with the real allocators on a simulated GPU
///
/// A recording is a PyTorch memory snapshot with history (torch.cuda.memory._record_memory_history, then
/// _dump_snapshot), plain or compressed, or an RMM log. It is first replayed with the settings that it was recorded
/// with, and every address and every segment is compared: this shows whether the model is exact for this program. With
/// --settings, --set, --allocator, --capacity or --gpu it is then replayed with those.
///
/// A what-if gets the recorded addresses as long as it requests the recorded segments. If it needs other segments,
/// their addresses are not known, and PyTorch chooses between free blocks of one size by address. It is then replayed
/// in several address orders, and the answer is the range, "fits in 16 of 16 address orders, by at least 212 MiB". The
/// control is the recorded program in the same orders.
///
/// With --rounds the program is run several times on one device, in one address order, and everything is freed in
/// between. So a recording of some steps shows whether fragmentation grows in a longer run.
///
/// A memory limit that the program ran under (a fraction set by a call) is inferred and stays in force, unless a
/// what-if names `per_process_memory_fraction` or `memory_cap_mb`, or another device with --capacity or --gpu. If the
/// device was full, the limit is the memory that it had for the program: reserved plus free when a request failed.
///
/// A recording does not contain the size of the device. It is inferred from an out-of-memory event, if the reserved
/// plus free memory matches a card; otherwise it is unknown, and the simulated device is large enough for the
/// recording.
///
/// Driver calls take the time measured on an H200. "steady" is the second half of the recorded time, when a program has
/// reached its steady state. It has the share of this time that driver calls take, and the share of remapping: mapping
/// physical memory that was mapped before. New mappings are not remapping. JSON has these figures as "steady", and the
/// whole recorded time as "recorded_seconds"; both are null if the recording has no time stamps, and "steady" for RMM
/// logs.
/// "driver_seconds_modelled" is the time of all driver calls.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 success, 1 a replay ran out of memory in some address order and --expect-fit was \
    given, 2 a file cannot be read or needs more than --memory-limit.\n\
    Settings in the environment are ignored: a replay uses the recorded settings, or those of --settings.\n\n\
    Examples:\n  \
    warpool replay snapshot.pickle\n  \
    warpool replay snapshot.pickle --set garbage_collection_threshold:0.8\n  \
    xz -dc snapshot.pickle.xz | warpool replay -\n  \
    warpool replay snapshot.pickle.xz --settings expandable_segments:True --gpu rtx4090 --expect-fit\n  \
    warpool replay snapshot.pickle --capacity 23.6GiB\n  \
    warpool replay snapshot.pickle --allocator paged --rounds 100\n  \
    warpool replay *.pickle --json"
)]
pub struct Args {
    /// Recordings; the format is detected from the content. `-` is the standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Settings to use instead of the recorded ones, in the format of PYTORCH_CUDA_ALLOC_CONF
    #[arg(long, value_name = "STRING")]
    settings: Option<String>,
    /// Changes one setting and keeps the others, for example max_split_size_mb:200; may be repeated
    #[arg(long, value_name = "KEY:VALUE")]
    set: Vec<String>,
    /// The allocator: caching (PyTorch's), driver-pool (the driver's own) or paged (Warpool's own)
    #[arg(long, value_name = "NAME", default_value = "caching", value_parser = parse_allocator)]
    allocator: AllocatorChoice,
    #[command(flatten)]
    capacity: CapacityArgs,
    /// The most memory of this machine that reading and replaying a file may take, for example 16GiB; beyond it, an
    /// error [default: 256MiB and 32 bytes for each byte of the recording, decompressed, but at most 4GiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory_limit: Option<u64>,
    /// In how many address orders a what-if is replayed, where addresses can matter
    #[arg(long, value_name = "COUNT", default_value_t = ADDRESS_ORDERS, value_parser = order_count())]
    orders: u32,
    /// Runs the program this number of times, one after another on the same device, and shows what it reserves in each
    /// round, and so whether memory grows in a longer run
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = round_count())]
    rounds: u32,
    /// Exit with 1 if a replay runs out of memory, in any address order or any round
    #[arg(long)]
    expect_fit: bool,
    /// Explains the columns of the table
    #[arg(long)]
    legend: bool,
    /// One JSON object per file and device
    #[arg(long)]
    pub json: bool,
}

fn order_count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=1000)
}

fn round_count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=100_000)
}

fn parse_allocator(name: &str) -> std::result::Result<AllocatorChoice, String> {
    let names = || AllocatorChoice::ALL.map(AllocatorChoice::name).join(", ");
    let found = AllocatorChoice::ALL.into_iter().find(|choice| choice.name() == name);
    found.ok_or_else(|| format!("unknown allocator; choose one of {}", names()))
}

/// The result for one file.
struct Replayed {
    content: Content,
    reading: Reading,
}

/// The content of a file.
enum Content {
    /// A report for each device.
    Reports(Vec<ReplayReport>),
    /// Segments without a history.
    SegmentsOnly(Vec<SegmentTotals>),
}

pub fn run(args: &Args, quiet: bool, output: &mut Output) -> Result<Verdict> {
    // Before any file is read, since that can take a minute.
    let settings = parse_settings(args)?;
    let names = short_names(&args.files);
    let mut table = report::ReplayTable::new(args);
    let mut unreadable = Vec::new();
    let mut fits = true;
    let work = |file: &Path, bar: &ProgressBar| replay_file(file, args, settings.as_ref(), bar);
    in_parallel(&args.files, quiet, work, |index, result| {
        match result {
            Ok(replayed) => {
                let reports = match &replayed.content {
                    Content::Reports(reports) => reports.as_slice(),
                    Content::SegmentsOnly(_) => &[],
                };
                fits &= reports.iter().all(|report| report.ooms == 0 && report.orders.all_fit());
                fits &= reports.iter().flat_map(|report| &report.rounds).all(|round| round.ooms == 0);
                table.add(&args.files[index], &names[index], &replayed, output)?;
            }
            Err(error) => unreadable.push(output::printable(&error)),
        }
        Ok(())
    })?;
    table.finish(quiet, output)?;
    if !unreadable.is_empty() {
        return Err(CommandError::Usage(unreadable.join("\nwarpool: ")));
    }
    Ok(if args.expect_fit && !fits { Verdict::Failure } else { Verdict::Success })
}

/// The settings of `--settings`. Those of `--set` are only checked here: they are applied to the recorded ones.
fn parse_settings(args: &Args) -> Result<Option<Settings>> {
    for entry in &args.set {
        let settings = parse_strictly("--set", entry)?;
        check_backend("--set", &settings, args.allocator)?;
    }
    let Some(string) = args.settings.as_deref() else { return Ok(None) };
    let settings = parse_strictly("--settings", string)?;
    check_backend("--settings", &settings, args.allocator)?;
    Ok(Some(settings))
}

/// The settings of a string. Warnings are part of the report, which depends on the settings in force.
fn parse_strictly(option: &str, string: &str) -> Result<Settings> {
    let Lint { problems, effective, .. } = lint(string);
    effective.ok_or_else(|| CommandError::Usage(format!("{option}: {}", SettingsError { problems })))
}

fn check_backend(option: &str, settings: &Settings, allocator: AllocatorChoice) -> Result<()> {
    let other = match settings.backend {
        Backend::Native => return Ok(()),
        Backend::Paged => AllocatorChoice::Paged,
        Backend::CudaMallocAsync => AllocatorChoice::DriverPool,
    };
    if allocator == other {
        return Ok(());
    }
    let (backend, other) = (settings.backend.name(), other.name());
    let message = format!("{option}: `backend:{backend}` is another allocator: choose it with --allocator {other}");
    Err(CommandError::Usage(message))
}

fn replay_file(
    file: &Path,
    args: &Args,
    settings: Option<&Settings>,
    bar: &ProgressBar,
) -> std::result::Result<Replayed, String> {
    let opened = inputs::open(file, false, args.memory_limit, bar)?;
    inputs::begin(bar, "replaying");
    let options = ReplayOptions {
        settings: settings.cloned(),
        changes: (!args.set.is_empty()).then(|| args.set.join(",")),
        allocator: args.allocator,
        capacity: args.capacity.bytes(),
        address_orders: Some(args.orders),
        rounds: args.rounds,
        without_control: false,
        threads: Some(threads_each(args.files.len())),
        memory_limit: Some(opened.memory_limit),
        progress: Some(&|progress| show_progress(bar, progress)),
        ..ReplayOptions::default()
    };
    let snapshot = &opened.recording.snapshot;
    let format = opened.recording.format;
    let content = match replay_devices(snapshot, &options) {
        // The time of an RMM log says nothing about PyTorch's allocator, whose driver calls the program did not make.
        Ok(reports) if format == RecordingFormat::RmmLog => {
            Content::Reports(reports.into_iter().map(|report| ReplayReport { steady: None, ..report }).collect())
        }
        Ok(reports) => Content::Reports(reports),
        // Nothing can be replayed, but the segments can be reported.
        Err(ReplayError::NoHistory) if !snapshot.segments.is_empty() && !args.asks_what_if() => {
            Content::SegmentsOnly(segment_totals(snapshot))
        }
        Err(error) => return Err(replay_error(file, &error)),
    };
    let bytes_decompressed = opened.recording.bytes_decompressed;
    let inputs::Opened { input_seconds, parse_seconds, .. } = opened;
    Ok(Replayed { content, reading: Reading { input_seconds, parse_seconds, bytes_decompressed, format } })
}

impl Args {
    /// Whether the answer needs a history.
    fn asks_what_if(&self) -> bool {
        let asks_settings = self.settings.is_some() || !self.set.is_empty();
        asks_settings
            || self.rounds > 1
            || self.capacity.bytes().is_some()
            || self.expect_fit
            || self.allocator != AllocatorChoice::default()
    }
}
