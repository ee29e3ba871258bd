//! One setting for many ranks. Candidates are tried on one recording of each group of equal ranks, the one that limits
//! the group; the best is then replayed on every other recording.

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use warpool_trace::explain::ExplainOptions;
use warpool_trace::ranks::Ranks;
use warpool_trace::replay::{DeviceReplay, DeviceReplays, ReplayOptions};
use warpool_trace::tune::{Candidate, TrialOptions, try_all};

use super::Args;
use crate::inputs::{begin, in_parallel_on, show_progress};
use crate::output::Result;
use crate::ranks::{self, Unread};

/// Up to this many recordings, candidates are tried on all.
const TRIED_MAX: usize = 8;

/// On which recordings candidates are tried, and on which the best is checked.
pub(super) struct Chosen {
    pub tried: Vec<PathBuf>,
    pub checked: Vec<PathBuf>,
    /// Why others cannot be read, with their names.
    pub unreadable: Vec<String>,
}

/// The result of the check.
pub(super) struct Checked {
    /// How many recordings.
    pub recordings: usize,
    /// Those on which it does not fit, or which cannot be replayed.
    pub not_on: Vec<String>,
}

pub(super) fn choose(files: Vec<PathBuf>, args: &Args, quiet: bool) -> Result<Chosen> {
    if files.len() <= TRIED_MAX {
        return Ok(Chosen { tried: files, checked: Vec::new(), unreadable: Vec::new() });
    }
    let options = ExplainOptions { capacity: args.capacity.bytes(), ..ExplainOptions::default() };
    let ranks = Ranks::new(ranks::summaries(&files, args.jobs, args.memory_limit, &options, quiet)?);
    let (mut groups, mut tried) = (Vec::new(), Vec::new());
    for &row in &ranks.limiting {
        let row = &ranks.rows[row];
        let file = PathBuf::from(&row.summary.file);
        if tried.len() < TRIED_MAX && !groups.contains(&row.group) {
            groups.push(row.group);
            if !tried.contains(&file) {
                tried.push(file);
            }
        }
    }
    let unreadable: Vec<(PathBuf, String)> = ranks
        .unreadable()
        .map(|(row, error)| (PathBuf::from(&row.summary.file), format!("{}: {error}", row.summary.file)))
        .collect();
    let is_left = |file: &PathBuf| !tried.contains(file) && unreadable.iter().all(|(other, _)| other != file);
    let checked = files.iter().filter(|file| is_left(file)).cloned().collect();
    // In the order of the arguments.
    let tried = files.iter().filter(|file| tried.contains(file)).cloned().collect();
    Ok(Chosen { tried, checked, unreadable: unreadable.into_iter().map(|(_, message)| message).collect() })
}

/// Replays a candidate on the recordings, a few at once.
pub(super) fn check(files: &[PathBuf], candidate: &Candidate, args: &Args, quiet: bool) -> Result<Checked> {
    let gate = args.jobs.gate(files.len());
    let work = |file: &Path, bar: &ProgressBar| {
        let one = |limit| fits(file, candidate, args, limit, bar);
        let found = match args.memory_limit {
            Some(limit) => one(limit),
            None => gate.within(one, Unread::needs_more),
        };
        found.map_err(|error| error.message().to_owned())
    };
    let mut not_on = Vec::new();
    in_parallel_on(args.jobs.jobs(files.len()), files, quiet, work, |index, result| {
        match result {
            Ok(true) => {}
            Ok(false) => not_on.push(files[index].to_string_lossy().into_owned()),
            Err(error) => not_on.push(format!("{} ({error})", files[index].display())),
        }
        Ok(())
    })?;
    Ok(Checked { recordings: files.len(), not_on })
}

fn fits(
    file: &Path,
    candidate: &Candidate,
    args: &Args,
    memory_limit: u64,
    bar: &ProgressBar,
) -> std::result::Result<bool, Unread> {
    let recording = ranks::read(file, false, memory_limit, bar)?;
    begin(bar, "replaying");
    let options = ReplayOptions {
        memory_limit: Some(ranks::replay_limit(&recording, memory_limit)),
        progress: Some(&|progress| show_progress(bar, progress)),
        ..ReplayOptions::default()
    };
    let replays = DeviceReplays::new(&recording.snapshot, &options).map_err(|error| ranks::replay_error(&error))?;
    let devices: Vec<&DeviceReplay<'_>> = replays.devices().iter().collect();
    let options =
        TrialOptions { capacity: args.capacity.bytes(), address_orders: args.orders, threads: 1, progress: None };
    let reports = try_all(&devices, std::slice::from_ref(candidate), &options);
    let reports = reports.map_err(|error| ranks::replay_error(&error))?;
    Ok(reports.iter().flatten().all(|report| report.orders.all_fit()))
}
