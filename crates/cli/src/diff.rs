//! `warpool diff`: what two recordings hold at their peaks, matched by call stack.

use std::io;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use serde_json::{Value, json};
use warpool_trace::diff::{ChangeKind, HolderChange, diff};
use warpool_trace::explain::{ExplainOptions, Explanation, Frameworks, explain};

use crate::files::short_names;
use crate::inputs::{self, in_parallel, replay_error, show_progress};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::size;

/// Compares two recordings: what is new, gone, grown or shrunk, by call stack
///
/// For the moments of their out-of-memory events, or else of their peaks: before and after a change, or two ranks of
/// one job. Blocks are matched by the calls that allocated them; without stacks by size.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 success, 2 a file cannot be read.\n\n\
    Examples:\n  \
    warpool diff before.pickle after.pickle\n  \
    warpool diff rank0.pickle rank7.pickle --json")]
pub struct Args {
    /// The first recording
    #[arg(value_name = "A")]
    before: PathBuf,
    /// The second recording
    #[arg(value_name = "B")]
    after: PathBuf,
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
    let work = |file: &Path, bar: &ProgressBar| explain_file(file, args, bar);
    in_parallel(&files, quiet, work, |_, result| {
        match result {
            Ok(explanations) => found.push(explanations),
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
    for (one, other) in &pairs {
        let changes = diff(one, other);
        output.object(&object(&files, one, other, &changes))?;
        let several = pairs.len() > 1 || one.device != other.device;
        let device = if several { format!(" (GPU {} and {})", one.device, other.device) } else { String::new() };
        write(&names, &device, (one, other), &changes, args.rows, output)?;
    }
    Ok(Verdict::Success)
}

/// The same devices of both; with one device in each, these two: ranks use one device each.
fn pairs<'a>(before: &'a [Explanation], after: &'a [Explanation]) -> Vec<(&'a Explanation, &'a Explanation)> {
    match (before, after) {
        ([one], [other]) => vec![(one, other)],
        _ => {
            let same = |one: &'a Explanation| Some((one, after.iter().find(|other| other.device == one.device)?));
            before.iter().filter_map(same).collect()
        }
    }
}

fn explain_file(file: &Path, args: &Args, bar: &ProgressBar) -> std::result::Result<Vec<Explanation>, String> {
    let opened = inputs::open(file, true, args.memory_limit, bar)?;
    bar.set_message("replaying");
    let options = ExplainOptions {
        frameworks: Frameworks::default().with(&args.framework),
        skips_fits: true,
        memory_limit: Some(opened.memory_limit),
        progress: Some(&|progress| show_progress(bar, progress)),
        ..ExplainOptions::default()
    };
    explain(&opened.recording.snapshot, &options).map_err(|error| replay_error(file, &error))
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
    output.paragraph(&format!(
        "Allocated: {} and {}. Reserved: {} and {}. Compared are the {} of the first and the {} of the second.",
        size::format(one.parts.allocated),
        size::format(other.parts.allocated),
        size::format(one.bytes_reserved),
        size::format(other.bytes_reserved),
        one.kind.name(),
        other.kind.name(),
    ))?;
    if !(one.holders.has_stacks() && other.holders.has_stacks()) {
        output.paragraph(
            "Without call stacks in both, blocks are matched by size; record with \
             torch.cuda.memory._record_memory_history(stacks=\"python\").",
        )?;
    }
    output.line("")?;
    let changed: Vec<&HolderChange> = changes.iter().filter(|change| change.kind != ChangeKind::Same).collect();
    if changed.is_empty() {
        return output.line("No difference.");
    }
    let mut table = output::table(&["", ">first", ">second", ">difference", ">blocks", "allocated by", "from"]);
    for change in changed.iter().take(rows) {
        let sign = if change.bytes_after < change.bytes_before { "-" } else { "+" };
        let line = change.line.as_deref().filter(|line| *line != change.name).unwrap_or_default();
        table.add_row([
            change.kind.name().to_owned(),
            size::format(change.bytes_before),
            size::format(change.bytes_after),
            format!("{sign}{}", size::format(change.bytes_changed())),
            format!("{} to {}", change.count_before, change.count_after),
            change.name.clone(),
            line.to_owned(),
        ]);
    }
    let title = match changed.len() > rows {
        true => format!("What changed, the largest {rows} of {}", changed.len()),
        false => "What changed".to_owned(),
    };
    output.table(&title, &table)
}

fn object(files: &[PathBuf; 2], before: &Explanation, after: &Explanation, changes: &[HolderChange]) -> Value {
    let side = |file: &PathBuf, explanation: &Explanation| {
        let moment = explanation.moment();
        json!({
            "file": file.to_string_lossy(),
            "device": explanation.device,
            "moment": moment.kind.name(),
            "event": moment.event,
            "allocated_bytes": moment.parts.allocated,
            "reserved_bytes": moment.bytes_reserved,
        })
    };
    json!({
        "schema_version": 1,
        "before": side(&files[0], before),
        "after": side(&files[1], after),
        "changes": changes.iter().map(|change| json!({
            "kind": change.kind.name(),
            "name": change.name,
            "line": change.line,
            "path": change.path,
            "bytes_before": change.bytes_before,
            "bytes_after": change.bytes_after,
            "count_before": change.count_before,
            "count_after": change.count_after,
        })).collect::<Vec<_>>(),
    })
}
