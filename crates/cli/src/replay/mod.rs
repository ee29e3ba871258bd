//! `warpool replay`: recordings, replayed on the simulated GPU.
//! Files are worked on side by side; answers come in the order of the files. What an answer looks like is in `show.rs`.

mod show;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use warpool::memory::{Backend, Lint, Settings, lint};
use warpool_trace::replay::{AllocatorChoice, ReplayOptions, ReplayReport, replay};
use warpool_trace::{Progress, ReadError, ReadOptions, read_file};

use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::size;

/// Replays recorded programs with the real allocators on a simulated GPU
///
/// A recording is a memory snapshot of PyTorch with its history (torch.cuda.memory._record_memory_history, then
/// _dump_snapshot), plain or compressed, or a log of RMM. It is first replayed with the settings that it was recorded
/// with, and every address and every segment is compared: that tells whether the model can be trusted on this program.
/// With --settings, --allocator or --capacity it is then replayed the other way.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0, 1 if --expect-fit was given and a replay ran out of memory, 2 if a file cannot be read.\n\
    The environment's settings do not count here: what is replayed is what was recorded, or what --settings says.\n\n\
    Examples:\n  \
    warpool replay snapshot.pickle\n  \
    warpool replay snapshot.pickle.xz --settings expandable_segments:True --capacity 24GiB --expect-fit\n  \
    warpool replay *.pickle --json"
)]
pub struct Args {
    /// Recordings; what they are is told by their content
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Other settings than the recorded ones, as in PYTORCH_CUDA_ALLOC_CONF
    #[arg(long, value_name = "STRING")]
    settings: Option<String>,
    /// Which allocator: caching (PyTorch's) or driver-pool (the driver's own)
    #[arg(long, value_name = "NAME", default_value = "caching", value_parser = parse_allocator)]
    allocator: AllocatorChoice,
    /// The memory of the device, such as 24GiB, of which its context takes half a GiB; an H200's without it, or more
    /// where the recording held more
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    capacity: Option<u64>,
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
    found.ok_or_else(|| format!("no such allocator; there are {}", names()))
}

/// A file that was replayed.
struct Replayed {
    report: ReplayReport,
    /// Reading and decompressing the file.
    input_seconds: f64,
    /// Making events of its content.
    parse_seconds: f64,
    bytes_decompressed: u64,
}

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    // Before any file is read: a typo should not cost a minute.
    let (settings, warnings) = match args.settings.as_deref().map(|string| (string, lint(string))) {
        None => (None, Vec::new()),
        Some((_, Lint { effective: Some(settings), warnings, .. })) => (Some(settings), warnings),
        Some((string, _)) => {
            let refused =
                Settings::parse(string).map_err(|error| CommandError::Usage(format!("--settings: {error}")))?;
            (Some(refused), Vec::new())
        }
    };
    if settings.as_ref().is_some_and(|settings| settings.backend != Backend::Native)
        && args.allocator == AllocatorChoice::default()
    {
        let what = "`backend:cudaMallocAsync` is another allocator: ask for it with --allocator driver-pool";
        return Err(CommandError::Usage(format!("--settings: {what}")));
    }
    let mut answers = show::Answers::new(args);
    let mut unreadable = Vec::new();
    let mut fits = true;
    side_by_side(args, settings.as_ref(), |file, outcome| {
        match outcome {
            Ok(mut replayed) => {
                let of_settings = warnings.iter().map(|warning| format!("--settings: {warning}"));
                replayed.report.warnings.extend(of_settings);
                fits &= replayed.report.ooms == 0;
                answers.add(file, &replayed, output)?;
            }
            Err(error) => unreadable.push(output::printable(&error)),
        }
        Ok(())
    })?;
    answers.finish(output)?;
    if !unreadable.is_empty() {
        return Err(CommandError::Usage(unreadable.join("\nwarpool: ")));
    }
    Ok(if args.expect_fit && !fits { Verdict::Failure } else { Verdict::Success })
}

/// Replays all files on all cores, and tells of each in the order in which they were given.
fn side_by_side(
    args: &Args,
    settings: Option<&Settings>,
    mut tell: impl FnMut(&Path, std::result::Result<Replayed, String>) -> Result<()>,
) -> Result<()> {
    let bars = MultiProgress::new();
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(args.files.len());
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(file) = args.files.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let bar = bars.add(bar_for(file));
                    // Nothing of a replay outlives it, so nothing half done is seen; the other files get their answers.
                    let outcome = catch_unwind(AssertUnwindSafe(|| replay_file(file, args, settings, &bar)))
                        .unwrap_or_else(|_| Err(about(file, "a defect of warpool, told above; please report it")));
                    bar.finish_and_clear();
                    if send.send((file, Box::new(outcome))).is_err() {
                        return; // Nobody listens any more.
                    }
                }
            });
        }
        let receive = receive; // Gone with this closure, so that workers stop when the output is closed.
        let mut early: Vec<(&PathBuf, Box<std::result::Result<Replayed, String>>)> = Vec::new();
        for file in &args.files {
            let outcome = loop {
                if let Some(at) = early.iter().position(|(other, _)| std::ptr::eq(*other, file)) {
                    break *early.swap_remove(at).1;
                }
                early.push(receive.recv().expect("a worker answers for every file"));
            };
            bars.suspend(|| tell(file, outcome))?;
        }
        Ok(())
    })
}

fn replay_file(
    file: &Path,
    args: &Args,
    settings: Option<&Settings>,
    bar: &ProgressBar,
) -> std::result::Result<Replayed, String> {
    bar.set_message("reading");
    let reading = |progress: Progress| {
        bar.set_length(progress.bytes_total.unwrap_or(0));
        bar.set_position(progress.bytes_read);
    };
    let began = Instant::now();
    let recording = read_file(file, &ReadOptions { stacks: false, progress: Some(&reading) });
    let recording = recording.map_err(|error| match error {
        ReadError::Open { .. } => error.to_string(), // It names the file.
        _ => about(file, error),
    })?;
    let input_seconds = recording.input_time.as_secs_f64();
    let parse_seconds = began.elapsed().as_secs_f64() - input_seconds;
    bar.set_message("replaying");
    let options = ReplayOptions {
        settings: settings.cloned(),
        allocator: args.allocator,
        capacity: args.capacity,
        progress: Some(&|progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
        }),
    };
    let report = replay(&recording.snapshot, &options).map_err(|error| about(file, error))?;
    Ok(Replayed { report, input_seconds, parse_seconds, bytes_decompressed: recording.bytes_decompressed })
}

/// What is wrong, with the file.
fn about(file: &Path, wrong: impl fmt::Display) -> String {
    format!("{}: {wrong}", file.display())
}

/// A bar on stderr, shown only on a terminal.
fn bar_for(file: &Path) -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg:9} {bar:30} {percent:>3}%  {prefix}") {
        bar.set_style(style);
    }
    bar.set_prefix(output::printable(&file.display().to_string()));
    bar
}
