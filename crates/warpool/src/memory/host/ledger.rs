//! Totals of the whole heap: quotas, segments in transit, and the counters of pinned memory. They change only when
//! memory is pinned or unpinned. No locks here, and no driver calls.

use std::collections::BTreeMap;
use std::time::Duration;

use warpool_driver::DeviceId;

use super::shard::{Segment, SegmentUse};
use super::size_class::PAGE;
use super::stats::{HostStats, HostTime};
use crate::defect::Defect;
use crate::memory::{PinnedSettings, Stat};

/// The cap that refuses a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CapExceeded {
    /// The device whose cap it is; `None` for the cap over all devices.
    pub(super) device: Option<DeviceId>,
    pub(super) cap: u64,
    /// The bytes that count against it.
    pub(super) pinned: u64,
    /// By how much it would be exceeded.
    pub(super) excess: u64,
}

/// The totals of all shards.
#[derive(Default)]
pub(super) struct Ledger {
    /// Segments that are being unpinned, and their bytes.
    in_transit: (u64, u64),
    /// How many transits have ended.
    transits_ended: u64,
    /// Bytes that are pinned or being pinned, by device: what counts against the caps.
    quota: BTreeMap<DeviceId, u64>,
    /// Bytes of segments for small requests.
    bytes_small: u64,
    has_reserve: bool,
    count: Stat,
    bytes: Stat,
    pins: u64,
    unpins: u64,
    pin_time: HostTime,
    unpin_time: HostTime,
}

impl Ledger {
    /// Counts a segment of `least` to `most` bytes against the caps, before it is pinned. Returns how many bytes.
    pub(super) fn reserve_quota(
        &mut self,
        least: u64,
        most: u64,
        device: DeviceId,
        settings: &PinnedSettings,
    ) -> Result<u64, CapExceeded> {
        let of_device = self.quota_of(device);
        let caps = [
            settings.device_cap_bytes.map(|cap| (Some(device), cap, of_device)),
            settings.cap_bytes.map(|cap| (None, cap, self.quota.values().sum())),
        ];
        let mut granted = most;
        let needed = if Defect::PinnedCapForgetsRequest.is_on() { 1 } else { least };
        for (device, cap, pinned) in caps.into_iter().flatten() {
            let room = cap.saturating_sub(pinned);
            if room < needed {
                return Err(CapExceeded { device, cap, pinned, excess: least - room });
            }
            granted = granted.min(room / PAGE * PAGE).max(least);
        }
        *self.quota.entry(device).or_default() += granted;
        Ok(granted)
    }

    /// Releases the quota of a segment that was not pinned, or is unpinned.
    pub(super) fn release_quota(&mut self, device: DeviceId, bytes: u64) {
        *self.quota.get_mut(&device).expect("quota was reserved") -= bytes;
    }

    fn quota_of(&self, device: DeviceId) -> u64 {
        self.quota.get(&device).copied().unwrap_or(0)
    }

    /// Counts a segment as pinned whose quota was reserved.
    pub(super) fn pinned(&mut self, serves: SegmentUse, bytes: u64, duration: Duration) {
        match serves {
            SegmentUse::Small => self.bytes_small += bytes,
            SegmentUse::Large => {}
            SegmentUse::Reserve => self.has_reserve = true,
        }
        self.count.increase(1);
        self.bytes.increase(bytes);
        self.pins += 1;
        self.pin_time.add(duration);
    }

    /// Puts a segment that is about to be unpinned in transit. It counts as pinned until
    /// [`end_transit`](Self::end_transit).
    pub(super) fn begin_transit(&mut self, bytes: u64) {
        self.in_transit.0 += 1;
        self.in_transit.1 += bytes;
    }

    /// Ends the transit of a segment that was unpinned in `duration`; `None` if unpinning failed.
    pub(super) fn end_transit(&mut self, segment: &Segment, duration: Option<Duration>) {
        let bytes = segment.range().bytes();
        self.in_transit.0 -= 1;
        self.in_transit.1 -= bytes;
        self.transits_ended += 1;
        let Some(duration) = duration else { return };
        match segment.serves() {
            SegmentUse::Small => self.bytes_small -= bytes,
            SegmentUse::Large => {}
            SegmentUse::Reserve => self.has_reserve = false,
        }
        self.release_quota(segment.device(), bytes);
        self.count.decrease(1);
        self.bytes.decrease(bytes);
        self.unpins += 1;
        self.unpin_time.add(duration);
    }

    /// Bytes of segments that are being unpinned.
    pub(super) fn bytes_in_transit(&self) -> u64 {
        self.in_transit.1
    }

    /// How many transits of segments have ended.
    pub(super) fn transits_ended(&self) -> u64 {
        self.transits_ended
    }

    pub(super) fn bytes_pinned(&self) -> u64 {
        self.bytes.current
    }

    /// Bytes of segments for small requests.
    pub(super) fn bytes_small(&self) -> u64 {
        self.bytes_small
    }

    /// Whether nothing is pinned, in transit or not.
    pub(super) fn is_empty(&self) -> bool {
        self.count.current == 0
    }

    pub(super) fn has_reserve(&self) -> bool {
        self.has_reserve
    }

    /// Adds the counters of pinned memory.
    pub(super) fn add_to(&self, stats: &mut HostStats) {
        stats.allocations = self.count;
        stats.allocated_bytes = self.bytes;
        stats.num_host_alloc = self.pins;
        stats.num_host_free = self.unpins;
        stats.host_alloc_time = self.pin_time;
        stats.host_free_time = self.unpin_time;
    }

    pub(super) fn for_each_stat(&mut self, act: fn(&mut Stat)) {
        act(&mut self.count);
        act(&mut self.bytes);
    }

    pub(super) fn reset_accumulated_stats(&mut self) {
        self.for_each_stat(Stat::reset_accumulated);
        (self.pins, self.unpins) = (0, 0);
        (self.pin_time, self.unpin_time) = (HostTime::default(), HostTime::default());
    }

    /// Panics if an invariant does not hold. `pinned` are the bytes and the number of segments of each device.
    pub(super) fn check(&self, pinned: &BTreeMap<DeviceId, (u64, u64)>) {
        let (bytes, count) = pinned.values().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert_eq!(bytes + self.in_transit.1, self.bytes.current, "pinned bytes");
        assert_eq!(count + self.in_transit.0, self.count.current, "number of segments");
        assert!(pinned.iter().all(|(device, one)| self.quota_of(*device) >= one.0), "quota covers pinned bytes");
    }
}
