//! `warpool explain`: why a recorded program ran out of memory. Files are explained in parallel; `text.rs` writes one
//! explanation for people; sentences, tables and JSON come from `warpool-report`.

mod text;

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use warpool_report::explain::object;
use warpool_report::moment;
use warpool_trace::RecordingFormat;
use warpool_trace::explain::{ExplainOptions, Explanation, Frameworks, MomentChoice, explain};
use warpool_trace::ranks::{Ranks, Summary, explain_and_summarize};

use crate::capacity::CapacityArgs;
use crate::files::{expand, short_names};
use crate::inputs::{self, in_parallel, replay_error, show_progress, threads_each};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::ranks::{self, JobArgs};
use crate::size;

/// From this number of explanations on, they are compared in one report instead of written one by one.
const RANKS_MIN: usize = 4;

/// Explains why a recorded program ran out of memory, and what would have fitted
///
/// The moment is the last out-of-memory event, or else the one of the most allocated memory (--at chooses another). For
/// this moment it shows what kind of memory was allocated, and who held it, by call stack, line and module; where the
/// rest was; the verdict, with its numbers; and what to do, by replays and by arithmetic. With --gpu or --capacity it
/// also says whether the program fits on that device. Record with torch.cuda.memory._record_memory_history() before the
/// model is made, and on failure call torch.cuda.memory._dump_snapshot("oom.pickle").
///
/// Requested bytes are those that the program requested, allocated bytes those of its blocks (with rounding, as
/// torch.cuda.memory_allocated() counts), reserved bytes those that the allocator has from the driver.
///
/// With four files or more (one per rank), it reports on all: which ran out of memory first, which would next, and in
/// what groups of equal ranks differ. With --json that takes --ranks.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 success, 2 a file cannot be read or needs more than --memory-limit.\n\n\
    Examples:\n  \
    warpool explain oom.pickle\n  \
    warpool explain oom.pickle --gpu h100-80gb --framework transformers\n  \
    warpool explain snapshots/ --gpu h100-80gb\n  \
    warpool explain 'job/*/rank*.pickle' --ranks --json\n  \
    find job -name '*.pickle' | warpool explain -\n  \
    warpool explain oom.pickle --json")]
pub struct Args {
    /// Recordings, or folders or patterns of them; `-` is the standard input: a recording, or a list of files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Report on all recordings as ranks of one job, however many; with --json in one object
    #[arg(long, conflicts_with = "blocks")]
    ranks: bool,
    #[command(flatten)]
    jobs: JobArgs,
    #[command(flatten)]
    capacity: CapacityArgs,
    /// The moment: `allocated` (most allocated), `reserved` (most reserved), `oom`, the number of an event, or a time
    /// after the first event such as 1.5s or 300ms [default: oom, or else allocated]
    #[arg(long, value_name = "MOMENT", value_parser = moment::parse)]
    at: Option<MomentChoice>,
    /// A package or a part of a path whose code is not your own, beside torch and its companions; may be repeated
    #[arg(long, value_name = "NAME")]
    framework: Vec<String>,
    /// Name the innermost line, whoever's code it is
    #[arg(long, conflicts_with = "framework")]
    all_frames: bool,
    /// How many rows the tables of holders, groups and limiting ranks have
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    rows: usize,
    /// With --json, list every allocated block of the moment: address, requested bytes, event, category and its rule
    #[arg(long, requires = "json")]
    blocks: bool,
    /// Skip the changes that would have made it fit, which take replays
    #[arg(long)]
    no_fits: bool,
    /// In how many address orders a change is replayed, where addresses can matter
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    orders: u32,
    /// The most memory of this machine that one file may take, for example 16GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory_limit: Option<u64>,
    /// One JSON object per file and device; with --ranks one for all
    #[arg(long)]
    pub json: bool,
}

/// The explanation of one device of one file.
struct Explained {
    /// The short name that distinguishes it, with the device if there are several.
    name: String,
    explanation: Explanation,
}

pub fn run(args: &Args, quiet: bool, output: &mut Output) -> Result<Verdict> {
    let files = expand(&args.files)?;
    let names = short_names(&files);
    let frameworks = match args.all_frames {
        true => Frameworks::only(&[]),
        false => Frameworks::default().with(&args.framework),
    };
    if args.ranks || (files.len() >= RANKS_MIN && !args.json) {
        let at = args.at.unwrap_or_default();
        let options = ExplainOptions { capacity: args.capacity.bytes(), at, frameworks, ..ExplainOptions::default() };
        let ranks = Ranks::new(ranks::summaries(&files, args.jobs, args.memory_limit, &options, quiet)?);
        ranks::write(&ranks, args.rows, output)?;
        return ranks::verdict(&ranks);
    }
    let work = |file: &Path, bar: &ProgressBar| explain_file(file, args, &frameworks, files.len(), bar);
    let (mut explained, mut summaries, mut unreadable) = (Vec::new(), Vec::new(), Vec::new());
    in_parallel(&files, quiet, work, |index, result| {
        match result {
            Ok(devices) => {
                let several = devices.len() > 1;
                for (explanation, summary) in devices {
                    summaries.extend(summary);
                    output.object(&object(&files[index], &explanation))?;
                    let device = if several { format!(" GPU {}", explanation.device) } else { String::new() };
                    let name = format!("{}{device}", names[index]);
                    explained.push(Explained { name, explanation });
                }
            }
            Err(error) => unreadable.push(output::printable(&error)),
        }
        Ok(())
    })?;
    // The devices of one process may be as many.
    if summaries.len() >= RANKS_MIN {
        if !args.json {
            ranks::write(&Ranks::new(summaries), args.rows, output)?;
        }
    } else {
        for (number, explained) in explained.iter().enumerate() {
            if number > 0 {
                output.line("")?;
            }
            text::write(explained, args.rows, quiet, output)?;
        }
    }
    match unreadable.is_empty() {
        true => Ok(Verdict::Success),
        false => Err(CommandError::Usage(unreadable.join("\nwarpool: "))),
    }
}

/// The devices of a file, with summaries if they are many.
fn explain_file(
    file: &Path,
    args: &Args,
    frameworks: &Frameworks,
    files: usize,
    bar: &ProgressBar,
) -> std::result::Result<Vec<(Explanation, Option<Summary>)>, String> {
    let opened = inputs::open(file, true, args.memory_limit, bar)?;
    inputs::begin(bar, "replaying");
    let options = ExplainOptions {
        capacity: args.capacity.bytes(),
        at: args.at.unwrap_or_default(),
        frameworks: frameworks.clone(),
        not_of_pytorch: opened.recording.format == RecordingFormat::RmmLog,
        lists_blocks: args.blocks,
        skips_fits: args.no_fits,
        address_orders: Some(args.orders),
        threads: Some(threads_each(files)),
        memory_limit: Some(opened.memory_limit),
        progress: Some(&|progress| show_progress(bar, progress)),
        ..ExplainOptions::default()
    };
    let snapshot = &opened.recording.snapshot;
    let found = match snapshot.traces.iter().filter(|trace| !trace.is_empty()).count() >= RANKS_MIN {
        true => explain_and_summarize(snapshot, &file.to_string_lossy(), &options)
            .map(|found| found.into_iter().map(|(explanation, summary)| (explanation, Some(summary))).collect()),
        false => {
            explain(snapshot, &options).map(|found| found.into_iter().map(|explanation| (explanation, None)).collect())
        }
    };
    found.map_err(|error| replay_error(file, &error))
}
