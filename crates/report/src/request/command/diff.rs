//! `diff`: what two recordings hold at their moments, matched by call stack.

use crate::diff::{Side, compared, headline, object, page, pairs};
use crate::view::{BYTES_MAX, DevicePart, device_parts};
use serde_json::{Value, json};
use warpool_trace::diff::diff;
use warpool_trace::explain::{ExplainOptions, Frameworks, MomentChoice, explain};
use warpool_trace::parallel::both;
use warpool_trace::timeline::{Timeline, TimelineOptions, timelines};

use crate::request::answer::Answer;
use crate::request::error::{Error, Result};
use crate::request::input::Source;
use crate::request::options::Options;
use crate::request::work::{Stage, Work};

/// The options for both recordings.
struct Asked {
    at: MomentChoice,
    frameworks: Frameworks,
    memory_limit: Option<u64>,
    makes_page: bool,
}

/// `devices`: an object for each pair, as the command has it, with a headline and sentences. The page, if asked for.
pub fn answer(mut options: Options, sources: [&Source<'_>; 2], work: &Work) -> Result<Answer> {
    let asked = Asked {
        at: options.moment()?.unwrap_or(MomentChoice::Allocated),
        frameworks: options.frameworks()?,
        memory_limit: options.memory_limit()?,
        makes_page: options.flag("page")?,
    };
    options.finish("diff")?;

    let [before, after] = both_sides(sources, &asked, work);
    let (before, after) = (before?, after?);
    let pairs = pairs(&before, &after);
    if pairs.is_empty() {
        return Err(Error::Input("the recordings have no device in common".to_owned()));
    }
    let devices: Vec<Value> = pairs.iter().map(|(one, other)| device(sources, one, other)).collect();
    let titles = sources.map(Source::title);
    let page = asked.makes_page.then(|| page([&titles[0], &titles[1]], &pairs).to_html());
    Ok(Answer { json: json!({ "title": titles.join(" and "), "devices": devices }), page })
}

fn device(sources: [&Source<'_>; 2], one: &Side, other: &Side) -> Value {
    let (one, other) = (&one.explanation, &other.explanation);
    let mut object = object(sources.map(Source::path), one, other, &diff(one, other));
    for (side, source) in ["before", "after"].into_iter().zip(sources) {
        object[side]["file"] = source.file_value();
    }
    json!({ "object": object, "headline": headline(one, other), "sentences": [compared(one, other)] })
}

/// Both at once; the progress is that of the first.
fn both_sides(sources: [&Source<'_>; 2], asked: &Asked, work: &Work) -> [Result<Vec<Side>>; 2] {
    let other_work = work.beside();
    both(|| sides(sources[0], asked, work), || sides(sources[1], asked, &other_work)).into()
}

fn sides(source: &Source<'_>, asked: &Asked, work: &Work) -> Result<Vec<Side>> {
    let opened = source.open(true, asked.memory_limit, work)?;
    work.begin(Stage::Replaying, 0);
    let options = ExplainOptions {
        at: asked.at,
        frameworks: asked.frameworks.clone(),
        skips_fits: true,
        memory_limit: Some(opened.memory_limit),
        progress: Some(&|progress| work.replayed(progress)),
        stop: work.stop.clone(),
        ..ExplainOptions::default()
    };
    let snapshot = &opened.recording.snapshot;
    if !asked.makes_page {
        let found = explain(snapshot, &options).map_err(|error| source.replay_error(&error))?;
        return Ok(found.into_iter().map(|explanation| Side { explanation, part: None }).collect());
    }
    let options = TimelineOptions { explain: options, ..TimelineOptions::default() };
    let mut found = timelines(snapshot, &options).map_err(|error| source.replay_error(&error))?;
    work.begin(Stage::Writing, 0);
    // Both recordings are in one page.
    let parts = device_parts(&mut found, snapshot, &asked.frameworks, BYTES_MAX / 2);
    let side = |(timeline, part): (Timeline, DevicePart)| Side { explanation: timeline.explanation, part: Some(part) };
    Ok(found.into_iter().zip(parts).map(side).collect())
}
