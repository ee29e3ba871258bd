//! One forward pass over a recording with a [`RecordedHeap`]: where every allocation lay, what was allocated from the
//! driver and released to it, and which segments cannot have been in one pool. Nothing is inferred here; `pools.rs` and
//! `limit.rs` do that.

use rustc_hash::FxHashSet;
use warpool::memory::report::{Action, SegmentKind, TraceEntry};
use warpool::memory::{MemPoolId, SizeRules};

use super::heap::{RecordedHeap, RecordedSegment, SegmentId};
use super::rules::RecordedRules;
use crate::budget::{Charge, Exceeded, bytes_of};
use crate::cards::DeviceMemory;
use crate::replay::recording::{DeviceRecording, allocates_segment, frees_segment, is_device_free};

/// The segment of an allocation is unknown: the recording contradicts itself there.
pub(super) const SEGMENT_UNKNOWN: SegmentId = SegmentId::MAX;

/// Consecutive events in which memory was released to the driver.
#[derive(Clone, Debug)]
pub(super) struct Release {
    pub events: std::ops::Range<usize>,
    /// The released segments, in order.
    pub segments: Vec<SegmentId>,
    /// What changed since the release before it in the segments that could have been released too: how often each is to
    /// be added or removed. Listing all of them at each release would take too long.
    pub kept_changes: Vec<(SegmentId, i32)>,
    pub bytes_reserved_before: u64,
    /// The request directly after it, if that needed new memory or failed.
    pub next_request: Option<NextRequest>,
    /// A small segment was released before a large one, as when a private pool is released.
    pub small_first: bool,
    /// It followed the event before it within a millisecond.
    pub immediate: bool,
}

/// A request directly after a release, which needed new memory or failed.
#[derive(Clone, Debug)]
pub(super) struct NextRequest {
    /// The size of the segment for it, which a limit is compared with.
    pub segment_bytes: u64,
    /// Segments that could have served it before the release.
    pub could_serve: Vec<SegmentId>,
    /// Segments that could have served it after the release.
    pub could_serve_after: Vec<SegmentId>,
    pub failed: bool,
    /// If it did not fail, its number among the allocations.
    pub allocation: usize,
}

/// Memory was allocated or mapped from the driver for a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriverAllocation {
    pub bytes_reserved_before: u64,
    /// The size of the segment for the request, which a limit is compared with.
    pub segment_bytes: u64,
    /// Whether an unused large segment was cached, which garbage collection could have released.
    pub had_unused_segment: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FailedRequest {
    pub bytes_reserved: u64,
    /// The size of the segment for it, which a limit is compared with.
    pub segment_bytes: u64,
    /// The bytes requested from the driver: whole chunks for an expandable segment.
    pub driver_bytes: u64,
    /// The free memory of the device.
    pub device_free: u64,
}

impl FailedRequest {
    /// The memory that the device had for the program (reserved and free), if the recording contains it.
    pub fn bytes_usable(&self) -> Option<u64> {
        is_device_free(self.device_free).then(|| self.bytes_reserved.saturating_add(self.device_free))
    }

    /// The same if the device was full, and no limit refused the request.
    pub fn device_had(&self) -> Option<u64> {
        self.bytes_usable().filter(|_| self.device_free < self.driver_bytes)
    }
}

/// Two segments that cannot have been in one pool: a block of `passed_over` would have been preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolConflict {
    pub chosen: SegmentId,
    pub passed_over: SegmentId,
    /// Whether the chosen segment was new memory.
    pub chosen_is_new: bool,
    /// The block that was passed over.
    pub addr: u64,
    /// By how much that block must have been smaller to be passed over.
    pub excess: u64,
}

/// What a pass over the events found.
#[derive(Debug, Default)]
pub(super) struct Observations {
    /// The segment of each allocation, in their order.
    pub allocation_segments: Vec<SegmentId>,
    pub segments: Vec<RecordedSegment>,
    pub conflicts: Vec<PoolConflict>,
    pub releases: Vec<Release>,
    pub driver_allocations: Vec<DriverAllocation>,
    pub failed_requests: Vec<FailedRequest>,
    pub peak_reserved_bytes: u64,
    /// Events that do not match the state before them.
    pub mismatches: u64,
    /// For the memory of all this.
    pub charge: Option<Charge>,
}

impl Observations {
    /// The device, as far as the failed requests show.
    pub fn device_memory(&self, bytes_reserved: u64) -> DeviceMemory {
        let usable = self.failed_requests.iter().filter_map(FailedRequest::bytes_usable).max();
        DeviceMemory::inferred(usable, bytes_reserved)
    }
}

/// Passes over the events from the state in `heap`. The segments of the snapshot name their pools.
///
/// `pauses_end_releases`: a pause between two freed segments separates two releases.
pub(super) fn observe(
    recording: DeviceRecording<'_>,
    mut heap: RecordedHeap,
    pauses_end_releases: bool,
) -> Result<Observations, Exceeded> {
    let peak_reserved_bytes = heap.bytes_reserved();
    heap.keep_free_lists();
    heap.track_releasable();
    let charge = Charge::new(heap.budget());
    let pass = Pass {
        events: recording.events,
        pauses_end_releases,
        heap,
        found: Observations { peak_reserved_bytes, ..Observations::default() },
        conflicts: FxHashSet::default(),
        could_serve_before_wait: None,
        completions_end: 0,
        charge,
    };
    pass.run(recording)
}

struct Pass<'a> {
    events: &'a [TraceEntry],
    pauses_end_releases: bool,
    heap: RecordedHeap,
    found: Observations,
    /// The pairs of segments in `found.conflicts`.
    conflicts: FxHashSet<(SegmentId, SegmentId)>,
    /// Which segments could have served the request after the coming release, before its frees completed.
    could_serve_before_wait: Option<Vec<SegmentId>>,
    /// The end of the last run of completed frees that was examined for a release after it.
    completions_end: usize,
    charge: Charge,
}

impl Pass<'_> {
    fn run(mut self, recording: DeviceRecording<'_>) -> Result<Observations, Exceeded> {
        // Four bytes for each allocation, and less than that for what comes with it, while the lists grow.
        self.charge.add(bytes_of::<SegmentId>(3 * self.events.len()))?;
        let mut at = 0;
        while at < self.events.len() {
            self.charge.budget().check()?;
            if frees_segment(self.events[at].action) {
                at = self.observe_release(at);
            } else {
                let matches = self.observe_event(at);
                self.found.mismatches += u64::from(!matches);
                at += 1;
            }
        }
        self.charge.add(bytes_of::<RecordedSegment>(self.heap.segments().len()))?;
        self.found.segments = self.heap.segments().to_vec();
        for segment in recording.segments {
            if let Some(block) = self.heap.blocks().get(segment.address) {
                self.found.segments[block.segment as usize].pool = Some(segment.pool);
            }
        }
        self.found.charge = Some(self.charge);
        Ok(self.found)
    }

    /// Counts the memory of something that was found.
    fn count(&mut self, bytes: u64) {
        // The loop over the events fails if it is refused.
        let _ = self.charge.add(bytes);
    }

    /// Any event but a release. Returns whether it matches the state before it.
    fn observe_event(&mut self, at: usize) -> bool {
        let event = &self.events[at];
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => {
                if at == 0 || !allocates_segment(self.events[at - 1].action) {
                    self.observe_driver_allocation(at);
                } else {
                    grow(&mut self.heap, event);
                }
                self.found.peak_reserved_bytes = self.found.peak_reserved_bytes.max(self.heap.bytes_reserved());
                true
            }
            Action::Alloc => self.observe_alloc(at),
            Action::FreeRequested => self.heap.free_requested(event.addr).is_some(),
            Action::FreeCompleted => {
                if at >= self.completions_end && self.could_serve_before_wait.is_none() && is_late(self.events, at) {
                    self.could_serve_before_wait = self.could_serve_before_wait(at);
                }
                self.heap.free_completed(event.addr).is_some()
            }
            Action::Oom => {
                let segment_bytes = self.sizes().segment(event.size);
                let bytes_reserved = self.heap.bytes_reserved();
                let chunk = self.sizes().chunk(SizeRules::kind(self.sizes().round(event.size))).max(1);
                let driver_bytes = match self.rules().expandable_segments() {
                    true => segment_bytes.checked_next_multiple_of(chunk).unwrap_or(u64::MAX),
                    false => segment_bytes,
                };
                self.count(3 * size_of::<FailedRequest>() as u64);
                self.found.failed_requests.push(FailedRequest {
                    bytes_reserved,
                    segment_bytes,
                    driver_bytes,
                    device_free: event.addr,
                });
                true
            }
            Action::SegmentFree | Action::SegmentUnmap | Action::Snapshot | Action::Annotate => true,
        }
    }

    fn observe_alloc(&mut self, at: usize) -> bool {
        let event = &self.events[at];
        let in_new_memory = at > 0 && allocates_segment(self.events[at - 1].action);
        let size = self.sizes().round(event.size);
        let preferred = match in_new_memory {
            true => Vec::new(),
            false => self.heap.preferred_blocks(event.stream, size, Some(event.addr)),
        };
        let number = u32::try_from(at).expect("fewer than 2^32 events");
        let segment = self.heap.alloc(event.addr, event.size, number).map(|block| block.segment);
        self.found.allocation_segments.push(segment.unwrap_or(SEGMENT_UNKNOWN));
        if let Some(chosen) = segment {
            self.add_conflicts(chosen, false, size, &preferred);
        }
        segment.is_some()
    }

    /// The first memory for a request.
    fn observe_driver_allocation(&mut self, at: usize) {
        let event = &self.events[at];
        let Some(request) = request_behind(self.events, at) else {
            grow(&mut self.heap, event);
            return;
        };
        let size = self.sizes().round(request.size);
        let had_unused_segment =
            self.rules().garbage_collection_threshold() > 0.0 && self.heap.has_unused_large_segment();
        let segment_bytes = self.sizes().segment(size);
        let bytes_reserved_before = self.heap.bytes_reserved();
        let driver_allocation = DriverAllocation { bytes_reserved_before, segment_bytes, had_unused_segment };
        self.count(3 * size_of::<DriverAllocation>() as u64);
        self.found.driver_allocations.push(driver_allocation);
        // After a release the allocator does not search its free blocks again.
        let searched = at == 0 || !frees_segment(self.events[at - 1].action);
        let preferred = if searched { self.heap.preferred_blocks(request.stream, size, None) } else { Vec::new() };
        let chosen = grow(&mut self.heap, event);
        self.add_conflicts(chosen, true, size, &preferred);
    }

    /// Adds each pair once. Segments that are known to be in different pools are no conflict.
    fn add_conflicts(&mut self, chosen: SegmentId, chosen_is_new: bool, size: u64, preferred: &[(u64, SegmentId)]) {
        // In the list and in the set, while they grow, and in the data made from them.
        const BYTES: u64 = 3 * size_of::<PoolConflict>() as u64 + 128;
        let before = self.found.conflicts.len();
        let pool = |id: SegmentId| self.heap.segment(id).pool;
        for &(addr, passed_over) in preferred {
            let known_apart = pool(chosen).zip(pool(passed_over)).is_some_and(|(one, other)| one != other);
            if !known_apart && self.conflicts.insert((chosen, passed_over)) {
                let excess = self
                    .heap
                    .blocks()
                    .get(addr)
                    .map_or(0, |block| block.bytes.saturating_sub(size) + SizeRules::BLOCK_MULTIPLE);
                let conflict = PoolConflict { chosen, passed_over, chosen_is_new, addr, excess };
                self.found.conflicts.push(conflict);
            }
        }
        self.count((self.found.conflicts.len() - before) as u64 * BYTES);
    }

    /// One release, which starts at `first`. Returns the index of the event after it.
    fn observe_release(&mut self, first: usize) -> usize {
        let events = self.events;
        let end = self.end_of_release(first);
        let bytes_reserved_before = self.heap.bytes_reserved();
        let request = self.request_after_release(end);
        let before_wait = self.could_serve_before_wait.take();
        let could_serve_before =
            request.map(|(stream, size, _)| before_wait.unwrap_or_else(|| self.could_serve(stream, size)));
        let mut segments = Vec::new();
        for event in &events[first..end] {
            let segment = match event.action {
                Action::SegmentFree => self.heap.remove_segment(event.addr, event.size),
                Action::SegmentUnmap => self.heap.unmap(event.addr, event.size),
                _ => {
                    self.found.mismatches += u64::from(self.heap.free_completed(event.addr).is_none());
                    continue;
                }
            };
            match segment {
                Some(segment) => segments.push(segment),
                None => self.found.mismatches += 1,
            }
        }
        let next_request = request.map(|(stream, size, failed)| NextRequest {
            segment_bytes: self.sizes().segment(size),
            could_serve: could_serve_before.unwrap_or_default(),
            could_serve_after: self.could_serve(stream, size),
            failed,
            allocation: self.found.allocation_segments.len(),
        });
        let small_first = is_small_first(&segments, self.heap.segments());
        let kept_changes = self.heap.take_releasable_changes();
        let listed = next_request.as_ref().map_or(0, |next| next.could_serve.len() + next.could_serve_after.len());
        self.count(
            3 * size_of::<Release>() as u64
                + bytes_of::<SegmentId>(2 * (segments.len() + listed))
                + bytes_of::<(SegmentId, i32)>(3 * kept_changes.len()),
        );
        self.found.releases.push(Release {
            events: first..end,
            segments,
            kept_changes,
            bytes_reserved_before,
            next_request,
            small_first,
            immediate: first > 0 && events[first].time_us.saturating_sub(events[first - 1].time_us) < 1000,
        });
        end
    }

    /// The end of the release that starts at `first`. Two releases that follow each other directly are separated by
    /// their pools, where those are named: the default pool is released first, and the release of a private pool
    /// touches no other. Else by their order, since a pool releases its segments in the order of its free list; and by
    /// the time between them, since only the first free of a release waits for the device. A slow driver causes pauses
    /// too, so the time can be ignored (`pauses_end_releases`).
    fn end_of_release(&self, first: usize) -> usize {
        let events = self.events;
        let in_order = !self.rules().releases_partially();
        let of_private_pool = events[first].pool.is_some_and(|pool| !pool.is_default());
        let mut end = first + 1;
        for at in first + 1..events.len() {
            match events[at].action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    let paused = self.pauses_end_releases && at > first + 1 && is_pause(&events[at - 1], &events[at]);
                    let other_pool = events[at].pool != events[end - 1].pool;
                    let out_of_order = in_order && is_out_of_order(&events[end - 1], &events[at]);
                    let separate_pool = of_private_pool || events[at].pool.is_some_and(MemPoolId::is_default);
                    if paused || out_of_order || (other_pool && separate_pool) {
                        break;
                    }
                    end = at + 1;
                }
                Action::FreeCompleted => {}
                _ => break,
            }
        }
        end
    }

    /// The request directly after a release that ends at `end`, if it failed or needed new memory: its stream, its
    /// size, and whether it failed.
    fn request_after_release(&self, end: usize) -> Option<(u64, u64, bool)> {
        let event = self.events.get(end)?;
        match event.action {
            Action::Oom => Some((event.stream, event.size, true)),
            action if allocates_segment(action) => {
                let request = request_behind(self.events, end)?;
                Some((request.stream, self.sizes().round(request.size), false))
            }
            _ => None,
        }
    }

    /// If the frees from `at` on complete because the allocator waits for all events before a release: which segments
    /// could have served the request after it, before the wait. Memory that the wait frees comes too late for that
    /// request.
    fn could_serve_before_wait(&mut self, at: usize) -> Option<Vec<SegmentId>> {
        let events = self.events;
        let behind = at + events[at..].iter().take_while(|event| event.action == Action::FreeCompleted).count();
        self.completions_end = behind;
        if !events.get(behind).is_some_and(|event| frees_segment(event.action)) {
            return None;
        }
        let (stream, size, _) = self.request_after_release(self.end_of_release(behind))?;
        Some(self.could_serve(stream, size))
    }

    fn could_serve(&self, stream: u64, size: u64) -> Vec<SegmentId> {
        self.heap.preferred_blocks(stream, size, None).into_iter().map(|(_, segment)| segment).collect()
    }

    fn rules(&self) -> &RecordedRules {
        self.heap.rules()
    }

    fn sizes(&self) -> &SizeRules {
        self.heap.rules().sizes()
    }
}

/// Whether some segments were freed with a pause between them.
pub(super) fn has_pauses(events: &[TraceEntry]) -> bool {
    events.windows(2).any(|pair| pair.iter().all(|event| frees_segment(event.action)) && is_pause(&pair[0], &pair[1]))
}

/// Whether a small segment was released before a large one, as when a private pool is released.
pub(super) fn is_small_first(released: &[SegmentId], segments: &[RecordedSegment]) -> bool {
    let kind = |id: SegmentId| segments[id as usize].kind;
    let last_small = released.iter().rposition(|&id| kind(id) == SegmentKind::Small);
    let first_large = released.iter().position(|&id| kind(id) == SegmentKind::Large);
    last_small.zip(first_large).is_some_and(|(small, large)| small < large)
}

/// Whether more time passed than a free takes that does not wait for the device.
fn is_pause(one: &TraceEntry, next: &TraceEntry) -> bool {
    const PAUSE_US: i64 = 5_000;
    next.time_us.saturating_sub(one.time_us) > PAUSE_US
}

/// Whether one pool cannot have released two segments in this order.
fn is_out_of_order(one: &TraceEntry, next: &TraceEntry) -> bool {
    let key = |event: &TraceEntry| (event.stream, event.size, event.addr);
    one.pool.is_none()
        && one.action == Action::SegmentFree
        && next.action == Action::SegmentFree
        && SizeRules::kind_of_segment(one.size) == SizeRules::kind_of_segment(next.size)
        && key(one) > key(next)
}

/// Whether the free that completes at `at` was not requested right before.
fn is_late(events: &[TraceEntry], at: usize) -> bool {
    at == 0 || events[at - 1].action != Action::FreeRequested || events[at - 1].addr != events[at].addr
}

/// The allocation that the memory allocated at `at` was for.
fn request_behind(events: &[TraceEntry], at: usize) -> Option<&TraceEntry> {
    events[at..].iter().find(|event| !allocates_segment(event.action)).filter(|event| event.action == Action::Alloc)
}

fn grow(heap: &mut RecordedHeap, event: &TraceEntry) -> SegmentId {
    match event.action {
        Action::SegmentMap => heap.map(event.addr, event.size, event.stream, event.pool),
        _ => heap.add_segment(event.addr, event.size, event.stream, event.pool),
    }
}
