//! The recording of one device: its events, and its segments when the snapshot was taken.

use std::collections::BTreeSet;

use warpool::memory::{Action, BlockState, MemPoolId, SegmentInfo, SizeRules, TraceEntry};

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

/// The recording of one device.
#[derive(Clone, Copy)]
pub(super) struct DeviceRecording<'a> {
    pub device: u32,
    pub events: &'a [TraceEntry],
    /// The segments of this device in the snapshot.
    pub segments: &'a [&'a SegmentInfo],
    /// Whether every allocation names its pool. PyTorch 2.11 does not record it.
    pub names_pools: bool,
    /// When the second half of the recorded time begins.
    pub steady_from_us: Option<i64>,
}

impl<'a> DeviceRecording<'a> {
    pub fn new(device: u32, events: &'a [TraceEntry], segments: &'a [&'a SegmentInfo]) -> Self {
        let names_pools = events.iter().filter(|event| event.action == Action::Alloc).all(|event| event.pool.is_some());
        Self { device, events, segments, names_pools, steady_from_us: None }
    }

    /// Whether there are segments to compare a replay with. Logs of other allocators have none.
    pub fn has_segments(&self) -> bool {
        !self.segments.is_empty() || self.events.iter().any(|event| allocates_segment(event.action))
    }

    /// Whether the history starts with an empty allocator: its events add up to the segments of the snapshot.
    pub fn is_complete(&self) -> bool {
        let (mut bytes, mut blocks) = (0_i128, 0_i64);
        for event in self.events {
            match event.action {
                Action::SegmentAlloc | Action::SegmentMap => bytes += i128::from(event.size),
                Action::SegmentFree | Action::SegmentUnmap => bytes -= i128::from(event.size),
                Action::Alloc => blocks += 1,
                Action::FreeRequested => blocks -= 1,
                _ => {}
            }
            if bytes < 0 || blocks < 0 {
                return false;
            }
        }
        let reserved: u64 = self.segments.iter().map(|segment| segment.total_size).sum();
        let allocated = |segment: &&SegmentInfo| {
            segment.blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated).count()
        };
        let allocated: usize = self.segments.iter().map(allocated).sum();
        bytes == i128::from(reserved) && i64::try_from(allocated).is_ok_and(|allocated| allocated == blocks)
    }

    /// Whether nothing needs to be inferred: the history is complete, no segment was freed, no request failed, and
    /// everything is in the default pool.
    pub fn is_simple(&self) -> bool {
        let is_simple = |event: &TraceEntry| {
            !frees_segment(event.action) && event.action != Action::Oom && event.pool.is_none_or(MemPoolId::is_default)
        };
        self.segments.iter().all(|segment| segment.pool.is_default())
            && self.is_complete()
            && self.events.iter().all(is_simple)
    }

    /// Refuses damaged numbers that no program produces: addresses and sizes that no device has, blocks outside of
    /// their segments. Behind this, sums of an address and some sizes do not overflow.
    pub fn check_plausible(&self) -> Result<(), ReplayError> {
        const STREAMS_MAX: usize = 65_535;
        if u32::try_from(self.events.len()).is_err() {
            return implausible(format!("device {} has {} events", self.device, self.events.len()));
        }
        let (mut streams, mut last_stream) = (BTreeSet::new(), None);
        let mut at_end = 0_u64;
        for (number, segment) in self.segments.iter().enumerate() {
            let reason = |what: &str| implausible(format!("segment {number} of device {}: {what}", self.device));
            at_end = at_end.saturating_add(segment.total_size);
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
            streams.insert(segment.stream);
        }
        let (mut reserved, mut peak) = (0_u64, at_end);
        for (number, event) in self.events.iter().enumerate() {
            match event.action {
                Action::SegmentAlloc | Action::SegmentMap => reserved = reserved.saturating_add(event.size),
                Action::SegmentFree | Action::SegmentUnmap => reserved = reserved.saturating_sub(event.size),
                _ => {}
            }
            peak = peak.max(reserved);
            if peak > BYTES_MAX {
                return implausible(format!("{peak} bytes were reserved at once, at {}", self.name_of(number)));
            }
            if !self.is_plausible(event) {
                let (bytes, addr) = (event.size, event.addr);
                let action = event.action.name();
                return implausible(format!("{}: {action} of {bytes} bytes at {addr:#x}", self.name_of(number)));
            }
            if last_stream != Some(event.stream) {
                last_stream = Some(event.stream);
                streams.insert(event.stream);
            }
        }
        if peak > BYTES_MAX {
            return implausible(format!("{peak} bytes were reserved at once"));
        }
        if streams.len() > STREAMS_MAX {
            return implausible(format!("it names {} streams", streams.len()));
        }
        Ok(())
    }

    /// How an event is called in messages.
    fn name_of(&self, number: usize) -> String {
        if self.device == 0 { format!("event {number}") } else { format!("event {number} of device {}", self.device) }
    }

    fn is_plausible(&self, event: &TraceEntry) -> bool {
        match event.action {
            // Its address is a size: what was free on the device.
            Action::Oom => event.size < SizeRules::REQUEST_TOO_LARGE,
            Action::Snapshot | Action::Annotate => true,
            Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap => {
                event.size > 0 && event.size <= BYTES_MAX && end_of(event.addr, event.size).is_some()
            }
            Action::Alloc | Action::FreeRequested | Action::FreeCompleted => end_of(event.addr, event.size).is_some(),
        }
    }
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
