//! Finds the events at which a program changed `expandable_segments`. A snapshot contains only the last value. The kind
//! of a new segment shows the value at that event; in between it shows only in which block is chosen and how it is
//! split.
//!
//! A replay starts with the value that the first segment shows. Where it differs from the recording, a change is
//! assumed before the recent allocation that lets the replay get furthest, and the search goes on from there. This is a
//! search heuristic: only a replay that reproduces the whole recording confirms its result.

use std::collections::{BTreeMap, BinaryHeap};

use warpool::memory::report::{Action, TraceEntry};

use crate::replay::recording::{DeviceRecording, allocates_segment};

/// No more changes than this are searched for.
const TOGGLES_MAX: usize = 32;

/// A change is searched for among this many allocations before a difference; if none of them explains it, among as many
/// before those.
const NEAR: usize = 128;

/// The most events that the search replays, some seconds' worth, so that it ends for a long recording that changes do
/// not explain.
const EVENTS_MAX: usize = 20_000_000;

/// Whether some segments contradict the value at the end.
pub(in crate::replay) fn are_likely(recording: DeviceRecording<'_>, expandable_at_end: bool) -> bool {
    let allocations = recording.events.iter().filter(|event| allocates_segment(event.action));
    recording.segments.iter().any(|segment| segment.is_expandable != expandable_at_end)
        || allocations.into_iter().any(|event| is_expandable(event) != expandable_at_end)
}

/// The value that the first segment shows.
pub(in crate::replay) fn first_value(events: &[TraceEntry]) -> Option<bool> {
    events.iter().find(|event| allocates_segment(event.action)).map(is_expandable)
}

fn is_expandable(event: &TraceEntry) -> bool {
    event.action == Action::SegmentMap
}

/// Searches for the allocations before which the value changed. `first_difference` replays with some changes and
/// returns the event at which that differs from the recording. Preparing a replay takes as long as `events_to_start`
/// events.
pub(in crate::replay) fn search<E>(
    events: &[TraceEntry],
    events_to_start: usize,
    mut first_difference: impl FnMut(&[u32]) -> Result<Option<usize>, E>,
) -> Result<Vec<u32>, E> {
    let Some(reached) = first_difference(&[])? else { return Ok(Vec::new()) };
    let mut events_replayed = reached;
    let mut best = (reached, Vec::new());
    // The one that gets furthest is tried first.
    let mut open = BinaryHeap::from([best.clone()]);
    while let Some((reached, mut toggles)) = open.pop() {
        // Among those that get equally far, only the last is kept.
        let mut further = BTreeMap::new();
        for near in candidates(events, &toggles, reached).chunks(NEAR) {
            for &toggle in near {
                toggles.push(toggle);
                let Some(next) = first_difference(&toggles)? else { return Ok(toggles) };
                toggles.pop();
                events_replayed = events_replayed.saturating_add(next).saturating_add(events_to_start);
                if next > reached {
                    further.entry(next).or_insert(toggle);
                }
                if events_replayed > EVENTS_MAX {
                    break;
                }
            }
            if !further.is_empty() || events_replayed > EVENTS_MAX {
                break;
            }
        }
        if events_replayed > EVENTS_MAX {
            break;
        }
        for (next, toggle) in further {
            let longer: Vec<u32> = toggles.iter().copied().chain([toggle]).collect();
            if next > best.0 {
                best = (next, longer.clone());
            }
            if longer.len() < TOGGLES_MAX {
                open.push((next, longer));
            }
        }
    }
    Ok(best.1)
}

/// The allocations before which a further change may explain a difference at `event`, the last first.
fn candidates(events: &[TraceEntry], toggles: &[u32], event: usize) -> Vec<u32> {
    let is_alloc = |event: &TraceEntry| event.action == Action::Alloc;
    // The event may be the new segment, which is recorded before its allocation.
    let end = events.iter().skip(event).position(is_alloc).map_or(events.len(), |behind| event + behind + 1);
    let first = toggles.last().map_or(0, |&toggle| toggle as usize + 1);
    let found = (first..end).rev().filter(|&at| is_alloc(&events[at]));
    found.map(|at| u32::try_from(at).expect("fewer than 2^32 events")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::recording::Survey;

    fn entry(action: Action) -> TraceEntry {
        TraceEntry::new(action, 0, 512, 0, 0)
    }

    #[test]
    fn toggles_are_found_where_a_replay_gets_furthest() {
        let events: Vec<TraceEntry> = (0..100).map(|_| entry(Action::Alloc)).collect();
        // A replay differs five events after the value is wrong.
        let check = |expected: &[u32]| {
            let value = |toggles: &[u32], at: u32| toggles.iter().filter(|&&toggle| toggle <= at).count() % 2;
            let found = search(&events, 1, |tried| {
                let wrong = (0..100).find(|&at| value(tried, at) != value(expected, at));
                Ok::<_, ()>(wrong.map(|at| at as usize + 5).filter(|&at| at < 100))
            });
            assert_eq!(found, Ok(expected.to_vec()));
        };
        check(&[]);
        check(&[40]);
        check(&[0, 17, 60]);
    }

    #[test]
    fn kind_of_new_segments_shows_the_value() {
        let events = [Action::Alloc, Action::SegmentAlloc, Action::Alloc, Action::SegmentMap].map(entry);
        let likely = |events: &[TraceEntry], at_end| {
            let survey = &Survey::new(0, events, &[]).expect("plausible");
            are_likely(DeviceRecording { device: 0, events, segments: &[], survey, steady_from_us: None }, at_end)
        };
        assert_eq!(first_value(&events), Some(false));
        assert!(likely(&events, true) && likely(&events, false));
        assert!(!likely(&events[..3], false) && likely(&events[..3], true));
        assert_eq!(first_value(&events[2..3]), None);
    }
}
