//! `warpool summarize`: what a report over many ranks needs of a recording, to be merged elsewhere.

use std::path::{Path, PathBuf};

use serde_json::json;
use warpool_report::moment;
use warpool_report::ranks::part;
use warpool_trace::explain::{ExplainOptions, Frameworks, MomentChoice};
use warpool_trace::ranks::{Identity, Ranks, Summary};

use super::{JobArgs, summaries, verdict};
use crate::capacity::CapacityArgs;
use crate::files::expand;
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::size;

/// Summarizes recordings where they are, for `warpool merge`
///
/// A part has what a report over many ranks needs of each recording, in some ten kilobytes. `warpool merge` makes of
/// all parts the report that `warpool explain` makes of all recordings in one place, byte for byte, however they are
/// distributed over parts. A recording that cannot be read is in the part as such.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 success, 2 a file cannot be read (the part says which), or the part cannot be \
    written.\n\n\
    Examples:\n  \
    warpool summarize rank3.pickle -o rank3.part.json\n  \
    warpool summarize oom.pickle --rank $SLURM_PROCID -o parts/$SLURM_PROCID.json\n  \
    warpool merge parts/")]
pub struct Args {
    /// Recordings, folders or patterns of them; `-` is the standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The part to write [default: the standard output]
    #[arg(short, long, value_name = "PART")]
    pub output: Option<PathBuf>,
    /// The rank, where neither the recording nor its name tells
    #[arg(long, value_name = "NUMBER")]
    rank: Option<u32>,
    /// How many ranks the job has
    #[arg(long, value_name = "COUNT")]
    world: Option<u32>,
    /// The machine
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    #[command(flatten)]
    capacity: CapacityArgs,
    /// The moment, as for `warpool explain`
    #[arg(long, value_name = "MOMENT", value_parser = moment::parse)]
    at: Option<MomentChoice>,
    /// A package or a part of a path whose code is not your own, beside torch and its companions; may be repeated
    #[arg(long, value_name = "NAME")]
    framework: Vec<String>,
    #[command(flatten)]
    jobs: JobArgs,
    /// The most memory of this machine that one file may take, for example 16GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory_limit: Option<u64>,
    /// One JSON object: what was written; without `-o` the part itself, which is JSON in any case
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, quiet: bool, output: &mut Output) -> Result<Verdict> {
    let files = expand(&args.files)?;
    let options = ExplainOptions {
        capacity: args.capacity.bytes(),
        at: args.at.unwrap_or_default(),
        frameworks: Frameworks::default().with(&args.framework),
        ..ExplainOptions::default()
    };
    let mut found = summaries(&files, args.jobs, args.memory_limit, &options, quiet)?;
    for Summary { identity, .. } in &mut found {
        let given = Identity { rank: args.rank, world: args.world, host: args.host.clone() };
        *identity = given.or(std::mem::take(identity));
    }
    let part = part(&found);
    let Some(to) = &args.output else {
        output.object(&part)?;
        return verdict(&Ranks::new(found));
    };
    let text = part.to_string();
    write(to, &text).map_err(|error| CommandError::Usage(format!("cannot write {}: {error}", to.display())))?;
    let unreadable = found.iter().filter(|summary| summary.figures.is_err()).count();
    output.object(&json!({
        "part": to.to_string_lossy(),
        "part_bytes": text.len() + 1,
        "recordings": found.len(),
        "unreadable": unreadable,
    }))?;
    let bytes = size::format(text.len() as u64 + 1);
    output.line(format!("{}: {bytes}", output::printable(&to.display().to_string())))?;
    verdict(&Ranks::new(found))
}

/// All or nothing: `merge` may look for parts meanwhile. A pipe or a terminal cannot be replaced by a file.
fn write(to: &Path, text: &str) -> std::io::Result<()> {
    let line = format!("{text}\n");
    if to.exists() && !to.is_file() {
        return std::fs::write(to, line);
    }
    let mut draft = to.file_name().unwrap_or_default().to_owned();
    draft.push(format!(".{}.draft", std::process::id()));
    let draft = to.with_file_name(draft);
    let written = std::fs::write(&draft, line).and_then(|()| std::fs::rename(&draft, to));
    if written.is_err() {
        let _ = std::fs::remove_file(&draft);
    }
    written
}
