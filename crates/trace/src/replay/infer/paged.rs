//! Inference for recordings of the paged allocator. They name their pools, and the entries of one call have one time,
//! so little has to be inferred: which pages were returned by a trim rather than reclaimed for a request.
//!
//! A recording does not contain trims that returned nothing, trims to a target, the release of a pool whose pages later
//! requests reclaimed, the progress of streams when pages were reclaimed (a page is unmapped only after its stream has
//! passed), and the actions of other threads in between. Recordings in which these mattered do not replay exactly.

use warpool::memory::Settings;
use warpool::memory::report::{Action, TraceEntry};

use super::limit::{LimitBounds, ReleaseCause, RetryBounds};
use super::{DEFAULT_POOL, Inference, InferredPools, InferredRelease, PoolIndex};
use crate::budget::{Budget, Charge, Exceeded, bytes_of};
use crate::cards::DeviceMemory;
use crate::replay::recording::{DeviceRecording, frees_segment, is_device_free};

impl Inference {
    /// For a recording of the paged allocator whose history is complete.
    pub fn of_paged(recording: DeviceRecording<'_>, settings: Settings, budget: &Budget) -> Result<Self, Exceeded> {
        let events = recording.events;
        let mut charge = Charge::new(budget);
        charge.add(bytes_of::<PoolIndex>(2 * events.len()) + bytes_of::<usize>(events.len()))?;
        let mut pools = InferredPools::default_only();
        let mut pool_of = |event: &TraceEntry| event.pool.map_or(DEFAULT_POOL, |pool| pools.recorded(pool));
        let of = |action: Action| events.iter().filter(move |event| event.action == action);
        let allocation_pools = of(Action::Alloc).map(&mut pool_of).collect();
        let failed_request_pools = of(Action::Oom).map(&mut pool_of).collect();
        let releases = trims(events)
            .into_iter()
            .map(|trim| {
                let freed = events[trim.clone()].iter().filter(|event| frees_segment(event.action));
                let mut of_pools: Vec<PoolIndex> = freed.map(&mut pool_of).collect();
                of_pools.sort_unstable();
                of_pools.dedup();
                let cause = match of_pools[..] {
                    [pool] if pool != DEFAULT_POOL => ReleaseCause::PoolReleased(pool),
                    _ => ReleaseCause::Trim,
                };
                of_pools.retain(|&pool| pool != DEFAULT_POOL);
                InferredRelease { events: trim, cause, private_pools: of_pools }
            })
            .collect();
        let limit = memory_limit(events, &settings);
        Ok(Self {
            limit,
            pools,
            allocation_pools,
            failed_request_pools,
            releases,
            // It retries without releasing memory, which the recording does not show.
            retries: RetryBounds { least: 0, most: u64::MAX },
            charge: Some(charge),
            ..Self::none(settings)
        })
    }
}

/// The memory limit that failed requests show. Recorded settings contain it directly.
fn memory_limit(events: &[TraceEntry], settings: &Settings) -> Option<LimitBounds> {
    /// Physical memory comes in pages of at least this size.
    const PAGE: u64 = 2 << 20;
    if settings.memory_cap_bytes.is_some() || settings.per_process_memory_fraction < 1.0 {
        return None;
    }
    let (mut reserved, mut at_least, mut below) = (0_u64, 0, u64::MAX);
    let (mut device_had, mut usable) = (Vec::new(), None);
    for event in events {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => reserved = reserved.saturating_add(event.size),
            Action::SegmentFree | Action::SegmentUnmap => reserved = reserved.saturating_sub(event.size),
            Action::Oom => {
                // It lacked at most the pages of the whole request: reachable free pages may have covered a part of it.
                let pages = event.size.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
                below = below.min(reserved.saturating_add(pages));
                let has = Some(reserved.saturating_add(event.addr)).filter(|_| is_device_free(event.addr));
                usable = usable.max(has);
                device_had.extend(has.filter(|_| event.addr < pages));
            }
            _ => {}
        }
        at_least = at_least.max(reserved);
    }
    let card = || DeviceMemory::inferred(usable, at_least).bytes_total;
    (at_least < below && below < u64::MAX).then(|| LimitBounds::new(at_least, below, &device_had, card))
}

/// Runs of segment events that a trim made. Segment events of a request come directly before its entry and have its
/// time.
fn trims(events: &[TraceEntry]) -> Vec<std::ops::Range<usize>> {
    let (mut trims, mut open): (Vec<std::ops::Range<usize>>, Vec<usize>) = (Vec::new(), Vec::new());
    let mut close = |open: &mut Vec<usize>, time_us: Option<i64>| {
        for at in open.drain(..).filter(|&at| Some(events[at].time_us) != time_us) {
            match trims.last_mut() {
                Some(last) if last.end == at && events[last.start].time_us == events[at].time_us => last.end = at + 1,
                _ => trims.push(at..at + 1),
            }
        }
    };
    for (at, event) in events.iter().enumerate() {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap | Action::SegmentFree | Action::SegmentUnmap => open.push(at),
            Action::Alloc | Action::Oom => close(&mut open, Some(event.time_us)),
            Action::FreeRequested | Action::Snapshot | Action::Annotate => close(&mut open, None),
            Action::FreeCompleted => {}
        }
    }
    close(&mut open, None);
    trims.retain(|trim| frees_segment(events[trim.start].action));
    trims
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_events_of_a_request_have_its_time() {
        let entry = |action, time_us| TraceEntry::new(action, 0, 512, 0, time_us);
        let (map, unmap, alloc) = (Action::SegmentMap, Action::SegmentUnmap, Action::Alloc);
        let check = |events: &[(Action, i64)], expected: &[(usize, usize)]| {
            let events: Vec<TraceEntry> = events.iter().map(|&(action, time_us)| entry(action, time_us)).collect();
            let found: Vec<(usize, usize)> = trims(&events).iter().map(|trim| (trim.start, trim.end)).collect();
            assert_eq!(found, expected, "{events:?}");
        };
        check(&[(map, 1), (alloc, 1), (unmap, 2), (map, 2), (alloc, 2)], &[]);
        check(&[(map, 1), (alloc, 1), (unmap, 2), (unmap, 2), (unmap, 3), (map, 3), (alloc, 3)], &[(2, 4)]);
        check(&[(map, 1), (alloc, 1), (unmap, 1), (Action::FreeRequested, 1)], &[(2, 3)]);
        check(&[(unmap, 1), (Action::FreeCompleted, 1), (unmap, 1), (map, 1), (alloc, 1), (unmap, 5)], &[(5, 6)]);
    }
}
