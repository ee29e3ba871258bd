//! `warpool replay`: replays recordings on the simulated GPU.
//! Files are replayed in parallel and reported in the order of the arguments; `report.rs` formats the results.

mod report;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use warpool::memory::{Backend, Lint, Settings, lint};
use warpool_trace::replay::{AllocatorChoice, ReplayError, ReplayOptions, ReplayReport, replay};
use warpool_trace::{Progress, ReadError, ReadOptions, default_memory_limit, read_file};

use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::size;

/// Replays recorded programs with the real allocators on a simulated GPU
///
/// A recording is a PyTorch memory snapshot with history (torch.cuda.memory._record_memory_history, then
/// _dump_snapshot), plain or compressed, or an RMM log. It is first replayed with the settings that it was recorded
/// with, and every address and every segment is compared: this tells whether the model is exact for this program.
/// With --settings, --allocator or --capacity it is then replayed with those.
///
/// Driver calls take the time that they were measured to take on an H200. "steady" is the second half of the recorded
/// time, when a program has reached its steady state: what driver calls take of it, and of that remapping, which is
/// mapping physical memory that was mapped before (growth is not remapping). JSON has these figures as "steady", and
/// the whole recorded time as "recorded_seconds"; both are null if the recording has no time stamps.
/// "driver_seconds_modelled" is the time of all driver calls.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 success, 1 a replay ran out of memory and --expect-fit was given, 2 a file cannot be \
    read or needs more than --memory-limit.\n\
    Settings in the environment are ignored: a replay uses the recorded settings, or those of --settings.\n\n\
    Examples:\n  \
    warpool replay snapshot.pickle\n  \
    warpool replay snapshot.pickle.xz --settings expandable_segments:True --capacity 24GiB --expect-fit\n  \
    warpool replay *.pickle --json"
)]
pub struct Args {
    /// Recordings; the format is detected from the content
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Settings to use instead of the recorded ones, in the format of PYTORCH_CUDA_ALLOC_CONF
    #[arg(long, value_name = "STRING")]
    settings: Option<String>,
    /// The allocator: caching (PyTorch's), driver-pool (the driver's own) or paged (Warpool's own)
    #[arg(long, value_name = "NAME", default_value = "caching", value_parser = parse_allocator)]
    allocator: AllocatorChoice,
    /// Memory of the device, for example 24GiB, of which the context takes 0.5 GiB [default: that of an H200, or more
    /// if the recording needs more]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    capacity: Option<u64>,
    /// The most memory of this machine that reading and replaying a file may take, for example 16GiB; beyond it, an
    /// error [default: 256MiB and 32 bytes for each byte of the recording, decompressed, but at most 4GiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory_limit: Option<u64>,
    /// Exit with 1 if a replay runs out of memory
    #[arg(long)]
    expect_fit: bool,
    /// One JSON object per file
    #[arg(long)]
    pub json: bool,
}

fn parse_allocator(name: &str) -> std::result::Result<AllocatorChoice, String> {
    let names = || AllocatorChoice::ALL.map(AllocatorChoice::name).join(", ");
    let found = AllocatorChoice::ALL.into_iter().find(|choice| choice.name() == name);
    found.ok_or_else(|| format!("unknown allocator; choose one of {}", names()))
}

/// The result for one file.
struct Replayed {
    report: ReplayReport,
    /// Reading and decompressing the file.
    input_seconds: f64,
    /// Parsing its content.
    parse_seconds: f64,
    bytes_decompressed: u64,
}

type FileResult = std::result::Result<Replayed, String>;

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    // Before any file is read, since that can take a minute.
    let (settings, warnings) = parse_settings(args)?;
    let mut table = report::ReplayTable::new(args);
    let mut unreadable = Vec::new();
    let mut fits = true;
    replay_in_parallel(args, settings.as_ref(), |file, result| {
        match result {
            Ok(mut replayed) => {
                replayed.report.warnings.extend(warnings.iter().cloned());
                fits &= replayed.report.ooms == 0;
                table.add(file, &replayed, output)?;
            }
            Err(error) => unreadable.push(output::printable(&error)),
        }
        Ok(())
    })?;
    table.finish(output)?;
    if !unreadable.is_empty() {
        return Err(CommandError::Usage(unreadable.join("\nwarpool: ")));
    }
    Ok(if args.expect_fit && !fits { Verdict::Failure } else { Verdict::Success })
}

/// The settings of `--settings` with their warnings.
fn parse_settings(args: &Args) -> Result<(Option<Settings>, Vec<String>)> {
    let Some(string) = args.settings.as_deref() else { return Ok((None, Vec::new())) };
    let (settings, warnings) = match lint(string) {
        Lint { effective: Some(settings), warnings, .. } => (settings, warnings),
        _ => {
            let parsed = Settings::parse(string).map_err(|error| CommandError::Usage(format!("--settings: {error}")));
            (parsed?, Vec::new())
        }
    };
    let other = match settings.backend {
        Backend::Native => None,
        Backend::Paged => Some("paged"),
        Backend::CudaMallocAsync => Some("driver-pool"),
    };
    if let Some(other) = other.filter(|_| args.allocator == AllocatorChoice::default()) {
        let backend = settings.backend.name();
        let message =
            format!("--settings: `backend:{backend}` is another allocator: choose it with --allocator {other}");
        return Err(CommandError::Usage(message));
    }
    Ok((Some(settings), warnings.iter().map(|warning| format!("--settings: {warning}")).collect()))
}

/// Replays all files on all cores, and calls `on_result` for each in the order of the arguments.
fn replay_in_parallel(
    args: &Args,
    settings: Option<&Settings>,
    mut on_result: impl FnMut(&Path, FileResult) -> Result<()>,
) -> Result<()> {
    let bars = MultiProgress::new();
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(args.files.len());
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = args.files.get(index) else { return };
                    let bar = bars.add(progress_bar(file));
                    // Unwind safe: a replay shares no state. The other files are still reported.
                    let result = catch_unwind(AssertUnwindSafe(|| replay_file(file, args, settings, &bar)))
                        .unwrap_or_else(|_| Err(with_file(file, "internal error, shown above; please report it")));
                    bar.finish_and_clear();
                    if sender.send((index, Box::new(result))).is_err() {
                        return; // The receiver stopped early.
                    }
                }
            });
        }
        let receiver = receiver; // Dropped with this closure, so that workers stop when the output is closed.
        let mut early: BTreeMap<usize, Box<FileResult>> = BTreeMap::new();
        for (index, file) in args.files.iter().enumerate() {
            let result = loop {
                if let Some(result) = early.remove(&index) {
                    break *result;
                }
                let (index, result) = receiver.recv().expect("a worker sends a result for every file");
                early.insert(index, result);
            };
            bars.suspend(|| on_result(file, result))?;
        }
        Ok(())
    })
}

fn replay_file(file: &Path, args: &Args, settings: Option<&Settings>, bar: &ProgressBar) -> FileResult {
    bar.set_message("reading");
    let reading = |progress: Progress| {
        bar.set_length(progress.bytes_total.unwrap_or(0));
        bar.set_position(progress.bytes_read);
    };
    let start = Instant::now();
    let options = ReadOptions { stacks: false, progress: Some(&reading), memory_limit: args.memory_limit };
    let recording = read_file(file, &options);
    let recording = recording.map_err(|error| match error {
        ReadError::Open { .. } => error.to_string(), // Contains the file name.
        ReadError::MemoryLimit { limit, .. } => with_file(file, memory_limit_message(limit)),
        _ => with_file(file, error),
    })?;
    let input_seconds = recording.input_time.as_secs_f64();
    let parse_seconds = start.elapsed().as_secs_f64() - input_seconds;
    bar.set_message("replaying");
    let options = ReplayOptions {
        settings: settings.cloned(),
        allocator: args.allocator,
        capacity: args.capacity,
        memory_limit: args.memory_limit.or(Some(default_memory_limit(recording.bytes_needed))),
        progress: Some(&|progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
        }),
    };
    let report = replay(&recording.snapshot, &options).map_err(|error| match error {
        ReplayError::MemoryLimit { limit } => with_file(file, memory_limit_message(limit)),
        error => with_file(file, error),
    })?;
    Ok(Replayed { report, input_seconds, parse_seconds, bytes_decompressed: recording.bytes_decompressed })
}

/// The error that a file needs more memory than allowed.
fn memory_limit_message(limit: u64) -> String {
    let limit = size::format(limit);
    format!("it needs more than {limit} of memory; if you trust the file, raise the limit with --memory-limit")
}

/// The message with the file's name in front.
fn with_file(file: &Path, message: impl fmt::Display) -> String {
    format!("{}: {message}", file.display())
}

/// A progress bar on stderr; hidden unless stderr is a terminal.
fn progress_bar(file: &Path) -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg:9} {bar:30} {percent:>3}%  {prefix}") {
        bar.set_style(style);
    }
    bar.set_prefix(output::printable(&file.display().to_string()));
    bar
}
