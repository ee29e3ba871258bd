//! Steps with the whole allocator: pairs, trims, settings, invalid requests.

use warpool::Error;
use warpool::driver::{Call, HostPtr};
use warpool::memory::PinnedSettings;

use super::program::Run;
use crate::common::rng::Rng;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

impl Run<'_> {
    /// An unused block is reused at once without a driver call; or unpinned, if it is too large to be kept.
    pub fn pair(&mut self) {
        let settings = self.host.settings();
        let bytes = self.bytes();
        let before = self.devices.sim.object_counts().bytes_pinned;
        self.failing.push(format!("a pair of {bytes} bytes"));
        let first = match self.host.allocate(bytes) {
            Ok(block) => block,
            Err(Error::PinnedCap(_)) => return,
            Err(error) => panic!("{error}"),
        };
        self.model.allocated(&self.devices, &first, bytes, false);
        let usable = first.bytes_usable();
        if self.rng.one_in(2) {
            first.free().unwrap();
        } else {
            drop(first);
        }
        if settings.max_cached_bytes.is_some_and(|max| usable > max) {
            self.host.process_pending().unwrap();
            let after = self.devices.sim.object_counts().bytes_pinned;
            // Except for the reserved segment, which the request may have pinned.
            let max = before + settings.reserve_segment_bytes;
            assert!(after <= max, "{bytes} bytes are above the limit but were kept: {before} pinned, then {after}");
            return;
        }
        let pin_calls =
            |run: &Self| run.devices.sim.call_count(Call::HostAlloc) + run.devices.sim.call_count(Call::HostRegister);
        let calls = pin_calls(self);
        let again = self.host.allocate(bytes).unwrap();
        assert_eq!(pin_calls(self), calls, "{bytes} bytes were freed, and pinned once more");
        self.model.allocated(&self.devices, &again, bytes, false);
        drop(again);
        self.counts.pairs += 1;
    }

    /// Waits for all streams that are not paused, and processes pending frees.
    pub fn drain(&mut self) {
        self.failing.push("drain".into());
        for _ in 0..3 {
            for stream in 0..self.devices.streams.len() {
                if !self.devices.is_paused(stream) {
                    self.devices.wait_for(stream);
                }
            }
            self.host.process_pending().unwrap();
        }
        self.model.graphs = self.graphs.len();
        self.model.check_drained(&self.devices, &self.host);
    }

    pub fn process_pending(&mut self) {
        self.failing.push("process pending frees".into());
        self.host.process_pending().unwrap();
    }

    pub fn trim(&mut self) {
        self.host.process_pending().unwrap();
        let keeps_all = self.host.settings().max_cached_bytes.is_none();
        let before = self.devices.sim.object_counts().bytes_pinned;
        let target = match self.rng.below(3) {
            0 => 0,
            1 => before,
            _ => self.rng.u64() % (before + 1),
        };
        self.failing.push(format!("trim to {target} of {before}"));
        let unpinned = self.host.trim(target).unwrap();
        let after = self.devices.sim.object_counts().bytes_pinned;
        assert_eq!(unpinned, before - after, "trim returned {unpinned}, of {before} pinned bytes {after} are left");
        // Segments above the cached limit are always unpinned.
        assert!(target < before || unpinned == 0 || !keeps_all, "the target was met");
        let free = self.model.check_snapshot(&self.devices, &self.host);
        // The reserved segment and unused blocks of graph pools stay.
        let may_stay = free <= self.host.settings().reserve_segment_bytes || !self.graphs.is_empty();
        assert!(after <= target || may_stay, "{after} bytes are pinned, the target is {target}, and {free} are free");
        self.counts.trims += 1;
    }

    pub fn change_settings(&mut self) {
        let mut settings = random_settings(&mut self.rng);
        // Registering touches pages, which takes real time.
        settings.use_cuda_host_register &= self.max <= 4 * MIB;
        settings.reserve_segment_bytes = self.host.settings().reserve_segment_bytes;
        self.failing.push(format!("{settings:?}"));
        self.host.set_settings(settings.clone());
        assert_eq!(self.host.settings(), settings);
        self.model.set_caps(settings.cap_bytes, settings.device_cap_bytes, &self.host.stats());
    }

    /// Invalid and empty requests.
    pub fn invalid_requests(&mut self) {
        self.failing.push("invalid requests".into());
        let stream = self.any_stream();
        let empty = self.host.allocate(0).unwrap();
        assert_eq!((empty.ptr(), empty.bytes(), empty.bytes_usable()), (HostPtr(0), 0, 0));
        empty.record_use(&self.devices.streams[stream]).unwrap();
        empty.free().unwrap();
        let unknown_address = self.model.unknown_address();
        assert!(!self.host.record_use_at(unknown_address, &self.devices.streams[stream]).unwrap(), "not a block");
        if let Some(live) = self.model.live.first() {
            let bytes = live.block.bytes();
            for (offset, len) in [(bytes, 1), (bytes - 1, 2), (u64::MAX, 2)] {
                let outcome = live.block.read(offset, &mut vec![0; len]);
                assert!(matches!(outcome, Err(Error::HostBounds { .. })), "{len} at {offset} of {bytes}: {outcome:?}");
                let outcome = live.block.write(offset, &vec![0; len]);
                assert!(matches!(outcome, Err(Error::HostBounds { .. })), "{len} at {offset} of {bytes}: {outcome:?}");
            }
        }
    }
}

pub fn random_settings(rng: &mut Rng) -> PinnedSettings {
    PinnedSettings {
        use_cuda_host_register: rng.one_in(10),
        num_register_threads: rng.pick(&[1, 2]),
        reserve_segment_bytes: rng.pick(&[0, 0, 0, 8 * MIB]),
        max_round_threshold_bytes: rng.one_in(4).then(|| rng.pick(&[0, 64 * KIB, 2 * MIB])),
        max_cached_bytes: rng.one_in(4).then(|| rng.pick(&[16 * KIB, MIB, 8 * MIB])),
        free_catch_all: rng.one_in(4),
        cap_bytes: rng.one_in(3).then(|| rng.pick(&[2, 24, 64, 150]) * MIB),
        device_cap_bytes: rng.one_in(4).then(|| rng.pick(&[2, 20, 70]) * MIB),
        ..PinnedSettings::default()
    }
}
