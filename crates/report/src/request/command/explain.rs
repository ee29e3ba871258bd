//! `explain`: why a recorded program ran out of memory. `explain_files`: likewise for several recordings, with what
//! the command prints for people.

use serde_json::{Value, json};
use warpool::memory::report::Snapshot;
use warpool_trace::RecordingFormat;
use warpool_trace::explain::{ExplainOptions, Explanation, Frameworks, MomentChoice, explain};
use warpool_trace::ranks::{Ranks, Summary, explain_and_summarize};
use warpool_trace::replay::ReplayError;

use crate::explain::{AdviceText, Table, advice_texts, headline, object, sentences, tables};
use crate::ranks;
use crate::request::answer::Answer;
use crate::request::error::{Error, Result};
use crate::request::input::{Opened, Source};
use crate::request::options::Options;
use crate::request::work::{Stage, Work};

/// How many rows the tables have.
pub(super) const ROWS: usize = 10;

/// The options for each recording.
pub(super) struct Asked {
    capacity: Option<u64>,
    frameworks: Frameworks,
    at: MomentChoice,
    skips_fits: bool,
    address_orders: Option<u32>,
    pub memory_limit: Option<u64>,
}

impl Asked {
    /// Takes all options that are left.
    pub fn new(mut options: Options, command: &str) -> Result<Self> {
        let asked = Self {
            capacity: options.capacity()?,
            frameworks: options.frameworks()?,
            at: options.moment()?.unwrap_or_default(),
            skips_fits: options.flag("no_fits")?,
            address_orders: options.count("orders", 1..=1000)?,
            memory_limit: options.memory_limit()?,
        };
        options.finish(command)?;
        Ok(asked)
    }

    fn explain(&self, source: &Source<'_>, work: &Work) -> Result<Vec<Explanation>> {
        let opened = source.open(true, self.memory_limit, work)?;
        self.run(&opened, work, explain).map_err(|error| source.replay_error(&error))
    }

    /// Likewise, with the summaries.
    fn summarize(&self, source: &Source<'_>, work: &Work) -> Result<Vec<(Explanation, Summary)>> {
        let opened = source.open(true, self.memory_limit, work)?;
        let file = source.path().to_string_lossy().into_owned();
        let summarize =
            |snapshot: &Snapshot, options: &ExplainOptions<'_>| explain_and_summarize(snapshot, &file, options);
        self.run(&opened, work, summarize).map_err(|error| source.replay_error(&error))
    }

    /// Does `answer` with a recording, under the options.
    pub fn run<T>(
        &self,
        opened: &Opened,
        work: &Work,
        answer: impl FnOnce(&Snapshot, &ExplainOptions<'_>) -> std::result::Result<T, ReplayError>,
    ) -> std::result::Result<T, ReplayError> {
        work.begin(Stage::Replaying, 0);
        let options = ExplainOptions {
            capacity: self.capacity,
            at: self.at,
            frameworks: self.frameworks.clone(),
            not_of_pytorch: opened.recording.format == RecordingFormat::RmmLog,
            lists_blocks: false,
            skips_fits: self.skips_fits,
            address_orders: self.address_orders,
            threads: None,
            memory_limit: Some(opened.memory_limit),
            progress: Some(&|progress| work.replayed(progress)),
            stop: work.stop.clone(),
        };
        answer(&opened.recording.snapshot, &options)
    }
}

/// `devices`: an object for each, as the command has it, with a headline and sentences for people.
pub fn answer(options: Options, source: &Source<'_>, work: &Work) -> Result<Answer> {
    let found = Asked::new(options, "explain")?.explain(source, work)?;
    let devices: Vec<Value> = found.iter().map(|explanation| device(source, explanation)).collect();
    Ok(Answer::new(json!({ "devices": devices })))
}

/// `files`: for each recording its devices, as [`answer`] has them, with advice and tables; or why there is no answer.
/// `ranks`: the report over all, as the command has it.
pub fn answer_files(options: Options, sources: &[Source<'_>], work: &Work) -> Result<Answer> {
    let asked = Asked::new(options, "explain_files")?;
    let (mut files, mut summaries) = (Vec::new(), Vec::new());
    for source in sources {
        let found = match asked.summarize(source, work) {
            Err(error @ (Error::Stopped | Error::Option(_))) => return Err(error),
            Err(error) => {
                files.push(json!({ "file": source.file_value(), "error": error.object() }));
                continue;
            }
            Ok(found) => found,
        };
        let devices: Vec<Value> = found.iter().map(|(explained, _)| device_for_people(source, explained)).collect();
        files.push(json!({ "file": source.file_value(), "devices": devices }));
        summaries.extend(found.into_iter().map(|(_, summary)| summary));
    }
    let ranks = (summaries.len() > 1).then(|| {
        let ranks = Ranks::new(summaries);
        let tables: Vec<Value> = ranks::tables(&ranks, ROWS).iter().map(table).collect();
        json!({ "headline": ranks::headline(&ranks), "sentences": ranks::sentences(&ranks), "tables": tables })
    });
    Ok(Answer::new(json!({ "files": files, "ranks": ranks })))
}

fn device(source: &Source<'_>, explanation: &Explanation) -> Value {
    let mut object = object(source.path(), explanation);
    object["file"] = source.file_value();
    json!({ "object": object, "headline": headline(explanation), "sentences": sentences(explanation) })
}

fn device_for_people(source: &Source<'_>, explanation: &Explanation) -> Value {
    let mut device = device(source, explanation);
    let advice = |text: AdviceText| json!({ "paragraph": text.paragraph, "lines": text.lines });
    device["advice"] = advice_texts(explanation).into_iter().map(advice).collect();
    device["tables"] = tables(explanation, ROWS).iter().map(table).collect();
    device["remarks"] = json!(explanation.remarks);
    device
}

pub(super) fn table(table: &Table) -> Value {
    json!({ "title": table.title, "columns": table.columns, "rows": table.rows })
}
