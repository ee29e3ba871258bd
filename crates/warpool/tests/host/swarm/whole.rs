//! Steps that are about the allocator as a whole: what it keeps, gives back, knows and refuses.

use warpool::Error;
use warpool::driver::{Call, HostPtr};
use warpool::memory::PinnedSettings;

use super::program::Run;
use crate::common::rng::Rng;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

impl Run<'_> {
    /// What nobody used comes again at once, without the driver; unless it is too large to be kept: then it is gone.
    pub fn pair(&mut self) {
        let settings = self.host.settings();
        let bytes = self.bytes();
        let before = self.machine.sim.object_counts().bytes_pinned;
        self.failing.push(format!("a pair of {bytes}"));
        let first = match self.host.allocate(bytes) {
            Ok(block) => block,
            Err(Error::PinnedCap(_)) => return,
            Err(error) => panic!("{error}"),
        };
        self.model.gave(&self.machine, &first, bytes, false);
        let usable = first.bytes_usable();
        if self.rng.one_in(2) {
            first.free().unwrap();
        } else {
            drop(first);
        }
        if settings.max_cached_bytes.is_some_and(|most| usable > most) {
            self.host.process_pending().unwrap();
            let after = self.machine.sim.object_counts().bytes_pinned;
            // But for the reserved segment, which the request may have made, and which stays.
            let most = before + settings.reserve_segment_bytes;
            assert!(after <= most, "{bytes} bytes are too large to be kept, and were: {before}, then {after}");
            return;
        }
        let asked =
            |run: &Self| run.machine.sim.call_count(Call::HostAlloc) + run.machine.sim.call_count(Call::HostRegister);
        let calls = asked(self);
        let again = self.host.allocate(bytes).unwrap();
        assert_eq!(asked(self), calls, "{bytes} bytes were given back, and pinned once more");
        self.model.gave(&self.machine, &again, bytes, false);
        drop(again);
        self.tally.pairs += 1;
    }

    /// All streams that are not held are done, and the allocator looks: then it knows exactly who waits.
    pub fn settle(&mut self) {
        self.failing.push("settle".into());
        for _ in 0..3 {
            for stream in 0..self.machine.streams.len() {
                if !self.machine.is_held(stream) {
                    self.machine.wait_for(stream);
                }
            }
            self.host.process_pending().unwrap();
        }
        self.model.graphs = self.graphs.len();
        self.model.check_settled(&self.machine, &self.host);
    }

    pub fn process_pending(&mut self) {
        self.failing.push("reap".into());
        self.host.process_pending().unwrap();
    }

    pub fn trim(&mut self) {
        self.host.process_pending().unwrap();
        let keeps_all = self.host.settings().max_cached_bytes.is_none();
        let before = self.machine.sim.object_counts().bytes_pinned;
        let target = match self.rng.below(3) {
            0 => 0,
            1 => before,
            _ => self.rng.u64() % (before + 1),
        };
        self.failing.push(format!("trim to {target} of {before}"));
        let gave = self.host.trim(target).unwrap();
        let after = self.machine.sim.object_counts().bytes_pinned;
        assert_eq!(
            gave,
            before - after,
            "trim says that it gave {gave} back, of {before} pinned bytes {after} are left"
        );
        // What is too large to be kept goes at the next call, whichever that is.
        assert!(target < before || gave == 0 || !keeps_all, "nothing had to go");
        let idle = self.model.check_snapshot(&self.machine, &self.host);
        // What was set aside stays, and what captures gave back unused stays with their graph.
        let may_stay = idle <= self.host.settings().reserve_segment_bytes || !self.graphs.is_empty();
        assert!(after <= target || may_stay, "{after} are pinned, {target} should be, and {idle} are nobody's");
        self.tally.trims += 1;
    }

    pub fn change_settings(&mut self) {
        let mut settings = draw_settings(&mut self.rng);
        // Pages are touched there, which takes real time.
        settings.use_cuda_host_register &= self.most <= 4 * MIB;
        settings.reserve_segment_bytes = self.host.settings().reserve_segment_bytes;
        self.failing.push(format!("{settings:?}"));
        self.host.set_settings(settings.clone());
        assert_eq!(self.host.settings(), settings);
        self.model.capped(settings.cap_bytes, settings.device_cap_bytes, &self.host.stats());
    }

    /// Wrong and empty requests: an error or nothing, and no harm.
    pub fn ask_nonsense(&mut self) {
        self.failing.push("nonsense".into());
        let stream = self.any_stream();
        let empty = self.host.allocate(0).unwrap();
        assert_eq!((empty.ptr(), empty.bytes(), empty.bytes_usable()), (HostPtr(0), 0, 0));
        empty.record_use(&self.machine.streams[stream]).unwrap();
        empty.free().unwrap();
        let stranger = self.model.stranger();
        assert!(!self.host.record_use_at(stranger, &self.machine.streams[stream]).unwrap(), "nothing starts there");
        if let Some(held) = self.model.held.first() {
            let bytes = held.block.bytes();
            for (offset, len) in [(bytes, 1), (bytes - 1, 2), (u64::MAX, 2)] {
                let outcome = held.block.read(offset, &mut vec![0; len]);
                assert!(matches!(outcome, Err(Error::HostBounds { .. })), "{len} at {offset} of {bytes}: {outcome:?}");
                let outcome = held.block.write(offset, &vec![0; len]);
                assert!(matches!(outcome, Err(Error::HostBounds { .. })), "{len} at {offset} of {bytes}: {outcome:?}");
            }
        }
    }
}

pub fn draw_settings(rng: &mut Rng) -> PinnedSettings {
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
