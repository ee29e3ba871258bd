//! `explain`: why a recorded program ran out of memory.

use serde_json::{Value, json};
use warpool_report::explain::{headline, object, sentences};
use warpool_trace::RecordingFormat;
use warpool_trace::explain::{ExplainOptions, Explanation, explain};

use crate::answer::Answer;
use crate::error::Result;
use crate::input::Source;
use crate::options::Options;
use crate::work::{Stage, Work};

/// `devices`: an object for each, as the command has it, with a headline and sentences for people.
pub fn answer(mut options: Options, source: &Source<'_>, work: &Work) -> Result<Answer> {
    let capacity = options.capacity()?;
    let frameworks = options.frameworks()?;
    let at = options.moment()?.unwrap_or_default();
    let skips_fits = options.flag("no_fits")?;
    let address_orders = options.count("orders", 1..=1000)?;
    let memory_limit = options.memory_limit()?;
    options.finish("explain")?;

    let opened = source.open(true, memory_limit, work)?;
    work.begin(Stage::Replaying, 0);
    let options = ExplainOptions {
        capacity,
        at,
        frameworks,
        not_of_pytorch: opened.recording.format == RecordingFormat::RmmLog,
        lists_blocks: false,
        skips_fits,
        address_orders,
        threads: None,
        memory_limit: Some(opened.memory_limit),
        progress: Some(&|progress| work.replayed(progress)),
        stop: work.stop.clone(),
    };
    let found = explain(&opened.recording.snapshot, &options).map_err(|error| source.replay_error(&error))?;
    let devices: Vec<Value> = found.iter().map(|explanation| device(source, explanation)).collect();
    Ok(Answer::new(json!({ "devices": devices })))
}

fn device(source: &Source<'_>, explanation: &Explanation) -> Value {
    let mut object = object(source.path(), explanation);
    object["file"] = source.file_value();
    json!({ "object": object, "headline": headline(explanation), "sentences": sentences(explanation) })
}
