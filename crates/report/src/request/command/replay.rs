//! `replay`: a recorded program with the real allocators on a simulated GPU.

use crate::replay::{Reading, object, segment_totals, segments_object};
use serde_json::{Value, json};
use warpool::memory::Settings;
use warpool::memory::settings::{Backend, SettingsError, lint};
use warpool_trace::RecordingFormat;
use warpool_trace::replay::{AllocatorChoice, ReplayError, ReplayOptions, replay_devices};

use crate::request::answer::Answer;
use crate::request::error::{Error, Result};
use crate::request::input::Source;
use crate::request::options::Options;
use crate::request::work::{Stage, Work};

/// `devices`: an object for each, as the command has it.
pub fn answer(mut options: Options, source: &Source<'_>, work: &Work) -> Result<Answer> {
    let allocator = allocator(&mut options)?;
    let settings = match options.text("settings")? {
        Some(string) => Some(checked("settings", &string, allocator)?),
        None => None,
    };
    let set = options.texts("set")?;
    for entry in &set {
        checked("set", entry, allocator)?;
    }
    let capacity = options.capacity()?;
    let address_orders = options.count("orders", 1..=1000)?;
    let rounds = options.count("rounds", 1..=100_000)?.unwrap_or(1);
    let memory_limit = options.memory_limit()?;
    options.finish("replay")?;
    let asks_what_if = settings.is_some()
        || !set.is_empty()
        || allocator != AllocatorChoice::default()
        || capacity.is_some()
        || rounds > 1;

    let opened = source.open(false, memory_limit, work)?;
    work.begin(Stage::Replaying, 0);
    let options = ReplayOptions {
        settings,
        changes: (!set.is_empty()).then(|| set.join(",")),
        allocator,
        capacity,
        address_orders,
        rounds,
        memory_limit: Some(opened.memory_limit),
        progress: Some(&|progress| work.replayed(progress)),
        stop: work.stop.clone(),
        ..ReplayOptions::default()
    };
    let (snapshot, path) = (&opened.recording.snapshot, source.path());
    let devices: Vec<Value> = match replay_devices(snapshot, &options) {
        Ok(mut reports) => {
            // The time of an RMM log says nothing about PyTorch's allocator: the program made other driver calls.
            if opened.recording.format == RecordingFormat::RmmLog {
                reports.iter_mut().for_each(|report| report.steady = None);
            }
            let reading = Reading {
                input_seconds: opened.input_seconds,
                parse_seconds: opened.parse_seconds,
                bytes_decompressed: opened.recording.bytes_decompressed,
                format: opened.recording.format,
            };
            reports.iter().map(|report| object(path, &reading, report)).collect()
        }
        // Nothing can be replayed, but the segments can be reported.
        Err(ReplayError::NoHistory) if !snapshot.segments.is_empty() && !asks_what_if => {
            segment_totals(snapshot).iter().map(|totals| segments_object(path, totals)).collect()
        }
        Err(error) => return Err(source.replay_error(&error)),
    };
    let devices: Vec<Value> = devices.into_iter().map(|object| device(source, object)).collect();
    Ok(Answer::new(json!({ "devices": devices })))
}

fn device(source: &Source<'_>, mut object: Value) -> Value {
    object["file"] = source.file_value();
    json!({ "object": object })
}

fn allocator(options: &mut Options) -> Result<AllocatorChoice> {
    let Some(name) = options.text("allocator")? else { return Ok(AllocatorChoice::default()) };
    AllocatorChoice::from_name(&name).ok_or_else(|| {
        let names = AllocatorChoice::ALL.map(AllocatorChoice::name).join(", ");
        Error::Option(format!("allocator is '{name}': it must be one of {names}"))
    })
}

/// The settings of a string, with the backend that is chosen by `allocator`.
fn checked(option: &str, string: &str, allocator: AllocatorChoice) -> Result<Settings> {
    let found = lint(string);
    let wrong = |message: String| Error::Option(format!("{option}: {message}"));
    let problems = found.problems;
    let settings = found.effective.ok_or_else(|| wrong(SettingsError { problems }.to_string()))?;
    let chosen = match settings.backend {
        Backend::Native => return Ok(settings),
        Backend::Paged => AllocatorChoice::Paged,
        Backend::CudaMallocAsync => AllocatorChoice::DriverPool,
    };
    if allocator == chosen {
        return Ok(settings);
    }
    let (backend, name) = (settings.backend.name(), chosen.name());
    Err(wrong(format!("`backend:{backend}` is another allocator: choose it with allocator=\"{name}\"")))
}
