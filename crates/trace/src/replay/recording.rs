//! The recording of one device: its events, its segments when the snapshot was taken, and the results of a first pass
//! over both.

use std::collections::BTreeSet;

use warpool::memory::report::{Action, BlockState, SegmentInfo, TraceEntry};
use warpool::memory::{MemPoolId, SizeRules};

use super::ReplayError;

/// The time that the events of all devices span, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordedTime {
    first_us: i64,
    last_us: i64,
}

impl RecordedTime {
    /// `None` if there are no time stamps, or only one.
    pub fn of(traces: &[Vec<TraceEntry>]) -> Option<Self> {
        let first_us = traces.iter().filter_map(|events| events.first()).map(|event| event.time_us).min()?;
        let last_us = traces.iter().filter_map(|events| events.last()).map(|event| event.time_us).max()?;
        (first_us < last_us).then_some(Self { first_us, last_us })
    }

    #[expect(clippy::cast_precision_loss, reason = "a time span in seconds")]
    pub fn seconds(self) -> f64 {
        self.last_us.abs_diff(self.first_us) as f64 / 1e6
    }

    /// When its second half begins.
    pub fn midpoint_us(self) -> i64 {
        self.first_us.midpoint(self.last_us)
    }
}

/// Whether events have times. PyTorch writes them since 2.1; without, all are 0.
#[must_use]
pub fn has_times(events: &[TraceEntry]) -> bool {
    events.windows(2).any(|pair| pair[0].time_us != pair[1].time_us)
}

#[derive(Clone, Copy)]
pub(super) struct DeviceRecording<'a> {
    pub device: u32,
    pub events: &'a [TraceEntry],
    /// The segments of this device in the snapshot.
    pub segments: &'a [&'a SegmentInfo],
    pub survey: &'a Survey,
    /// When the second half of the recorded time begins.
    pub steady_from_us: Option<i64>,
}

impl DeviceRecording<'_> {
    /// Whether there are segments to compare a replay with. Logs of other allocators have none.
    pub fn has_segments(&self) -> bool {
        !self.segments.is_empty() || self.survey.allocates_segments
    }
}

/// What is known about a recording after one pass over its events. Passes are limited by memory bandwidth, which is why
/// there are few.
#[derive(Debug)]
pub(super) struct Survey {
    /// The streams of the events, ascending.
    pub streams: Vec<u64>,
    /// Whether every allocation names its pool. PyTorch 2.11 does not record it.
    pub names_pools: bool,
    /// Whether memory came from the driver.
    pub allocates_segments: bool,
    /// Whether memory was mapped into an expandable segment.
    pub maps_segments: bool,
    /// Whether the history starts with an empty allocator: its events add up to the segments of the snapshot.
    pub is_complete: bool,
    /// Whether nothing needs to be inferred: the history is complete, no segment was freed, no request failed, and
    /// everything is in the default pool.
    pub is_simple: bool,
}

impl Survey {
    /// Refuses damaged numbers that no program produces: addresses and sizes that no device has, blocks outside of
    /// their segments. After this check, sums of an address and some sizes do not overflow.
    pub fn new(device: u32, events: &[TraceEntry], segments: &[&SegmentInfo]) -> Result<Self, ReplayError> {
        const STREAMS_MAX: usize = 65_535;
        if u32::try_from(events.len()).is_err() {
            return implausible(format!("device {device} has {} events", events.len()));
        }
        let reserved_at_end = check_segments(device, segments)?;
        let name_of = |number: usize| match device {
            0 => format!("event {number}"),
            _ => format!("event {number} of device {device}"),
        };
        let (mut streams, mut last_stream) = (BTreeSet::new(), None);
        let (mut reserved, mut peak) = (0_u64, reserved_at_end);
        // What the events add to an allocator that was empty before them.
        let (mut bytes, mut blocks, mut is_complete) = (0_i128, 0_i64, true);
        let (mut names_pools, mut allocates_segments, mut maps_segments) = (true, false, false);
        let mut is_simple = segments.iter().all(|segment| segment.pool.is_default());
        for (number, event) in events.iter().enumerate() {
            match event.action {
                Action::SegmentAlloc | Action::SegmentMap => {
                    reserved = reserved.saturating_add(event.size);
                    peak = peak.max(reserved);
                    bytes += i128::from(event.size);
                    allocates_segments = true;
                    maps_segments |= event.action == Action::SegmentMap;
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    reserved = reserved.saturating_sub(event.size);
                    bytes -= i128::from(event.size);
                    is_complete &= bytes >= 0;
                    is_simple = false;
                }
                Action::Alloc => {
                    blocks += 1;
                    names_pools &= event.pool.is_some();
                }
                Action::FreeRequested => {
                    blocks -= 1;
                    is_complete &= blocks >= 0;
                }
                Action::Oom => is_simple = false,
                Action::FreeCompleted | Action::Snapshot | Action::Annotate => {}
            }
            is_simple &= event.pool.is_none_or(MemPoolId::is_default);
            if peak > BYTES_MAX {
                return implausible(format!("{peak} bytes were reserved at once, at {}", name_of(number)));
            }
            if !is_plausible(event) {
                let (bytes, addr) = (event.size, event.addr);
                let action = event.action.name();
                return implausible(format!("{}: {action} of {bytes} bytes at {addr:#x}", name_of(number)));
            }
            if last_stream != Some(event.stream) {
                last_stream = Some(event.stream);
                streams.insert(event.stream);
            }
        }
        if peak > BYTES_MAX {
            return implausible(format!("{peak} bytes were reserved at once"));
        }
        let in_segments: BTreeSet<u64> = segments.iter().map(|segment| segment.stream).collect();
        let named = streams.union(&in_segments).count();
        if named > STREAMS_MAX {
            return implausible(format!("it names {named} streams"));
        }
        is_complete &= bytes == i128::from(reserved_at_end) && blocks == allocated_blocks(segments);
        is_simple &= is_complete;
        let streams = streams.into_iter().collect();
        Ok(Self { streams, names_pools, allocates_segments, maps_segments, is_complete, is_simple })
    }
}

/// The bytes of the segments in a snapshot, if they and their blocks are plausible.
pub(crate) fn check_segments(device: u32, segments: &[&SegmentInfo]) -> Result<u64, ReplayError> {
    let mut bytes = 0_u64;
    for (number, segment) in segments.iter().enumerate() {
        let reason = |what: &str| implausible(format!("segment {number} of device {device}: {what}"));
        bytes = bytes.saturating_add(segment.total_size);
        let Some(end) = end_of(segment.address, segment.total_size) else {
            return reason("it ends beyond the addresses of any device");
        };
        let mut next = segment.address;
        for block in &segment.blocks {
            match end_of(block.address, block.size) {
                Some(block_end) if block.address >= next && block_end <= end => next = block_end,
                _ => return reason("its blocks overlap or lie outside of it"),
            }
            // The requested size of a free block is from before it was split.
            let is_too_small = block.state != BlockState::Inactive && block.requested_size > block.size;
            if block.size == 0 || is_too_small {
                return reason("a block is empty or smaller than its request");
            }
        }
    }
    Ok(bytes)
}

/// The allocated blocks of a snapshot.
fn allocated_blocks(segments: &[&SegmentInfo]) -> i64 {
    let blocks = segments.iter().flat_map(|segment| &segment.blocks);
    let allocated = blocks.filter(|block| block.state == BlockState::ActiveAllocated).count();
    i64::try_from(allocated).unwrap_or(i64::MAX)
}

fn is_plausible(event: &TraceEntry) -> bool {
    match event.action {
        // The address field is a size: the free memory of the device.
        Action::Oom => event.size < SizeRules::REQUEST_TOO_LARGE,
        Action::Snapshot | Action::Annotate => true,
        Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap => {
            event.size > 0 && event.size <= BYTES_MAX && end_of(event.addr, event.size).is_some()
        }
        Action::Alloc | Action::FreeRequested | Action::FreeCompleted => end_of(event.addr, event.size).is_some(),
    }
}

/// Whether a number can be the free memory that an out-of-memory event has in place of an address.
pub(crate) fn is_device_free(bytes: u64) -> bool {
    bytes <= BYTES_MAX
}

/// More than any device has.
const BYTES_MAX: u64 = 16 << 40;

/// The end of a range, if it lies below 2^60: addresses of CUDA have at most 57 bits.
fn end_of(address: u64, bytes: u64) -> Option<u64> {
    address.checked_add(bytes).filter(|&end| end <= 1 << 60)
}

fn implausible<T>(reason: String) -> Result<T, ReplayError> {
    Err(ReplayError::Implausible { reason })
}

/// Whether memory came from the driver.
pub(super) fn allocates_segment(action: Action) -> bool {
    matches!(action, Action::SegmentAlloc | Action::SegmentMap)
}

/// Whether memory was returned to the driver.
pub(super) fn frees_segment(action: Action) -> bool {
    matches!(action, Action::SegmentFree | Action::SegmentUnmap)
}
