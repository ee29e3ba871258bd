//! Files on all cores: each is read and worked on in one thread, and the results are reported in the order of the
//! arguments. Progress is on stderr, if that is a terminal.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError, mpsc};
use std::time::Instant;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use warpool_trace::replay::{ReplayError, ReplayProgress};
use warpool_trace::{Progress, ReadError, ReadOptions, Recording, default_memory_limit};

use crate::files::read_recording;
use crate::output::{self, Result};
use crate::size;

/// A recording that was read.
pub struct Opened {
    pub recording: Recording,
    /// Reading and decompressing the file.
    pub input_seconds: f64,
    /// Parsing its content.
    pub parse_seconds: f64,
    /// The most memory that working on it may take.
    pub memory_limit: u64,
}

/// Reads a recording, with progress. The error has the file's name.
pub fn open(
    file: &Path,
    stacks: bool,
    memory_limit: Option<u64>,
    bar: &ProgressBar,
) -> std::result::Result<Opened, String> {
    begin(bar, "reading");
    let reading = |progress: Progress| show_reading(bar, progress);
    let start = Instant::now();
    let options = ReadOptions { stacks, progress: Some(&reading), memory_limit };
    let recording = read_recording(file, &options).map_err(|error| match error {
        ReadError::Open { .. } => error.to_string(), // Contains the file name.
        ReadError::MemoryLimit { limit, .. } => with_file(file, memory_limit_message(limit)),
        _ => with_file(file, error),
    })?;
    let input_seconds = recording.input_time.as_secs_f64();
    let parse_seconds = start.elapsed().as_secs_f64() - input_seconds;
    let memory_limit = memory_limit.unwrap_or_else(|| default_memory_limit(recording.bytes_needed));
    Ok(Opened { recording, input_seconds, parse_seconds, memory_limit })
}

/// Shows how much of a file is read. The size of the standard input is not known: the bar stays empty.
pub fn show_reading(bar: &ProgressBar, progress: Progress) {
    if let Some(total) = progress.bytes_total {
        show(bar, progress.bytes_read, total);
    }
}

/// The error of a replay, with the file's name.
pub fn replay_error(file: &Path, error: &ReplayError) -> String {
    match error {
        ReplayError::MemoryLimit { limit } => with_file(file, memory_limit_message(*limit)),
        error => with_file(file, error),
    }
}

/// Shows the progress of a replay.
pub fn show_progress(bar: &ProgressBar, progress: ReplayProgress) {
    show(bar, progress.done, progress.total);
}

/// Begins another kind of work, at 0 %.
pub fn begin(bar: &ProgressBar, message: &'static str) {
    show(bar, 0, 1);
    bar.set_message(message);
}

/// Both at once: a new length beside an old position could be drawn as 100 %.
fn show(bar: &ProgressBar, done: u64, total: u64) {
    bar.update(|state| {
        state.set_len(total.max(1));
        state.set_pos(done.min(total));
    });
}

/// The bars that Ctrl-C clears.
static BARS: Mutex<Option<MultiProgress>> = Mutex::new(None);

/// Bars on stderr, if that is a terminal. Ctrl-C removes them before the process ends.
pub fn progress_bars(quiet: bool) -> MultiProgress {
    static HANDLER: Once = Once::new();
    let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bars = MultiProgress::with_draw_target(target);
    if !bars.is_hidden() {
        *BARS.lock().unwrap_or_else(PoisonError::into_inner) = Some(bars.clone());
        // Without a handler the process ends too, but leaves the bars.
        HANDLER.call_once(|| drop(ctrlc::set_handler(interrupted)));
    }
    bars
}

/// The exit status after Ctrl-C, as a shell reports a process that ended with SIGINT.
pub const INTERRUPTED: i32 = 130;

/// Runs in a thread of its own, not in the signal handler.
fn interrupted() {
    if let Some(bars) = &*BARS.lock().unwrap_or_else(PoisonError::into_inner) {
        let _ = bars.clear();
        // Workers must not draw again.
        bars.set_draw_target(ProgressDrawTarget::hidden());
    }
    std::process::exit(INTERRUPTED);
}

/// Works on all files on all cores, and calls `on_result` for each in the order of the files.
pub fn in_parallel<T: Send>(
    files: &[PathBuf],
    quiet: bool,
    work: impl Fn(&Path, &ProgressBar) -> std::result::Result<T, String> + Sync,
    on_result: impl FnMut(usize, std::result::Result<T, String>) -> Result<()>,
) -> Result<()> {
    in_parallel_on(workers(files.len()), files, quiet, work, on_result)
}

/// Likewise on a number of threads.
pub fn in_parallel_on<T: Send>(
    workers: usize,
    files: &[PathBuf],
    quiet: bool,
    work: impl Fn(&Path, &ProgressBar) -> std::result::Result<T, String> + Sync,
    mut on_result: impl FnMut(usize, std::result::Result<T, String>) -> Result<()>,
) -> Result<()> {
    let bars = progress_bars(quiet);
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = files.get(index) else { return };
                    let bar = bars.add(progress_bar(file, index, files.len()));
                    // Unwind safe: files share no state. The others are still reported.
                    let result = catch_unwind(AssertUnwindSafe(|| work(file, &bar)))
                        .unwrap_or_else(|_| Err(with_file(file, "internal error, shown above; please report it")));
                    bar.finish_and_clear();
                    if sender.send((index, Box::new(result))).is_err() {
                        return; // The receiver stopped early.
                    }
                }
            });
        }
        let receiver = receiver; // Dropped with this closure, so that workers stop when the output is closed.
        let mut early: BTreeMap<usize, Box<std::result::Result<T, String>>> = BTreeMap::new();
        for index in 0..files.len() {
            let result = loop {
                if let Some(result) = early.remove(&index) {
                    break *result;
                }
                let (index, result) = receiver.recv().expect("a worker sends a result for every file");
                early.insert(index, result);
            };
            bars.suspend(|| on_result(index, result))?;
        }
        Ok(())
    })
}

/// How many threads work on `files` files.
fn workers(files: usize) -> usize {
    cores().min(files).max(1)
}

/// How many threads each file may use.
pub fn threads_each(files: usize) -> usize {
    (cores() / workers(files)).max(1)
}

/// How many cores there are.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The error that a file needs more memory than allowed.
fn memory_limit_message(limit: u64) -> String {
    let limit = size::format(limit);
    format!("it needs more than {limit} of memory; if you trust the file, raise the limit with --memory-limit")
}

/// The message with the file's name in front.
pub fn with_file(file: &Path, message: impl fmt::Display) -> String {
    format!("{}: {message}", file.display())
}

/// A progress bar; at 0 until there is something to show. With several files it says which of them it is.
fn progress_bar(file: &Path, index: usize, count: usize) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::hidden());
    if let Ok(style) = ProgressStyle::with_template("{msg:9} {bar:30} {percent:>3}%  {prefix}") {
        bar.set_style(style);
    }
    let number = if count > 1 { format!("{} of {count}: ", index + 1) } else { String::new() };
    bar.set_prefix(format!("{number}{}", output::printable(&file.display().to_string())));
    bar
}
