//! What holds between the allocator, the driver and the program's own list of blocks. Without faults the counters are
//! exactly those of the driver, nothing stays pending once all work is done, and caps and trims are obeyed to the byte.

use warpool::driver::Call;
use warpool::memory::PinnedSettings;
use warpool::memory::host::HostStats;
use warpool::memory::report::{BlockState, Snapshot};

use super::{DEVICES, MIB, Run};
use crate::machine::Outcome;

/// The bytes that may be pinned, in all and for each device: the cap, or what was pinned before it was set.
#[derive(Default)]
pub struct Allowed {
    all: Option<u64>,
    each: Option<[u64; DEVICES]>,
}

impl Allowed {
    /// After other caps were set.
    pub fn new(settings: &PinnedSettings, stats: &HostStats) -> Self {
        let pinned = |device: usize| stats.pinned_bytes_by_device.get(device).copied().unwrap_or(0);
        Self {
            all: settings.cap_bytes.map(|cap| cap.max(stats.allocated_bytes.current)),
            each: settings.device_cap_bytes.map(|cap| std::array::from_fn(|device| cap.max(pinned(device)))),
        }
    }

    /// Checks that no more is pinned. An excess may stay, but does not grow again.
    fn check(&mut self, settings: &PinnedSettings, stats: &HostStats) {
        let pinned = stats.allocated_bytes.current;
        assert!(self.all.is_none_or(|all| pinned <= all), "{pinned} bytes are pinned, {:?} may be", self.all);
        let over = |each: [u64; DEVICES]| stats.pinned_bytes_by_device.iter().zip(each).any(|(&at, most)| at > most);
        assert!(!self.each.is_some_and(over), "{:?} of {:?}", stats.pinned_bytes_by_device, self.each);
        let now = Self::new(settings, stats);
        self.all = self.all.zip(now.all).map(|(old, new)| old.min(new));
        self.each = self.each.zip(now.each).map(|(old, new)| std::array::from_fn(|at| old[at].min(new[at])));
    }
}

impl Run<'_> {
    pub fn check(&mut self) {
        self.host.check();
        let stats = self.host.stats();
        let (blocks, bytes) = self.in_use();
        let active = (stats.active_requests.current, stats.active_bytes.current);
        assert!(active.0 >= blocks && active.1 >= bytes, "{active:?} are active, {blocks} of {bytes} bytes are in use");
        assert!(stats.allocated_bytes.current >= active.1, "{active:?} are active of {:?}", stats.allocated_bytes);
        let by_device: u64 = stats.pinned_bytes_by_device.iter().sum();
        assert_eq!(stats.allocated_bytes.current, by_device, "pinned bytes, and their sum over the devices");
        let pinned = self.machine.sim.object_counts().bytes_pinned;
        assert!(pinned >= stats.allocated_bytes.current, "the driver has pinned {pinned}: {stats:?}");
        for stat in [stats.allocations, stats.allocated_bytes, stats.active_requests, stats.active_bytes] {
            assert!(stat.allocated - stat.freed == stat.current && stat.peak >= stat.current, "{stats:?}");
        }
        if self.context.counts.faults == 0 {
            assert_eq!(pinned, stats.allocated_bytes.current, "what the driver has pinned, and the statistic");
        }
        if self.is_exact() {
            self.check_exactly(&stats);
        }
    }

    /// Whether every call succeeds, or is refused for lack of memory.
    pub fn is_exact(&self) -> bool {
        !self.machine.has_faults()
    }

    fn check_exactly(&mut self, stats: &HostStats) {
        let sim = &self.machine.sim;
        assert_eq!(stats.allocations.current, sim.object_counts().pinned as u64, "segments, and pinned ranges");
        let calls = |calls: [Call; 2]| calls.map(|call| sim.call_count(call)).iter().sum::<u64>();
        let refused = self.calls_refused;
        assert_eq!(stats.num_host_alloc + refused, calls([Call::HostAlloc, Call::HostRegister]), "pin calls");
        assert_eq!(stats.num_host_free, calls([Call::HostFree, Call::HostUnregister]), "unpin calls");
        let timed = (stats.host_alloc_time.count, stats.host_free_time.count);
        assert_eq!(timed, (stats.num_host_alloc, stats.num_host_free), "calls that were timed");
        let so_far = (stats.active_requests.allocated, stats.active_bytes.allocated);
        assert_eq!(so_far, (self.blocks_allocated, self.bytes_allocated), "blocks and bytes so far");
        let (known, all) = (stats.active_bytes.current + stats.cached_bytes, stats.allocated_bytes.current);
        // Unused blocks of a graph's pool are neither active nor cached.
        assert!(known == all || known < all && !self.graphs.is_empty(), "active and cached are {known}: {stats:?}");
        self.allowed.check(&self.host.settings(), stats);
    }

    /// Blocks and bytes that the program or a graph has. A block of both counts once.
    fn in_use(&self) -> (u64, u64) {
        let of_graphs = self.graph_ranges.iter().filter(|range| !self.ranges.contains_key(&range.start));
        let bytes = self.ranges.iter().map(|(start, range)| range.end - start);
        let all = bytes.chain(of_graphs.map(|range| range.end - range.start));
        all.fold((0, 0), |(blocks, sum), bytes| (blocks + 1, sum + bytes))
    }

    fn nothing_is_pending(&self) -> bool {
        let stats = self.host.stats();
        (stats.active_requests.current, stats.active_bytes.current) == self.in_use()
    }

    /// Waits for all work. Nothing is pending then.
    pub fn drain(&mut self) {
        self.context.step("drain");
        for _ in 0..3 {
            self.machine.synchronize();
            self.process_pending();
        }
        self.machine.check_contents();
        if self.is_exact() {
            let stats = self.host.stats();
            assert!(self.nothing_is_pending(), "{:?} are in use, and active are: {stats:?}", self.in_use());
            self.context.made("drained");
        }
    }

    /// An unused block is reused at once, without a driver call; or unpinned, if it is too large to be kept.
    pub fn pair(&mut self) {
        if !self.is_exact() {
            return;
        }
        let (settings, bytes) = (self.host.settings(), self.bytes());
        let before = self.machine.sim.object_counts().bytes_pinned;
        self.context.step(format!("a pair of {bytes} bytes"));
        let Ok(first) = self.host.allocate(bytes) else { return };
        self.insert(&first, bytes);
        self.remove(first.ptr());
        let usable = first.bytes_usable();
        if self.context.rng.one_in(2) {
            first.free().unwrap();
        } else {
            drop(first);
        }
        if settings.max_cached_bytes.is_some_and(|max| usable > max) {
            self.host.process_pending().unwrap();
            let after = self.machine.sim.object_counts().bytes_pinned;
            // Except for the reserved segment, which the request may have pinned.
            let most = before + settings.reserve_segment_bytes;
            assert!(after <= most, "{bytes} bytes are above the limit but were kept: {before} pinned, then {after}");
            return;
        }
        let pin_calls = |run: &Self| {
            [Call::HostAlloc, Call::HostRegister].map(|call| run.machine.sim.call_count(call)).iter().sum::<u64>()
        };
        let calls = pin_calls(self);
        let again = self.host.allocate(bytes).unwrap();
        assert_eq!(pin_calls(self), calls, "{bytes} bytes were freed, and pinned once more");
        self.insert(&again, bytes);
        self.remove(again.ptr());
        drop(again);
        self.context.made("pair");
    }

    pub fn trim(&mut self) {
        self.process_pending();
        let before = self.host.stats().allocated_bytes.current;
        let target = match self.context.rng.below(3) {
            0 => 0,
            1 => before,
            _ => self.context.rng.u64_in(0..=before),
        };
        self.context.step(format!("trim to {target} of {before}"));
        let outcome = self.machine.call(self.context, || self.host.trim(target));
        let Outcome::Done(unpinned) = outcome else { return };
        if !self.is_exact() {
            return;
        }
        let (after, settings) = (self.machine.sim.object_counts().bytes_pinned, self.host.settings());
        assert_eq!(unpinned, before - after, "trim returned {unpinned}, of {before} pinned bytes {after} are left");
        // Segments above the cached limit are always unpinned.
        let met = target >= before && settings.max_cached_bytes.is_none();
        assert!(!met || unpinned == 0, "the target was met, and {unpinned} bytes were unpinned");
        let free = self.check_snapshot();
        // The reserved segment and unused blocks of graph pools stay.
        let may_stay = free <= settings.reserve_segment_bytes || !self.graphs.is_empty();
        assert!(after <= target || may_stay, "{after} bytes are pinned, the target is {target}, and {free} are free");
        self.context.made("trim");
    }

    /// After a refusal by a cap: unpinning what is cached would not have helped.
    pub fn expect_justified(&mut self, bytes: u64) {
        if !self.is_exact() || !self.graph_ranges.is_empty() || !self.nothing_is_pending() {
            return;
        }
        self.host.trim(0).unwrap();
        let (stats, settings) = (self.host.stats(), self.host.settings());
        let exceeds = |pinned: u64, cap: Option<u64>| cap.is_some_and(|cap| pinned + bytes + bytes / 8 + 2 * MIB > cap);
        let is_justified = exceeds(stats.allocated_bytes.current, settings.cap_bytes)
            || stats.pinned_bytes_by_device.iter().any(|&pinned| exceeds(pinned, settings.device_cap_bytes));
        assert!(is_justified, "{bytes} bytes were refused: {stats:?}, {settings:?}");
        self.context.made("refusal");
    }

    /// Compares a snapshot with the program's blocks. Returns the bytes of free segments.
    pub fn check_snapshot(&self) -> u64 {
        let mut snapshot = Snapshot::default();
        self.host.add_to(&mut snapshot);
        let segments = snapshot.host_segments.expect("the host's segments");
        let (mut free, mut end, mut allocated) = (0, 0, Vec::new());
        for segment in &segments {
            assert!(segment.address >= end, "segments overlap, or are out of order, at {:#x}", segment.address);
            assert_eq!(segment.device, -1, "the device of host memory");
            end = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, end, "blocks fill their segment");
                end += block.size;
                if block.state == BlockState::ActiveAllocated {
                    allocated.push((block.address, end, block.requested_size));
                }
            }
            assert_eq!(end, segment.address + segment.total_size, "blocks fill their segment");
            if segment.blocks.iter().all(|block| block.state == BlockState::Inactive) {
                free += segment.total_size;
            }
        }
        let total: u64 = segments.iter().map(|segment| segment.total_size).sum();
        assert_eq!(total, self.host.stats().allocated_bytes.current, "bytes of all segments");
        let own: Vec<_> = self.ranges.iter().map(|(&start, range)| (start, range.end, range.bytes)).collect();
        assert_eq!(allocated, own, "allocated blocks of the snapshot, and of the program");
        free
    }
}
