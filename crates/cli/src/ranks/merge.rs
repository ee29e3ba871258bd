//! `warpool merge`: the report over parts that `warpool summarize` wrote.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use warpool_report::ranks::parse_part;
use warpool_trace::ranks::Ranks;

use super::{verdict, write};
use crate::files::{expand_parts, is_stdin};
use crate::output::{self, CommandError, Output, Result, Verdict};

/// Reports on many ranks from the parts that `warpool summarize` wrote
///
/// The report is that of `warpool explain` over all recordings in one place, byte for byte: it does not matter how the
/// recordings are distributed over parts, in which order these are given, and whether one comes twice.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 success, 2 a part cannot be read, or a recording could not be.\n\n\
    Examples:\n  \
    warpool merge parts/\n  \
    warpool merge part-*.json --json")]
pub struct Args {
    /// Parts, or folders or patterns of them (files that end in .json); `-` is the standard input
    #[arg(required = true, value_name = "PART")]
    parts: Vec<PathBuf>,
    /// How many rows the tables of groups and of the ranks that limit the job have
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    rows: usize,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    let mut found = Vec::new();
    for part in expand_parts(&args.parts)? {
        let wrong = |message: String| CommandError::Usage(output::printable(&format!("{}: {message}", part.display())));
        let text = read(&part).map_err(|error| wrong(error.to_string()))?;
        found.extend(parse_part(&text).map_err(|error| wrong(error.to_string()))?);
    }
    let ranks = Ranks::new(found);
    write(&ranks, args.rows, output)?;
    verdict(&ranks)
}

fn read(part: &Path) -> std::io::Result<Vec<u8>> {
    if !is_stdin(part) {
        return std::fs::read(part);
    }
    let mut text = Vec::new();
    std::io::stdin().lock().read_to_end(&mut text)?;
    Ok(text)
}
