//! The naive model: the owner of every byte, the streams that may still use it, and what must hold after every step.
//!
//! It keeps lists and compares all pairs. It records its own events in the streams right before a block is freed: if
//! the memory is reused before such an event has passed, it was reused too early.

use std::collections::BTreeSet;

use warpool::driver::{Call, EventId, HostPtr};
use warpool::memory::{BlockState, HostAllocator, HostBlock, HostStats, Snapshot};

use super::devices::{DEVICES, Devices};

/// The granularity of block sizes.
const GRANULARITY: u64 = 512;
const MIB: u64 = 1 << 20;

/// An allocated block.
pub struct LiveBlock {
    pub block: HostBlock,
    /// Its content.
    pub tag: u32,
    /// The last stream that wrote to it since the host last waited for it.
    pub writer: Option<usize>,
    /// Streams that read it since then.
    pub readers: BTreeSet<usize>,
    /// Streams whose use was recorded.
    pub recorded: BTreeSet<usize>,
    /// The graph that uses its memory too, if a capture allocated it.
    pub graph: Option<u32>,
}

impl LiveBlock {
    pub fn new(block: HostBlock, tag: u32) -> Self {
        let (writer, graph) = (None, None);
        Self { block, tag, writer, readers: BTreeSet::new(), recorded: BTreeSet::new(), graph }
    }

    /// Streams that may be using it.
    pub fn users(&self) -> BTreeSet<usize> {
        self.readers.iter().copied().chain(self.writer).collect()
    }

    pub fn range(&self) -> Range {
        Range { start: self.block.ptr().0, bytes: self.block.bytes_usable() }
    }
}

/// A range of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub start: u64,
    pub bytes: u64,
}

impl Range {
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start < other.start + other.bytes && other.start < self.start + self.bytes
    }
}

/// Freed memory that streams may still use.
struct PendingRange {
    range: Range,
    events: Vec<EventId>,
    /// Events recorded right after the fences of the allocator.
    later_events: Vec<EventId>,
    /// Whether it was dropped: the allocator records its fences in a later call, so they may pass later than the
    /// model's events.
    dropped: bool,
}

/// Memory that a graph uses.
pub struct GraphMemory {
    pub graph: u32,
    pub range: Range,
    /// Events of other streams that used it, once it was freed.
    pub events: Vec<EventId>,
}

#[derive(Default)]
pub struct Model {
    pub live: Vec<LiveBlock>,
    pending: Vec<PendingRange>,
    /// Memory that graphs use, allocated or freed.
    pub graph_memory: Vec<GraphMemory>,
    /// The number of graphs.
    pub graphs: usize,
    /// All events that were created.
    pub events: Vec<EventId>,
    /// Whether events are queried. A query synchronizes the host with the stream, which hides a missing query of the
    /// allocator.
    queries_events: bool,
    /// Blocks and bytes allocated so far.
    requests: u64,
    bytes: u64,
    /// The bytes that may be pinned, in total and for each device: the cap, or the bytes that were pinned before it was
    /// set.
    allowed: Option<u64>,
    allowed_each: Option<[u64; DEVICES as usize]>,
    /// Events that could not be queried in a capture.
    to_check: Vec<EventId>,
}

impl Model {
    pub fn new(queries_events: bool) -> Self {
        Self { queries_events, ..Self::default() }
    }

    /// A block was allocated.
    pub fn allocated(&mut self, devices: &Devices, block: &HostBlock, requested: u64, in_capture: bool) {
        let (range, usable) = (Range { start: block.ptr().0, bytes: block.bytes_usable() }, block.bytes_usable());
        assert_eq!(block.bytes(), requested);
        assert!(usable >= requested, "{usable} bytes for {requested}");
        assert!(
            usable <= requested + requested / 8 + GRANULARITY,
            "{usable} bytes for {requested}: more than an eighth is wasted"
        );
        assert_eq!(range.start % 64, 0, "{range:x?} starts in the middle of a cache line");
        for live in &self.live {
            assert!(!live.range().overlaps(&range), "{range:x?} overlaps {:x?} of tag {:#x}", live.range(), live.tag);
        }
        for GraphMemory { graph, range: owned, .. } in &self.graph_memory {
            assert!(!owned.overlaps(&range), "{range:x?} overlaps {owned:x?} of graph {graph}");
        }
        let (met, rest) = std::mem::take(&mut self.pending).into_iter().partition(|freed| freed.range.overlaps(&range));
        self.pending = rest;
        let met: Vec<PendingRange> = met;
        for event in met.into_iter().flat_map(|freed| freed.events) {
            if in_capture {
                self.to_check.push(event);
            } else if self.queries_events {
                assert!(devices.has_passed(event), "{range:x?} was reused while a stream used it");
            }
        }
        self.requests += 1;
        self.bytes += usable;
    }

    /// Queries the events that could not be queried in a capture. One that has not passed now had not passed then.
    pub fn check_deferred(&mut self, devices: &Devices) {
        for event in std::mem::take(&mut self.to_check) {
            assert!(
                !self.queries_events || devices.has_passed(event),
                "in a capture, memory was reused while a stream used it"
            );
        }
    }

    /// Records events in streams, before and after a block is freed. To be followed by [`freed`](Self::freed).
    pub fn record_events(&mut self, devices: &Devices, streams: &BTreeSet<usize>) -> Vec<EventId> {
        let events: Vec<EventId> = streams.iter().map(|&stream| devices.record_event(stream)).collect();
        self.events.extend(&events);
        events
    }

    /// A block was freed or dropped, and waits for fences between `events` and `later_events`.
    pub fn freed(&mut self, range: Range, events: Vec<EventId>, later_events: Vec<EventId>, dropped: bool) {
        if let Some(owned) = self.graph_memory.iter_mut().find(|owned| owned.range == range) {
            owned.events.extend(events);
        } else if !events.is_empty() {
            self.pending.push(PendingRange { range, events, later_events, dropped });
        }
    }

    /// Other caps were set.
    pub fn set_caps(&mut self, cap: Option<u64>, each: Option<u64>, stats: &HostStats) {
        self.allowed = cap.map(|cap| cap.max(stats.allocated_bytes.current));
        self.allowed_each = each.map(|each| {
            let pinned = &stats.pinned_bytes_by_device;
            std::array::from_fn(|device| each.max(pinned.get(device).copied().unwrap_or(0)))
        });
    }

    /// A graph was dropped: its pinned memory waits for those events, and for its own.
    pub fn graph_dropped(&mut self, graph: u32, events: &[EventId]) {
        let dropped: Vec<GraphMemory> = self.graph_memory.extract_if(.., |owned| owned.graph == graph).collect();
        for GraphMemory { range, events: own, .. } in dropped {
            self.freed(range, own.iter().chain(events).copied().collect(), Vec::new(), true);
        }
    }

    pub fn nothing_pending(&self) -> bool {
        self.pending.is_empty() && self.graph_memory.is_empty()
    }

    /// Checks what must hold after every step outside of captures.
    pub fn check(&mut self, devices: &Devices, host: &HostAllocator) {
        host.check();
        devices.expect_no_hazards();
        let (stats, counts) = (host.stats(), devices.sim.object_counts());
        assert_eq!(stats.allocations.current, counts.pinned as u64, "segments, and pinned ranges");
        assert_eq!(stats.allocated_bytes.current, counts.bytes_pinned, "bytes of segments, and pinned bytes");
        assert_eq!(
            stats.pinned_bytes_by_device.iter().sum::<u64>(),
            counts.bytes_pinned,
            "bytes by device, and in all"
        );
        let calls = |these: [Call; 2]| these.map(|call| devices.sim.call_count(call)).iter().sum::<u64>();
        assert_eq!(stats.num_host_alloc, calls([Call::HostAlloc, Call::HostRegister]), "pin calls");
        assert_eq!(stats.num_host_free, calls([Call::HostFree, Call::HostUnregister]), "unpin calls");
        assert_eq!(stats.host_alloc_time.count, stats.num_host_alloc);
        assert_eq!(stats.host_free_time.count, stats.num_host_free);

        assert_eq!(stats.active_requests.allocated, self.requests, "blocks allocated so far");
        assert_eq!(stats.active_bytes.allocated, self.bytes, "bytes allocated so far");
        for stat in [stats.allocations, stats.allocated_bytes, stats.active_requests, stats.active_bytes] {
            assert_eq!(stat.allocated - stat.freed, stat.current, "{stats:?}");
            assert!(stat.peak >= stat.current, "{stats:?}");
        }
        let (blocks, bytes) = self.min_active(devices);
        let active = (stats.active_requests.current, stats.active_bytes.current);
        assert!(
            active.0 >= blocks && active.1 >= bytes,
            "active {active:?}, but at least {blocks} blocks of {bytes} bytes are"
        );
        let (blocks, bytes) = self.max_active();
        assert!(active.0 <= blocks && active.1 <= bytes, "active {active:?}, but at max {blocks} of {bytes} bytes are");
        let known = stats.active_bytes.current + stats.cached_bytes;
        // Unused blocks of a graph's pool are neither active nor cached.
        let complete = if self.graphs == 0 {
            known == stats.allocated_bytes.current
        } else {
            known <= stats.allocated_bytes.current
        };
        assert!(complete, "active and cached are {known}, with {} graphs: {stats:?}", self.graphs);

        if let Some(allowed) = &mut self.allowed {
            assert!(counts.bytes_pinned <= *allowed, "{} bytes are pinned, {allowed} are allowed", counts.bytes_pinned);
        }
        if let Some(each) = self.allowed_each {
            let over = stats.pinned_bytes_by_device.iter().zip(each).find(|(pinned, each)| **pinned > *each);
            assert_eq!(over, None, "pinned for a device, and allowed");
        }
    }

    /// A cap that was exceeded when it was set may stay exceeded by the excess that is left, but by no more.
    pub fn lower_allowed(&mut self, cap: Option<u64>, each: Option<u64>, stats: &HostStats) {
        if let (Some(allowed), Some(cap)) = (&mut self.allowed, cap) {
            *allowed = (*allowed).min(cap.max(stats.allocated_bytes.current));
        }
        if let (Some(allowed), Some(each)) = (&mut self.allowed_each, each) {
            for (allowed, &pinned) in allowed.iter_mut().zip(&stats.pinned_bytes_by_device) {
                *allowed = (*allowed).min(each.max(pinned));
            }
        }
    }

    /// Blocks and bytes that must be active: allocated, used by graphs, or with an event that has not passed.
    fn min_active(&self, devices: &Devices) -> (u64, u64) {
        let unpassed =
            |freed: &&PendingRange| self.queries_events && freed.events.iter().any(|&event| !devices.has_passed(event));
        let pending: Vec<Range> = self.pending.iter().filter(unpassed).map(|freed| freed.range).collect();
        self.sum(&pending)
    }

    /// Blocks and bytes that may be active.
    fn max_active(&self) -> (u64, u64) {
        let pending: Vec<Range> = self.pending.iter().map(|freed| freed.range).collect();
        self.sum(&pending)
    }

    fn sum(&self, pending: &[Range]) -> (u64, u64) {
        // A live block that a graph uses too counts once.
        let live: Vec<Range> = self.live.iter().map(LiveBlock::range).collect();
        let graphs = self.graph_memory.iter().map(|owned| owned.range).filter(|range| !live.contains(range));
        let all: Vec<Range> = live.iter().copied().chain(graphs).chain(pending.iter().copied()).collect();
        (all.len() as u64, all.iter().map(|range| range.bytes).sum())
    }

    /// After all streams that are not paused are done and pending frees are processed: exactly what paused streams use
    /// is pending.
    pub fn check_drained(&mut self, devices: &Devices, host: &HostAllocator) {
        let unpassed = |events: &[EventId]| events.iter().any(|&event| !devices.has_passed(event));
        let any_paused = !devices.paused.is_empty();
        let may_wait = |freed: &PendingRange| {
            unpassed(&freed.events) || unpassed(&freed.later_events) || (freed.dropped && any_paused)
        };
        self.pending.retain(may_wait);
        let pending = self.pending.iter().filter(|freed| unpassed(&freed.events));
        let certain: Vec<Range> = pending.map(|freed| freed.range).collect();
        let (min, max) = (self.sum(&certain), self.max_active());
        let stats = host.stats();
        let active = (stats.active_requests.current, stats.active_bytes.current);
        let fits = min.0 <= active.0 && active.0 <= max.0 && min.1 <= active.1 && active.1 <= max.1;
        assert!(fits, "{active:?} are active; at least {min:?} and at most {max:?} should be");
        self.check(devices, host);
    }

    /// Compares the snapshot with the live blocks and the driver. Returns the bytes of free segments.
    pub fn check_snapshot(&self, devices: &Devices, host: &HostAllocator) -> u64 {
        let mut snapshot = Snapshot::default();
        host.add_to(&mut snapshot);
        let segments = snapshot.host_segments.expect("the host's segments");
        let total: u64 = segments.iter().map(|segment| segment.total_size).sum();
        assert_eq!(total, devices.sim.object_counts().bytes_pinned, "bytes of all segments");
        let mut free = 0;
        let mut allocated = BTreeSet::new();
        for pair in segments.windows(2) {
            assert!(pair[0].address + pair[0].total_size <= pair[1].address, "segments overlap or are out of order");
        }
        for segment in &segments {
            assert_eq!(segment.device, -1, "the device of host memory");
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at, "blocks fill their segment");
                at += block.size;
                if block.state == BlockState::ActiveAllocated {
                    allocated.insert((block.address, block.size, block.requested_size));
                }
            }
            assert_eq!(at, segment.address + segment.total_size, "blocks fill their segment");
            if segment.blocks.iter().all(|block| block.state == BlockState::Inactive) {
                free += segment.total_size;
            }
        }
        let live: BTreeSet<(u64, u64, u64)> =
            self.live.iter().map(|live| (live.range().start, live.range().bytes, live.block.bytes())).collect();
        assert_eq!(allocated, live, "allocated blocks of the snapshot, and live blocks");
        free
    }

    /// Checks a refusal: the memory that must stay pinned plus the request would exceed the cap, even after a trim.
    pub fn expect_justified(&self, requested: u64, pinned: u64, cap: u64) {
        let enough = requested + requested / 8 + 2 * MIB;
        assert!(pinned + enough > cap, "{requested} bytes were refused, {pinned} must be pinned, and the cap is {cap}");
    }

    /// An address that is not the start of a live block.
    pub fn unknown_address(&self) -> HostPtr {
        let inside = self.live.iter().find(|live| live.block.bytes_usable() > 1);
        HostPtr(inside.map_or(4096, |live| live.block.ptr().0 + 1))
    }
}
