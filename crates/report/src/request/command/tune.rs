//! `tune`: which settings serve recorded programs best.

use std::path::PathBuf;

use crate::tune::{object, recommendation};
use serde_json::{Value, json};
use warpool_trace::parallel::threads_available;
use warpool_trace::replay::{DeviceReplay, DeviceReplays, ReplayError, ReplayOptions};
use warpool_trace::tune::{Candidate, TrialOptions, candidates, tune};

use crate::request::answer::Answer;
use crate::request::error::{Error, Result};
use crate::request::input::{Opened, Source};
use crate::request::options::Options;
use crate::request::work::{Stage, Work};

/// `candidates`: an object for each, the best first, as the command has it; `recommendation`: a sentence; `exact`:
/// whether replays reproduce all recordings.
pub fn answer(mut options: Options, sources: &[Source<'_>], work: &Work) -> Result<Answer> {
    let capacity = options.capacity()?;
    let parse =
        |string: &String| Candidate::replaced(string).map_err(|error| Error::Option(format!("candidates: {error}")));
    let further = options.texts("candidates")?.iter().map(parse).collect::<Result<Vec<Candidate>>>()?;
    let address_orders = options.count("orders", 1..=1000)?.unwrap_or(4);
    let memory_limit = options.memory_limit()?;
    options.finish("tune")?;

    let opened: Vec<Opened> =
        sources.iter().map(|source| source.open(false, memory_limit, work)).collect::<Result<_>>()?;
    work.begin(Stage::Replaying, 0);
    let mut replays = Vec::new();
    for (source, opened) in sources.iter().zip(&opened) {
        let options = ReplayOptions {
            memory_limit: Some(opened.memory_limit),
            progress: Some(&|progress| work.replayed(progress)),
            stop: work.stop.clone(),
            ..ReplayOptions::default()
        };
        let replay = DeviceReplays::new(&opened.recording.snapshot, &options);
        replays.push(replay.map_err(|error| source.replay_error(&error))?);
    }
    let devices: Vec<&DeviceReplay<'_>> = replays.iter().flat_map(DeviceReplays::devices).collect();
    let mut tried = candidates(&devices);
    tried.extend(further);
    let progress = |done: usize, total: usize| work.set(done as u64, total as u64);
    let options = TrialOptions { capacity, address_orders, threads: threads_available(), progress: Some(&progress) };
    let tuned = tune(&devices, tried, &options).map_err(|error| match error {
        ReplayError::Stopped => Error::Stopped,
        error => Error::Input(error.to_string()),
    })?;
    let files: Vec<PathBuf> = sources.iter().map(|source| source.path().to_owned()).collect();
    let names: Value = sources.iter().map(Source::file_value).collect();
    let candidates = tuned.iter().enumerate().map(|(rank, tuned)| {
        let mut object = object(rank, tuned, &files);
        object["files"] = names.clone();
        object
    });
    Ok(Answer::new(json!({
        "candidates": candidates.collect::<Vec<_>>(),
        "recommendation": recommendation(&tuned),
        "exact": devices.iter().all(|device| device.is_exact()),
    })))
}
