//! `view`: a recording as a page for the browser.

use crate::view::{figures, page};
use serde_json::{Value, json};
use warpool_trace::RecordingFormat;
use warpool_trace::explain::ExplainOptions;
use warpool_trace::timeline::{TimelineOptions, timelines};

use crate::request::answer::Answer;
use crate::request::error::{Error, Result};
use crate::request::input::Source;
use crate::request::options::Options;
use crate::request::work::{Stage, Work};

/// The object that the command has, and the page.
pub fn answer(mut options: Options, source: &Source<'_>, work: &Work) -> Result<Answer> {
    let capacity = options.capacity()?;
    let skips_fits = options.flag("no_fits")?;
    let frameworks = options.frameworks()?;
    let device = options.count("device", 0..=u32::MAX)?;
    let memory_limit = options.memory_limit()?;
    options.finish("view")?;

    let opened = source.open(true, memory_limit, work)?;
    work.begin(Stage::Replaying, 0);
    let options = TimelineOptions {
        explain: ExplainOptions {
            capacity,
            frameworks: frameworks.clone(),
            not_of_pytorch: opened.recording.format == RecordingFormat::RmmLog,
            skips_fits,
            memory_limit: Some(opened.memory_limit),
            progress: Some(&|progress| work.replayed(progress)),
            stop: work.stop.clone(),
            ..ExplainOptions::default()
        },
        ..TimelineOptions::default()
    };
    let snapshot = &opened.recording.snapshot;
    let mut found = timelines(snapshot, &options).map_err(|error| source.replay_error(&error))?;
    if let Some(device) = device {
        let numbers: Vec<String> = found.iter().map(|timeline| timeline.device.to_string()).collect();
        found.retain(|timeline| timeline.device == device);
        if found.is_empty() {
            let message = format!("there is no device {device} in it, only {}", numbers.join(", "));
            return Err(Error::Option(source.named(message)));
        }
    }
    work.begin(Stage::Writing, 0);
    let title = source.title();
    let page = page(&title, &mut found, snapshot, &frameworks).to_html();
    let object = json!({
        "schema_version": 1,
        "file": source.file_value(),
        "page": Value::Null,
        "page_bytes": page.len(),
        "devices": found.iter().map(figures).collect::<Vec<_>>(),
    });
    Ok(Answer { json: json!({ "title": title, "object": object }), page: Some(page) })
}
