//! Finds when `expandable_segments` was switched while a program ran. A snapshot has only the last value. Which way
//! memory came tells the value at that moment; in between it shows only in which block is chosen, and how it is split,
//! later.
//!
//! So a replay begins the way the first memory came. Where it leaves the recording, a switch is put before one of the
//! last allocations, whichever lets it get furthest; if that leads nowhere, another. That is a search and no proof; the
//! proof is a replay that comes out as recorded.

use std::collections::{BTreeMap, BinaryHeap};

use warpool::memory::{Action, SegmentInfo, TraceEntry};

use super::survey::is_fetch;

/// More switches than that are not looked for.
const SWITCHES_MAX: usize = 32;

/// A switch is looked for among so many allocations before a difference; among as many before those, if none of them
/// explains it.
const NEAR: usize = 128;

/// How many events are replayed in search of them: some seconds' worth. A long recording that switches do not explain
/// must come to an end.
const EVENTS_MAX: usize = 20_000_000;

/// Whether some memory came otherwise than the settings at the end say.
pub(super) fn are_likely(events: &[TraceEntry], segments: &[&SegmentInfo], expandable_at_end: bool) -> bool {
    segments.iter().any(|segment| segment.is_expandable != expandable_at_end)
        || events.iter().filter(|event| is_fetch(event.action)).any(|event| is_growth(event) != expandable_at_end)
}

/// The value that a recording began with, as far as it shows.
pub(super) fn first_value(events: &[TraceEntry]) -> Option<bool> {
    events.iter().find(|event| is_fetch(event.action)).map(is_growth)
}

fn is_growth(event: &TraceEntry) -> bool {
    event.action == Action::SegmentMap
}

/// Looks for the allocations before which it was switched. `first_difference` replays with some, and says at which
/// event that left the recording.
pub(super) fn search<E>(
    events: &[TraceEntry],
    mut first_difference: impl FnMut(&[u32]) -> Result<Option<usize>, E>,
) -> Result<Vec<u32>, E> {
    let Some(reached) = first_difference(&[])? else { return Ok(Vec::new()) };
    let mut events_replayed = reached;
    let mut best = (reached, Vec::new());
    // The furthest is followed first, and the next one where that leads nowhere.
    let mut open = BinaryHeap::from([best.clone()]);
    while let Some((reached, mut switches)) = open.pop() {
        // Of those that get as far, the last: one for each distance.
        let mut further = BTreeMap::new();
        for near in candidates(events, &switches, reached).chunks(NEAR) {
            for &switch in near {
                switches.push(switch);
                let Some(next) = first_difference(&switches)? else { return Ok(switches) };
                switches.pop();
                events_replayed += next;
                if next > reached {
                    further.entry(next).or_insert(switch);
                }
            }
            if !further.is_empty() || events_replayed > EVENTS_MAX {
                break;
            }
        }
        if events_replayed > EVENTS_MAX {
            break;
        }
        for (next, switch) in further {
            let longer: Vec<u32> = switches.iter().copied().chain([switch]).collect();
            if next > best.0 {
                best = (next, longer.clone());
            }
            if longer.len() < SWITCHES_MAX {
                open.push((next, longer));
            }
        }
    }
    Ok(best.1)
}

/// The allocations before which another switch may explain a difference at `event`, the last first.
fn candidates(events: &[TraceEntry], before: &[u32], event: usize) -> Vec<u32> {
    let is_alloc = |event: &TraceEntry| event.action == Action::Alloc;
    // New memory stands before the allocation that it was for.
    let end = events.iter().skip(event).position(is_alloc).map_or(events.len(), |behind| event + behind + 1);
    let first = before.last().map_or(0, |&switch| switch as usize + 1);
    let found = (first..end).rev().filter(|&at| is_alloc(&events[at]));
    found.map(|at| u32::try_from(at).expect("fewer than 2^32 events")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(action: Action) -> TraceEntry {
        TraceEntry::new(action, 0, 512, 0, 0)
    }

    #[test]
    fn switches_are_put_where_a_replay_gets_furthest() {
        let events: Vec<TraceEntry> = (0..100).map(|_| entry(Action::Alloc)).collect();
        // What a replay shows five events after it first chose otherwise.
        let check = |expected: &[u32]| {
            let value = |switches: &[u32], at: u32| switches.iter().filter(|&&switch| switch <= at).count() % 2;
            let found = search(&events, |tried| {
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
    fn the_way_memory_came_tells_the_value() {
        let events = [Action::Alloc, Action::SegmentAlloc, Action::Alloc, Action::SegmentMap].map(entry);
        assert_eq!(first_value(&events), Some(false));
        assert!(are_likely(&events, &[], true) && are_likely(&events, &[], false));
        assert!(!are_likely(&events[..3], &[], false) && are_likely(&events[..3], &[], true));
        assert_eq!(first_value(&events[2..3]), None);
    }
}
