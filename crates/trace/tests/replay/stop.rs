//! Replays that are stopped early.

use std::cell::Cell;

use warpool_trace::Stop;
use warpool_trace::explain::{ExplainOptions, explain};
use warpool_trace::replay::{DeviceReplay, DeviceReplays, ReplayError, ReplayOptions, ReplayProgress, replay};
use warpool_trace::timeline::{TimelineOptions, timelines};
use warpool_trace::tune::{TrialOptions, candidates, tune};

use crate::common::recording;

#[test]
fn stopped_replay_makes_no_further_round() {
    let recording = recording("pools.native.pickle.xz");
    let (stop, seen) = (Stop::default(), Cell::new(None));
    let progress = |progress: ReplayProgress| {
        seen.set(Some(progress.done));
        // In the third round of a thousand.
        if progress.done > 2 * progress.total / 1000 && progress.total > progress.done {
            stop.stop();
        }
    };
    let options = ReplayOptions { rounds: 1000, progress: Some(&progress), stop: stop.clone(), ..Default::default() };
    let events = recording.snapshot.traces[0].len() as u64;
    assert!(matches!(replay(&recording.snapshot, &options), Err(ReplayError::Stopped)));
    assert!(seen.get().is_some_and(|done| done <= 4 * events), "{:?} events of {events} each round", seen.get());
}

/// Also those on threads of their own, which report no progress.
#[test]
fn stop_ends_all_that_is_asked_of_a_recording() {
    let recording = recording("verdict.fragmentation.pickle.xz");
    let snapshot = &recording.snapshot;
    let stop = Stop::default();
    let replays = DeviceReplays::new(snapshot, &ReplayOptions { stop: stop.clone(), ..ReplayOptions::default() });
    let replays = replays.expect("not stopped yet");
    let devices: Vec<&DeviceReplay<'_>> = replays.devices().iter().collect();
    let trials = TrialOptions { capacity: None, address_orders: 4, threads: 2, progress: None };
    tune(&devices, candidates(&devices), &trials).expect("not stopped yet");
    stop.stop();
    assert!(matches!(tune(&devices, candidates(&devices), &trials), Err(ReplayError::Stopped)));
    let explain_options = ExplainOptions { stop: stop.clone(), ..ExplainOptions::default() };
    assert!(matches!(explain(snapshot, &explain_options), Err(ReplayError::Stopped)));
    let timeline_options = TimelineOptions { explain: explain_options, ..TimelineOptions::default() };
    assert!(matches!(timelines(snapshot, &timeline_options), Err(ReplayError::Stopped)));
}
