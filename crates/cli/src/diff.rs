//! `warpool diff`: what two recordings hold at their peaks, matched by call stack; as a table, as JSON, or as a page.

use std::io;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use serde_json::json;
use warpool_report::diff::{Side, compared, object, page, pairs};
use warpool_report::moment;
use warpool_report::view::{BYTES_MAX, DevicePart, device_parts};
use warpool_trace::Category;
use warpool_trace::diff::{ChangeKind, HolderChange, category_changes, diff};
use warpool_trace::explain::{ExplainOptions, Explanation, Frameworks, Moment, MomentChoice, explain};
use warpool_trace::timeline::{Timeline, TimelineOptions, timelines};

use crate::files::short_names;
use crate::inputs::{self, in_parallel, replay_error, show_progress};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::size;

/// Compares two recordings: what is new, gone, grown or shrunk, by call stack
///
/// Compares equal moments, those of most allocated memory unless --at names others: before and after a change, or two
/// ranks of one job. Blocks are matched by the functions and files of the calls that allocated them (lines may have
/// moved), without stacks by size. With -o it also writes a page for the browser: both recordings over time, what
/// changed, and a flame graph of both.
#[derive(Debug, clap::Args)]
#[command(after_help = "A report that exists is replaced; any other file is not.\n\
    Exit status: 0 success, 2 a file cannot be read, or the page cannot be written.\n\n\
    Examples:\n  \
    warpool diff before.pickle after.pickle\n  \
    warpool diff before.pickle after.pickle -o report.html\n  \
    warpool diff rank0.pickle rank7.pickle --json")]
pub struct Args {
    /// The first recording
    #[arg(value_name = "A")]
    before: PathBuf,
    /// The second recording
    #[arg(value_name = "B")]
    after: PathBuf,
    /// The moment of both: `allocated`, `reserved`, `oom`, the number of an event, or a time such as 1.5s
    #[arg(long, value_name = "MOMENT", value_parser = moment::parse, default_value = "allocated")]
    at: MomentChoice,
    /// Also write a page for the browser
    #[arg(short, long, value_name = "PAGE")]
    output: Option<PathBuf>,
    /// A package or a part of a path whose code is not your own, beside torch and its companions; may be repeated
    #[arg(long, value_name = "NAME")]
    framework: Vec<String>,
    /// How many rows the table has
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    rows: usize,
    /// The most memory of this machine that one file may take, for example 16GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory_limit: Option<u64>,
    /// One JSON object per device
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, quiet: bool, output: &mut Output) -> Result<Verdict> {
    let files = [args.before.clone(), args.after.clone()];
    let names = short_names(&files);
    let (mut found, mut unreadable) = (Vec::new(), Vec::new());
    let work = |file: &Path, bar: &ProgressBar| sides(file, args, bar);
    in_parallel(&files, quiet, work, |_, result| {
        match result {
            Ok(sides) => found.push(sides),
            Err(error) => unreadable.push(output::printable(&error)),
        }
        Ok(())
    })?;
    if !unreadable.is_empty() {
        return Err(CommandError::Usage(unreadable.join("\nwarpool: ")));
    }
    let [before, after] = found.as_slice() else { unreachable!("both were read") };
    let pairs = pairs(before, after);
    if pairs.is_empty() {
        return Err(CommandError::Usage("the recordings have no device in common".to_owned()));
    }
    let written = match &args.output {
        Some(to) => Some((to, page([&names[0], &names[1]], &pairs).write(to).map_err(CommandError::Usage)?)),
        None => None,
    };
    for &(one, other) in &pairs {
        let (one, other) = (&one.explanation, &other.explanation);
        let changes = diff(one, other);
        let mut object = object([&files[0], &files[1]], one, other, &changes);
        if let Some((to, bytes)) = written {
            object["page"] = json!(to.to_string_lossy());
            object["page_bytes"] = json!(bytes);
        }
        output.object(&object)?;
        let several = pairs.len() > 1 || one.device != other.device;
        let device = if several { format!(" (GPU {} and {})", one.device, other.device) } else { String::new() };
        write(&names, &device, (one, other), &changes, args.rows, output)?;
    }
    if let Some((to, bytes)) = written {
        output.line(format!("{}: {}", output::printable(&to.display().to_string()), size::format(bytes)))?;
    }
    Ok(Verdict::Success)
}

fn sides(file: &Path, args: &Args, bar: &ProgressBar) -> std::result::Result<Vec<Side>, String> {
    let opened = inputs::open(file, true, args.memory_limit, bar)?;
    inputs::begin(bar, "replaying");
    let frameworks = Frameworks::default().with(&args.framework);
    let options = ExplainOptions {
        at: args.at,
        frameworks: frameworks.clone(),
        skips_fits: true,
        memory_limit: Some(opened.memory_limit),
        progress: Some(&|progress| show_progress(bar, progress)),
        ..ExplainOptions::default()
    };
    let snapshot = &opened.recording.snapshot;
    if args.output.is_none() {
        let explanations = explain(snapshot, &options).map_err(|error| replay_error(file, &error))?;
        return Ok(explanations.into_iter().map(|explanation| Side { explanation, part: None }).collect());
    }
    let options = TimelineOptions { explain: options, ..TimelineOptions::default() };
    let mut found = timelines(snapshot, &options).map_err(|error| replay_error(file, &error))?;
    inputs::begin(bar, "writing");
    // Both recordings are in one page.
    let parts = device_parts(&mut found, snapshot, &frameworks, BYTES_MAX / 2);
    let side = |(timeline, part): (Timeline, DevicePart)| Side { explanation: timeline.explanation, part: Some(part) };
    Ok(found.into_iter().zip(parts).map(side).collect())
}

/// The kinds of memory in both.
fn categories_table(before: &Moment, after: &Moment, output: &mut Output) -> io::Result<()> {
    let changes = category_changes(before, after);
    if changes.iter().all(|change| change.category == Category::Unknown) {
        return Ok(());
    }
    let mut table = output::table(&["kind of memory", ">first", ">second", ">difference"]);
    for change in changes {
        let sign = if change.bytes_after < change.bytes_before { "-" } else { "+" };
        table.add_row([
            change.category.words().to_owned(),
            size::format(change.bytes_before),
            size::format(change.bytes_after),
            format!("{sign}{}", size::format(change.bytes_after.abs_diff(change.bytes_before))),
        ]);
    }
    output.table("By kind of memory, requested bytes", &table)
}

fn write(
    names: &[String],
    device: &str,
    sides: (&Explanation, &Explanation),
    changes: &[HolderChange],
    rows: usize,
    output: &mut Output,
) -> io::Result<()> {
    let [before, after] = names else { return Ok(()) };
    let (one, other) = (sides.0.moment(), sides.1.moment());
    output.heading(&format!("{before} and {after}{device}"))?;
    output.paragraph(&compared(sides.0, sides.1))?;
    if !(one.holders.has_stacks() && other.holders.has_stacks()) {
        output.paragraph(
            "Without call stacks in both, blocks are matched by size; record with \
             torch.cuda.memory._record_memory_history().",
        )?;
    }
    output.line("")?;
    categories_table(one, other, output)?;
    let changed: Vec<&HolderChange> = changes.iter().filter(|change| change.kind != ChangeKind::Same).collect();
    if changed.is_empty() {
        return output.line("No difference in what the calls hold at that moment.");
    }
    let mut table = output::table(&["", ">first", ">second", ">difference", ">blocks", "allocated by", "from", "kind"]);
    for change in changed.iter().take(rows) {
        let sign = if change.bytes_after < change.bytes_before { "-" } else { "+" };
        let line = change.line.as_ref().filter(|line| **line != change.name).or(change.forward_line.as_ref());
        table.add_row([
            change.kind.name().to_owned(),
            size::format(change.bytes_before),
            size::format(change.bytes_after),
            format!("{sign}{}", size::format(change.bytes_changed())),
            format!("{} to {}", change.count_before, change.count_after),
            change.name.clone(),
            line.cloned().unwrap_or_default(),
            change.category.words().to_owned(),
        ]);
    }
    let title = match changed.len() > rows {
        true => format!("What changed, the largest {rows} of {}", changed.len()),
        false => "What changed".to_owned(),
    };
    output.table(&title, &table)
}
