//! The recording of one device: its events, and its segments when the snapshot was taken.

use std::collections::BTreeSet;

use warpool::memory::{Action, BlockState, MemPoolId, SegmentInfo, TraceEntry};

use super::ReplayError;

/// The recording of one device.
#[derive(Clone, Copy)]
pub(super) struct DeviceRecording<'a> {
    pub device: u32,
    pub events: &'a [TraceEntry],
    /// The segments of this device in the snapshot.
    pub segments: &'a [&'a SegmentInfo],
    /// Whether every allocation names its pool. PyTorch 2.11 does not record it.
    pub names_pools: bool,
}

impl<'a> DeviceRecording<'a> {
    pub fn new(device: u32, events: &'a [TraceEntry], segments: &'a [&'a SegmentInfo]) -> Self {
        let names_pools = events.iter().filter(|event| event.action == Action::Alloc).all(|event| event.pool.is_some());
        Self { device, events, segments, names_pools }
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

    /// Refuses damaged numbers that no program produces and that would keep a replay busy without end.
    pub fn check_plausible(&self) -> Result<(), ReplayError> {
        const BYTES_MAX: u64 = 16 << 40;
        const STREAMS_MAX: usize = 65_535;
        let implausible = |reason: String| Err(ReplayError::Implausible { reason });
        let at_end = self.segments.iter().fold(0_u64, |sum, segment| sum.saturating_add(segment.total_size));
        let (mut reserved, mut peak) = (0_u64, at_end);
        let (mut streams, mut last_stream) = (BTreeSet::new(), None);
        for event in self.events {
            match event.action {
                Action::SegmentAlloc | Action::SegmentMap => reserved = reserved.saturating_add(event.size),
                Action::SegmentFree | Action::SegmentUnmap => reserved = reserved.saturating_sub(event.size),
                _ => {}
            }
            peak = peak.max(reserved);
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
}

/// Whether memory came from the driver.
pub(super) fn allocates_segment(action: Action) -> bool {
    matches!(action, Action::SegmentAlloc | Action::SegmentMap)
}

/// Whether memory was returned to the driver.
pub(super) fn frees_segment(action: Action) -> bool {
    matches!(action, Action::SegmentFree | Action::SegmentUnmap)
}
