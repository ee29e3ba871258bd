//! Many recordings of one job: `explain` of many, `summarize`, `merge`, and the heat map of `view`. Recordings are
//! summarized on all cores within bounded memory; the report over the summaries comes from `warpool-report`.

mod merge;
mod summarize;

pub use merge::Args as MergeArgs;
pub use merge::run as merge;
pub use summarize::Args as SummarizeArgs;
pub use summarize::run as summarize;

use std::io;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use warpool_report::ranks::{headline, object, sentences, tables};
use warpool_trace::explain::ExplainOptions;
use warpool_trace::ranks::{MemoryGate, Ranks, Summary, summarize as summaries_of};
use warpool_trace::replay::ReplayError;
use warpool_trace::{ReadError, ReadOptions, Recording, RecordingFormat, default_memory_limit};

use crate::files::read_recording;
use crate::inputs::{begin, cores, in_parallel_on, show_progress, show_reading};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::size;

/// The memory of each job where nothing is said.
const BYTES_EACH: u64 = 1 << 30;

/// How many recordings are read at once, and in how much memory.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct JobArgs {
    /// With many recordings: how many are read at once [default: one for each core]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=4096))]
    jobs: Option<u32>,
    /// With many recordings: the memory for all that are read at once; one that needs more than its share is read alone
    /// [default: 1 GiB for each job]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
}

impl JobArgs {
    /// How many of `files` are read at once.
    pub fn jobs(self, files: usize) -> usize {
        self.jobs.map_or_else(cores, |jobs| jobs as usize).min(files).max(1)
    }

    /// The memory for them.
    pub fn gate(self, files: usize) -> MemoryGate {
        let jobs = self.jobs(files);
        MemoryGate::new(self.memory.unwrap_or(BYTES_EACH * jobs as u64), jobs)
    }
}

/// Why a recording has no summary.
pub struct Unread {
    message: String,
    needs_more: bool,
}

impl Unread {
    /// The sentence, without the file's name.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether it needs more memory than it may take.
    pub fn needs_more(&self) -> bool {
        self.needs_more
    }

    fn new(message: String) -> Self {
        Self { message, needs_more: false }
    }

    fn limit(limit: u64) -> Self {
        let message = format!("it needs more than {} of memory; raise --memory if you trust it", size::format(limit));
        Self { message, needs_more: true }
    }
}

/// Reads a recording within some memory.
pub fn read(file: &Path, stacks: bool, memory_limit: u64, bar: &ProgressBar) -> std::result::Result<Recording, Unread> {
    begin(bar, "reading");
    let reading = |progress| show_reading(bar, progress);
    let options = ReadOptions { stacks, progress: Some(&reading), memory_limit: Some(memory_limit) };
    read_recording(file, &options).map_err(|error| match error {
        ReadError::Open { source, .. } => Unread::new(format!("it cannot be opened: {source}")),
        ReadError::MemoryLimit { limit, .. } => Unread::limit(limit),
        error => Unread::new(error.to_string()),
    })
}

/// What is left for a replay of a recording that was read, within the same memory.
pub fn replay_limit(recording: &Recording, memory_limit: u64) -> u64 {
    default_memory_limit(recording.bytes_needed).min(memory_limit)
}

/// Why it cannot be replayed.
pub fn replay_error(error: &ReplayError) -> Unread {
    match error {
        ReplayError::MemoryLimit { limit } => Unread::limit(*limit),
        error => Unread::new(error.to_string()),
    }
}

/// The summaries of all files. One that cannot be read has a summary that says so.
pub fn summaries(
    files: &[PathBuf],
    args: JobArgs,
    memory_limit: Option<u64>,
    explain: &ExplainOptions<'_>,
    quiet: bool,
) -> Result<Vec<Summary>> {
    // Callbacks of the caller are for one thread; each file has its own.
    let explain = Shared { capacity: explain.capacity, at: explain.at, frameworks: explain.frameworks.clone() };
    let gate = args.gate(files.len());
    let work = |file: &Path, bar: &ProgressBar| {
        let one = |limit: u64| summarize_file(file, &explain, limit, bar);
        let found = match memory_limit {
            Some(limit) => one(limit),
            None => gate.within(one, Unread::needs_more),
        };
        found.map_err(|error| error.message)
    };
    let mut found = Vec::new();
    in_parallel_on(args.jobs(files.len()), files, quiet, work, |index, result| {
        let name = files[index].to_string_lossy();
        match result {
            Ok(summaries) => found.extend(summaries),
            Err(error) => found.push(Summary::unreadable(&name, error)),
        }
        Ok(())
    })?;
    Ok(found)
}

/// The options that all files share.
struct Shared {
    capacity: Option<u64>,
    at: warpool_trace::explain::MomentChoice,
    frameworks: warpool_trace::explain::Frameworks,
}

fn summarize_file(
    file: &Path,
    shared: &Shared,
    memory_limit: u64,
    bar: &ProgressBar,
) -> std::result::Result<Vec<Summary>, Unread> {
    let recording = read(file, true, memory_limit, bar)?;
    begin(bar, "replaying");
    let options = ExplainOptions {
        capacity: shared.capacity,
        at: shared.at,
        frameworks: shared.frameworks.clone(),
        not_of_pytorch: recording.format == RecordingFormat::RmmLog,
        threads: Some(1),
        memory_limit: Some(replay_limit(&recording, memory_limit)),
        progress: Some(&|progress| show_progress(bar, progress)),
        ..ExplainOptions::default()
    };
    summaries_of(&recording.snapshot, &file.to_string_lossy(), &options).map_err(|error| replay_error(&error))
}

/// Writes the report: text, or one JSON object.
pub fn write(ranks: &Ranks, rows: usize, output: &mut Output) -> io::Result<()> {
    output.object(&object(ranks))?;
    output.heading(&headline(ranks))?;
    for sentence in sentences(ranks) {
        output.paragraph(&sentence)?;
    }
    output.line("")?;
    for table in tables(ranks, rows) {
        output.texts(&table)?;
    }
    output.paragraph("`warpool explain FILE` tells more of one, `warpool diff A B` compares two.")
}

/// The exit status of a report: recordings that cannot be read are named on stderr.
pub fn verdict(ranks: &Ranks) -> Result<Verdict> {
    let message = |(row, error): (&warpool_trace::ranks::RankRow, &str)| {
        output::printable(&format!("{}: {error}", row.summary.file))
    };
    let unreadable: Vec<String> = ranks.unreadable().map(message).collect();
    match unreadable.is_empty() {
        true => Ok(Verdict::Success),
        false => Err(CommandError::Usage(unreadable.join("\nwarpool: "))),
    }
}
