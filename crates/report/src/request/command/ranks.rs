//! `summarize`: the summary of a recording, to be merged elsewhere. `merge`: the report over such summaries.
//! `explain_ranks`: both at once, for many recordings.

use serde_json::{Value, json};
use warpool_trace::parallel::{in_parallel, threads_available};
use warpool_trace::ranks::{Identity, MemoryGate, Ranks, Summary, summarize as summaries_of};

use super::explain::{Asked, ROWS, table};
use crate::ranks::{headline, object, parse_part, part, sentences, tables};
use crate::request::answer::Answer;
use crate::request::error::{Error, Result};
use crate::request::input::Source;
use crate::request::options::Options;
use crate::request::work::Work;

/// The bytes that each worker may take where nothing is said.
const BYTES_EACH: u64 = 1 << 30;

/// `part`: what `merge` takes. With the option `rows`, a recording that cannot be read is a part that says so.
pub fn summarize(mut options: Options, source: &Source<'_>, work: &Work) -> Result<Answer> {
    let given = Identity {
        rank: options.count("rank", 0..=u32::MAX)?,
        world: options.count("world", 1..=u32::MAX)?,
        host: options.text("host")?,
    };
    let file = options.text("file")?.unwrap_or_else(|| source.path().to_string_lossy().into_owned());
    let as_rows = options.flag("rows")?;
    let asked = Asked::new(options, "summarize")?;
    let mut found = match summaries(&asked, source, &file, asked.memory_limit, work) {
        Err(error) if as_rows => vec![unreadable(source, &file, error)?],
        found => found?,
    };
    for summary in &mut found {
        summary.identity = given.clone().or(std::mem::take(&mut summary.identity));
    }
    Ok(Answer::new(json!({ "part": part(&found) })))
}

/// The report over parts: `object`, as the command has it, with sentences and tables.
pub fn merge(options: Options, sources: &[Source<'_>]) -> Result<Answer> {
    options.finish("merge")?;
    let mut found = Vec::new();
    for source in sources {
        found.extend(parse_part(&source.bytes()?).map_err(|error| Error::Input(source.named(error)))?);
    }
    Ok(report(found))
}

/// The report over recordings. One that cannot be read is a row of it.
pub fn explain(mut options: Options, sources: &[Source<'_>], work: &Work) -> Result<Answer> {
    let jobs = options.count("jobs", 1..=4096)?.map_or_else(threads_available, |jobs| jobs as usize);
    let jobs = jobs.min(sources.len());
    let memory = options.size("memory")?.unwrap_or(BYTES_EACH * jobs as u64);
    let asked = Asked::new(options, "explain_ranks")?;
    let gate = MemoryGate::new(memory, jobs);
    let done = in_parallel(sources.len(), jobs, |number| {
        let source = &sources[number];
        let file = source.path().to_string_lossy().into_owned();
        // The progress of the first is shown.
        let beside = work.beside();
        let work = if number == 0 { work } else { &beside };
        let found = match asked.memory_limit {
            Some(limit) => summaries(&asked, source, &file, Some(limit), work),
            None => gate.within(|limit| summaries(&asked, source, &file, Some(limit), work), needs_more),
        };
        found.or_else(|error| Ok(vec![unreadable(source, &file, error)?]))
    });
    let mut found = Vec::new();
    for summaries in done {
        found.extend(summaries?);
    }
    Ok(report(found))
}

/// Whether a recording needs more memory than it was allowed.
fn needs_more(error: &Error) -> bool {
    matches!(error, Error::Input(message) if message.contains("of memory; if you trust it"))
}

fn summaries(asked: &Asked, source: &Source<'_>, file: &str, limit: Option<u64>, work: &Work) -> Result<Vec<Summary>> {
    let opened = source.open(true, limit, work)?;
    let found = asked.run(&opened, work, |snapshot, options| summaries_of(snapshot, file, options));
    found.map_err(|error| source.replay_error(&error))
}

/// A row for a recording that cannot be read; other errors are errors.
fn unreadable(source: &Source<'_>, file: &str, error: Error) -> Result<Summary> {
    match error {
        Error::Input(message) => {
            // The row has the name.
            let prefix = source.named("");
            Ok(Summary::unreadable(file, message.strip_prefix(&prefix).unwrap_or(&message).to_owned()))
        }
        Error::File { source, .. } => Ok(Summary::unreadable(file, source.to_string())),
        error => Err(error),
    }
}

fn report(summaries: Vec<Summary>) -> Answer {
    let ranks = Ranks::new(summaries);
    let tables: Vec<Value> = tables(&ranks, ROWS).iter().map(table).collect();
    Answer::new(json!({
        "object": object(&ranks),
        "headline": headline(&ranks),
        "sentences": sentences(&ranks),
        "tables": tables,
    }))
}
