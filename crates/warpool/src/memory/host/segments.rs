//! Pinning segments within the caps, and unpinning them.
//!
//! A segment counts against the caps before it is pinned, so that threads that pin at the same time cannot exceed them
//! together. Cached segments are unpinned to make room. No lock is held over a driver call.

use std::sync::Arc;
use std::time::Duration;

use warpool_driver::DeviceId;

use super::Shared;
use super::block::{PinnedBlock, PinnedState};
use super::heap::NewSegment;
use super::history::{Caught, Details};
use super::ledger::CapExceeded;
use super::pin::{PinFailure, PinMethod, PinnedRange, pinning_device};
use super::shard::SegmentUse;
use super::size_class::{BYTES_MAX, Fit, PAGE, shared_segment};
use crate::error::PinnedCapReport;
use crate::memory::Action;
use crate::{Error, Result, lock};

impl Shared {
    /// Pins a segment for a request, and splits the block off it. If the machine is out of memory, cached segments are
    /// unpinned first, and only the bytes that the request needs are pinned.
    pub(super) fn pin_block(self: &Arc<Self>, home: usize, fit: &Fit, details: &Details) -> Result<Arc<PinnedBlock>> {
        let pinning = pinning_device(&self.instance, fit.device)?;
        let device = fit.device.unwrap_or(pinning);
        let least = fit.size.next_multiple_of(PAGE);
        let (serves, most) = match fit.is_small() {
            true => (SegmentUse::Small, shared_segment(self.heap.bytes_small())),
            false => (SegmentUse::Large, least),
        };
        let mut quota = self.reserve_quota(fit.bytes, least, most, device, details)?;
        let mut pinned = self.pin_timed(pinning, device, quota);
        if let Err(Error::Driver(error)) = &pinned
            && error.is_out_of_memory()
        {
            // A failure to unpin one segment is ignored if the others suffice.
            let unpinned = self.unpin_spare(u64::MAX, None, details);
            if matches!(unpinned, Ok(0)) && quota == least {
                return Err(self.describe(error.clone().into(), least));
            }
            quota = self.reserve_quota(fit.bytes, least, least, device, details)?;
            pinned = self.pin_timed(pinning, device, quota);
        }
        let (range, duration) = pinned.map_err(|error| self.describe(error, quota))?;
        let entries = self.history.write(Action::SegmentAlloc, range.start(), range.bytes(), details);
        let segment = NewSegment { serves, device, range, stack: self.history.stack_of_entry(details), duration };
        let block = self.heap.add_and_take(home, segment, fit, self);
        self.history.notify(&entries, details);
        Ok(block)
    }

    /// Adds to an out-of-memory error that host memory was being pinned, and advice.
    fn describe(&self, error: Error, bytes: u64) -> Error {
        match error {
            Error::Driver(error) if error.is_out_of_memory() => {
                let pinned = self.heap.bytes_pinned();
                let reason = error.detail.as_ref().map_or(String::new(), |detail| format!("{detail}; "));
                let advice = "free or trim pinned memory, or raise the limit on locked memory";
                let detail =
                    format!("{reason}cannot pin {bytes} bytes of host memory, {pinned} bytes are pinned; {advice}");
                error.with_detail(detail).into()
            }
            error => error,
        }
    }

    /// Counts a segment against the caps. Makes room by unpinning cached segments, or by waiting for another thread
    /// that does.
    fn reserve_quota(&self, bytes: u64, least: u64, most: u64, device: DeviceId, details: &Details) -> Result<u64> {
        let settings = lock(&self.settings).clone();
        let mut emptied = false;
        loop {
            let transits_ended = self.heap.transits_ended();
            let exceeded = match self.heap.reserve_quota(least, most, device, &settings) {
                Ok(quota) => return Ok(quota),
                Err(exceeded) => exceeded,
            };
            // All or nothing: a request that would fail anyway unpins nothing.
            let spare: u64 = self.heap.spare(exceeded.device).iter().map(|&(size, _)| size).sum();
            if spare >= exceeded.excess {
                self.unpin_spare(exceeded.excess, exceeded.device, details)?;
            } else if self.heap.await_transit(transits_ended, exceeded.excess - spare) {
                // There may be room now.
            } else if !emptied {
                // Other threads may have freed blocks since the request searched.
                self.empty_front_caches();
                emptied = true;
            } else {
                return Err(Error::PinnedCap(Box::new(self.cap_report(bytes, least, exceeded))));
            }
        }
    }

    fn cap_report(&self, bytes: u64, least: u64, exceeded: CapExceeded) -> PinnedCapReport {
        let heap = self.heap.lock_all();
        let counts = |block: &&Arc<PinnedBlock>| exceeded.device.is_none_or(|device| block.device() == device);
        let sum = |state: PinnedState| {
            let blocks = heap.blocks().filter(counts).filter(|block| block.state() == state);
            blocks.map(|block| block.size()).sum()
        };
        PinnedCapReport {
            bytes_requested: bytes,
            bytes_segment: least,
            bytes_cap: exceeded.cap,
            device: exceeded.device,
            bytes_pinned: exceeded.pinned,
            bytes_allocated: sum(PinnedState::Allocated),
            bytes_pending: sum(PinnedState::PendingFree),
        }
    }

    /// Pins the reserved segment, once, if the settings ask for one. It is optional, so a failure is only logged.
    pub(super) fn pin_reserve(&self, home: usize, details: &Details) {
        if !self.limits.take_reserve() {
            return;
        }
        let bytes = lock(&self.settings).reserve_segment_bytes.min(BYTES_MAX).next_multiple_of(PAGE);
        if bytes == 0 || self.heap.has_reserve() {
            return;
        }
        let pinned = pinning_device(&self.instance, None).and_then(|device| {
            self.reserve_quota(bytes, bytes, bytes, device, details)?;
            self.pin_timed(device, device, bytes).map(|(range, duration)| (device, range, duration))
        });
        match pinned {
            Ok((device, range, duration)) => {
                let entries = self.history.write(Action::SegmentAlloc, range.start(), bytes, details);
                let (serves, stack) = (SegmentUse::Reserve, self.history.stack_of_entry(details));
                self.heap.add(home, NewSegment { serves, device, range, stack, duration });
                self.history.notify(&entries, details);
            }
            Err(error) => tracing::warn!(%error, "pinned_reserve_segment_size_mb: no segment could be reserved"),
        }
    }

    /// Pins a segment whose quota was reserved for `counted`. On failure the quota is released, unless memory stays
    /// pinned until a later call unpins it.
    fn pin_timed(&self, device: DeviceId, counted: DeviceId, bytes: u64) -> Result<(PinnedRange, Duration)> {
        let method = PinMethod::of(&lock(&self.settings));
        let begun = self.driver().now();
        let caught = Caught::default();
        let pinned = caught.run(|| PinnedRange::pin(self.driver(), device, bytes, method));
        match pinned {
            Some(Ok(range)) => Ok((range, self.driver().now().saturating_sub(begun))),
            Some(Err(PinFailure { error, still_pinned: Some(range) })) => {
                self.pending.with(|pending| pending.unusable.push((counted, range)));
                Err(error)
            }
            Some(Err(PinFailure { error, still_pinned: None })) => {
                self.heap.release_quota(counted, bytes);
                Err(error)
            }
            None => {
                self.heap.release_quota(counted, bytes);
                caught.resume()
            }
        }
    }

    /// Unpins a segment, if it is free. Returns its bytes. On failure it stays.
    ///
    /// The history entry is written before the driver call, because afterwards another thread may get the same address.
    /// Trackers are called afterwards, since they may make requests, which wait for segments in transit. A failure is
    /// recorded as another allocation.
    fn unpin_segment(&self, start: u64, details: &Details) -> Result<u64> {
        let Some(segment) = self.heap.begin_transit(start) else { return Ok(0) };
        let bytes = segment.range().bytes();
        let mut entries = self.history.write(Action::SegmentFree, start, bytes, details);
        let caught = Caught::default();
        let unpinned = caught.run(|| {
            let begun = self.driver().now();
            segment.range().unpin(self.driver()).map(|()| self.driver().now().saturating_sub(begun))
        });
        let duration = unpinned.as_ref().and_then(|outcome| outcome.as_ref().ok().copied());
        if duration.is_none() {
            entries.extend(self.history.write(Action::SegmentAlloc, start, bytes, details));
        }
        self.heap.end_transit(segment, duration);
        self.history.notify(&entries, details);
        match unpinned {
            Some(outcome) => outcome.map(|_| bytes),
            None => caught.resume(),
        }
    }

    /// Unpins spare segments, of a device or of all, until `bytes` are unpinned or none is left: each time the smallest
    /// one that suffices, or else the largest. Returns the unpinned bytes. Continues after an error, and returns the
    /// first error if the rest did not suffice.
    pub(super) fn unpin_spare(&self, bytes: u64, device: Option<DeviceId>, details: &Details) -> Result<u64> {
        let mut spare = self.heap.spare(device);
        let mut unpinned = 0;
        let mut outcome = Ok(());
        while unpinned < bytes && !spare.is_empty() {
            let sufficient = spare.partition_point(|&(size, _)| size < bytes - unpinned);
            let (_, start) = spare.remove(sufficient.min(spare.len() - 1));
            match self.unpin_segment(start, details) {
                Ok(bytes) => unpinned += bytes,
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        if unpinned >= bytes { Ok(unpinned) } else { outcome.map(|()| unpinned) }
    }

    /// Unpins the segments that are not to be kept, and adds their bytes to the total. Failures are retried by the next
    /// call.
    pub(super) fn unpin_listed(&self, unpinned: &mut u64, details: &Details) -> Result<()> {
        let mut outcome = self.unpin_unusable();
        let listed = self.pending.with(|pending| std::mem::take(&mut pending.to_unpin));
        for start in listed {
            match self.unpin_segment(start, details) {
                Ok(bytes) => *unpinned += bytes,
                Err(error) => {
                    self.pending.with(|pending| pending.to_unpin.push(start));
                    outcome = outcome.and(Err(error));
                }
            }
        }
        outcome
    }

    /// Unpins memory that was pinned and cannot be used. Failures are retried by the next call.
    fn unpin_unusable(&self) -> Result<()> {
        let unusable = self.pending.with(|pending| std::mem::take(&mut pending.unusable));
        let mut outcome = Ok(());
        for (device, range) in unusable {
            match range.unpin(self.driver()) {
                Ok(()) => self.heap.release_quota(device, range.bytes()),
                Err(error) => {
                    self.pending.with(|pending| pending.unusable.push((device, range)));
                    outcome = outcome.and(Err(error));
                }
            }
        }
        outcome
    }

    /// Unpins every free segment, the reserved one too, and returns the first error.
    pub(super) fn unpin_all(&self, details: &Details) -> Result<()> {
        let mut outcome = self.unpin_unusable();
        let starts: Vec<u64> = self.heap.lock_all().segments().into_keys().collect();
        for start in starts {
            outcome = outcome.and(self.unpin_segment(start, details).map(drop));
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::decorate::{FaultPlan, Faulty};
    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{Call, ErrorCode};

    use super::*;
    use crate::Instance;
    use crate::memory::{HostAllocator, PinnedSettings};

    #[test]
    fn out_of_memory_errors_speak_of_pinned_host_memory() {
        let plan = FaultPlan::new().fail_nth(Call::HostAlloc, 2, ErrorCode::OutOfMemory);
        let driver = Arc::new(Faulty::new(Arc::new(SimDriver::new(SimConfig::default())), plan));
        let instance = Instance::new(driver).expect("a device");
        let pinned = HostAllocator::new(&instance, PinnedSettings::default());
        let block = pinned.allocate(3 << 20).expect("the first pin succeeds");
        let error = pinned.allocate(4 << 20).expect_err("the second fails");
        assert!(error.driver().is_some_and(warpool_driver::DriverError::is_out_of_memory), "{error}");
        let text = error.to_string();
        let expected = "cannot pin 4194304 bytes of host memory, 3145728 bytes are pinned; free or trim pinned memory";
        assert!(text.contains(expected) && !text.contains("CUDA out of memory"), "{text}");
        let text = pinned.allocate(1 << 61).expect_err("more than any machine has").to_string();
        assert!(text.contains("host memory") && !text.contains("CUDA out of memory"), "{text}");
        drop(block);
        pinned.close().expect("no block is allocated");
    }
}
