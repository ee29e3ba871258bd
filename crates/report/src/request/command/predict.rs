//! `predict`: the requests of a program that ran without a GPU, under settings and on cards.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use warpool::driver::sim::SimDevice;
use warpool::memory::Settings;
use warpool::memory::report::{Frame, Stack, Stats};
use warpool::memory::settings::Backend;
use warpool_trace::cards::Card;
use warpool_trace::replay::AllocatorChoice;
use warpool_trace::requests::{Conditions, OutOfMemory, Outcome, Placed, Requests};
use warpool_trace::{Stop, write_snapshot};

use crate::request::answer::Answer;
use crate::request::error::{Error, Result};
use crate::request::input::Source;
use crate::request::options::Options;
use crate::request::work::{Stage, Work};

/// The search for the smallest device ends at this share of what is reserved, but not below a segment's granularity.
const TOLERANCE_SHARE: u64 = 512;
const TOLERANCE_LEAST: u64 = 2 << 20;

/// `device`: whether it fits on the device that was named, with the first settings; the request that ran out of memory
/// there. `settings`: what it needs with each. `cards`: which it fits on. With `out`, the snapshot of the first
/// settings is written there: on the named device if it fits, else on one with enough memory.
///
/// The first source is the steps, the second an object with `frames`, lists of name, file and line, and `stacks`, lists
/// of numbers of frames.
pub fn answer(mut options: Options, steps: &Source<'_>, stacks: &Source<'_>, work: &Work) -> Result<Answer> {
    let capacity = options.capacity()?;
    let bytes_context = options.size("context")?.unwrap_or_else(|| SimDevice::h200().bytes_context);
    let strings = options.texts("settings")?;
    let out = options.text("out")?;
    options.finish("predict")?;
    let settings = strings.iter().map(|string| conditions(string, bytes_context)).collect::<Result<Vec<_>>>()?;
    let Some(first) = settings.first() else {
        return Err(Error::Option("settings: at least one string is needed".to_owned()));
    };
    let requests = read(steps, stacks)?;
    let runs = Runs { requests: &requests, stop: &work.stop };

    work.begin(Stage::Replaying, settings.len() as u64 + 1);
    let named = Conditions { capacity, ..first.clone() };
    let on_device = runs.place(&named)?;
    let oom = on_device.outcome.out_of_memory.clone();
    let placed = if oom.is_some() { runs.place(first)? } else { on_device };
    let bytes_written = out.map(|out| write(&placed, Path::new(&out))).transpose()?;
    drop(placed);

    let mut needs = Vec::new();
    for (number, conditions) in settings.iter().enumerate() {
        work.set(number as u64 + 1, settings.len() as u64 + 1);
        needs.push(runs.needs(conditions, capacity)?);
    }
    let rows: Vec<Value> = needs.iter().zip(&strings).map(|(needs, string)| needs.object(string)).collect();
    let cards: Vec<Value> = Card::ALL
        .iter()
        .map(|card| {
            let fits: Vec<bool> = needs.iter().map(|needs| needs.smallest <= card.bytes_total()).collect();
            json!({ "key": card.key, "name": card.name, "bytes": card.bytes_total(), "fits": fits })
        })
        .collect();
    Ok(Answer::new(json!({
        "device": {
            "bytes": capacity,
            "context_bytes": bytes_context,
            "fits": oom.is_none(),
            "out_of_memory": oom.as_ref().map(|oom| out_of_memory(&requests, oom)),
        },
        "settings": rows,
        "cards": cards,
        "snapshot_bytes": bytes_written,
    })))
}

/// The conditions of a settings string, which may name Warpool's backend; the device has ample memory.
fn conditions(string: &str, bytes_context: u64) -> Result<Conditions> {
    let settings = Settings::parse(string).map_err(|error| Error::Option(format!("settings: {error}")))?;
    let allocator = match settings.backend {
        Backend::Native => AllocatorChoice::Caching,
        Backend::Paged => AllocatorChoice::Paged,
        Backend::CudaMallocAsync => AllocatorChoice::DriverPool,
    };
    Ok(Conditions { allocator, settings, capacity: None, bytes_context })
}

fn read(steps: &Source<'_>, stacks: &Source<'_>) -> Result<Requests> {
    let wrong = |what: &str| Error::Internal(format!("the request is wrong: {what}"));
    let (Source::Bytes(steps), Source::Bytes(stacks)) = (steps, stacks) else {
        return Err(wrong("predict takes bytes, not files"));
    };
    let table: Value = serde_json::from_slice(stacks).map_err(|error| wrong(&error.to_string()))?;
    let rows = |key: &str| table[key].as_array().ok_or_else(|| wrong("there are no stacks"));
    let frame = |row: &Value| {
        let (name, filename, line) = (row[0].as_str()?, row[1].as_str()?, row[2].as_u64()?);
        Some(Frame { name: name.to_owned(), filename: filename.to_owned(), line })
    };
    let frames: Option<Vec<Frame>> = rows("frames")?.iter().map(frame).collect();
    let frames = frames.ok_or_else(|| wrong("a frame is not a name, a file and a line"))?;
    let stack = |row: &Value| {
        let frame = |number: &Value| frames.get(usize::try_from(number.as_u64()?).ok()?).cloned();
        let frames: Option<Vec<Frame>> = row.as_array()?.iter().map(frame).collect();
        Some(Arc::from(frames?))
    };
    let stacks: Option<Vec<Stack>> = rows("stacks")?.iter().map(stack).collect();
    let stacks = stacks.ok_or_else(|| wrong("a stack is not a list of frames"))?;
    Requests::from_bytes(steps, stacks).map_err(|error| wrong(&error.to_string()))
}

fn write(placed: &Placed, path: &Path) -> Result<u64> {
    let failed = |source| Error::File { path: path.to_owned(), source };
    let file = File::create(path).map_err(failed)?;
    write_snapshot(&placed.snapshot, &file).map_err(failed)?;
    Ok(file.metadata().map_err(failed)?.len())
}

fn out_of_memory(requests: &Requests, oom: &OutOfMemory) -> Value {
    let warpool_trace::requests::Request::Alloc { stack, device, .. } = requests.steps[oom.step].request else {
        return Value::Null;
    };
    json!({
        "step": oom.step,
        "steps": requests.steps.len(),
        "device": device,
        "time_us": requests.steps[oom.step].time_us,
        "stack": stack,
        "requested_bytes": oom.report.bytes_requested,
        "allocated_bytes": oom.report.bytes_allocated,
        "reserved_bytes": oom.report.bytes_reserved,
        "message": oom.report.to_string(),
    })
}

/// Runs of one program.
struct Runs<'a> {
    requests: &'a Requests,
    stop: &'a Stop,
}

/// What a program needs under some settings; of several devices the one that needs most.
struct Needs {
    allocator: AllocatorChoice,
    stats: Vec<Stats>,
    /// The smallest device on which it completes, with the context, and how exact that is.
    smallest: u64,
    tolerance: u64,
    /// On the device that was named.
    on_device: Option<bool>,
}

impl Runs<'_> {
    fn place(&self, conditions: &Conditions) -> Result<Placed> {
        self.done(self.requests.place(conditions, self.stop))
    }

    fn run(&self, conditions: &Conditions) -> Result<Outcome> {
        self.done(self.requests.run(conditions, self.stop))
    }

    fn done<T>(&self, result: warpool::Result<Option<T>>) -> Result<T> {
        result.map_err(|error| Error::Input(error.to_string()))?.ok_or(Error::Stopped)
    }

    fn needs(&self, conditions: &Conditions, capacity: Option<u64>) -> Result<Needs> {
        let outcome = self.run(conditions)?;
        if let Some(oom) = outcome.out_of_memory {
            return Err(Error::Input(format!("the program needs more than any device has: {}", oom.report)));
        }
        let most = |of: fn(&Stats) -> u64| outcome.stats.iter().map(of).max().unwrap_or(0);
        let context = conditions.bytes_context;
        let enough = most(|stats| stats.reserved_bytes.all.peak).saturating_add(context);
        let live = most(|stats| stats.allocated_bytes.all.peak).saturating_add(context);
        let tolerance = (enough / TOLERANCE_SHARE).max(TOLERANCE_LEAST);
        let smallest = self.requests.smallest(conditions, live, enough, tolerance, self.stop);
        let smallest = self.done(smallest)?;
        let on_device = match capacity {
            None => None,
            Some(capacity) if capacity >= enough => Some(true),
            Some(capacity) if capacity < live => Some(false),
            Some(_) => Some(self.run(&Conditions { capacity, ..conditions.clone() })?.out_of_memory.is_none()),
        };
        Ok(Needs { allocator: conditions.allocator, stats: outcome.stats, smallest, tolerance, on_device })
    }
}

impl Needs {
    fn object(&self, settings: &str) -> Value {
        let most = |of: fn(&Stats) -> u64| self.stats.iter().map(of).max().unwrap_or(0);
        json!({
            "settings": settings,
            "allocator": self.allocator.name(),
            "peak_reserved_bytes": most(|stats| stats.reserved_bytes.all.peak),
            "peak_allocated_bytes": most(|stats| stats.allocated_bytes.all.peak),
            "peak_requested_bytes": most(|stats| stats.requested_bytes.all.peak),
            "peak_segments": most(|stats| stats.segment.all.peak),
            "smallest_device_bytes": self.smallest,
            "smallest_device_tolerance_bytes": self.tolerance,
            "fits": self.on_device,
            "devices": self.stats.iter().map(|stats| json!({
                "peak_reserved_bytes": stats.reserved_bytes.all.peak,
                "peak_allocated_bytes": stats.allocated_bytes.all.peak,
            })).collect::<Vec<Value>>(),
        })
    }
}
