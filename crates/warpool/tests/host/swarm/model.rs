//! The naive model: who has which bytes, who may still use them, and what must hold after every step.
//!
//! It keeps lists and compares everything with everything. Whether a stream is done it learns from marks of its own,
//! which it puts into the stream right before a block goes back: a block that comes again while such a mark is ahead
//! came too early.

use std::collections::BTreeSet;

use warpool::driver::{Call, EventId, HostPtr};
use warpool::memory::{BlockState, HostAllocator, HostBlock, HostStats, Snapshot};

use super::machine::{DEVICES, Machine};

/// The least that a block may be rounded up to.
const GRAIN: u64 = 512;
const MIB: u64 = 1 << 20;

/// A block that the program has.
pub struct Held {
    pub block: HostBlock,
    /// What is in it.
    pub tag: u32,
    /// The stream that wrote to it last, since the host last waited for it.
    pub writer: Option<usize>,
    /// Streams that read it since then.
    pub readers: BTreeSet<usize>,
    /// Streams that the allocator was told of.
    pub recorded: BTreeSet<usize>,
    /// Whether it came from a capture: then the graph has its memory too, if a stream was recorded.
    pub graph: Option<u32>,
}

impl Held {
    pub fn new(block: HostBlock, tag: u32) -> Self {
        let (writer, graph) = (None, None);
        Self { block, tag, writer, readers: BTreeSet::new(), recorded: BTreeSet::new(), graph }
    }

    /// Streams that may be at work on it.
    pub fn users(&self) -> BTreeSet<usize> {
        self.readers.iter().copied().chain(self.writer).collect()
    }

    pub fn range(&self) -> Range {
        Range { start: self.block.ptr().0, bytes: self.block.bytes_usable() }
    }
}

/// A stretch of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub start: u64,
    pub bytes: u64,
}

impl Range {
    pub fn meets(&self, other: &Self) -> bool {
        self.start < other.start + other.bytes && other.start < self.start + self.bytes
    }
}

/// Memory that nobody has, and streams may still use.
struct Waiting {
    range: Range,
    marks: Vec<EventId>,
    /// Marks right behind those of the allocator.
    behind: Vec<EventId>,
    /// Whether a destructor gave it back: the allocator puts its own marks at some later call, so they may be further
    /// ahead than ours.
    late: bool,
}

/// Memory that a graph has.
pub struct OfGraph {
    pub graph: u32,
    pub range: Range,
    /// Marks of streams that used it beside the graph, once it was given back.
    pub marks: Vec<EventId>,
}

/// The model.
#[derive(Default)]
pub struct Model {
    pub held: Vec<Held>,
    waiting: Vec<Waiting>,
    /// Memory that graphs have, whoever else has it too.
    pub of_graphs: Vec<OfGraph>,
    /// How many graphs there are.
    pub graphs: usize,
    /// All marks ever made.
    pub marks: Vec<EventId>,
    /// Whether marks may be asked for. Asking tells the host that a stream is done, and so hides that the allocator did
    /// not ask.
    curious: bool,
    /// Blocks and bytes given out so far.
    requests: u64,
    bytes: u64,
    /// What may be pinned, in all and for each device; more where it was pinned before the cap came.
    allowed: Option<u64>,
    allowed_each: Option<[u64; DEVICES as usize]>,
    /// What was found while marks could not be asked for: to be asked later.
    suspects: Vec<EventId>,
}

impl Model {
    pub fn new(curious: bool) -> Self {
        Self { curious, ..Self::default() }
    }

    /// A block came.
    pub fn gave(&mut self, machine: &Machine, block: &HostBlock, asked: u64, in_capture: bool) {
        let (range, usable) = (Range { start: block.ptr().0, bytes: block.bytes_usable() }, block.bytes_usable());
        assert_eq!(block.bytes(), asked);
        assert!(usable >= asked, "{usable} bytes for {asked}");
        assert!(usable <= asked + asked / 8 + GRAIN, "{usable} bytes for {asked}: more than an eighth is wasted");
        assert_eq!(range.start % 64, 0, "{range:x?} starts in the middle of a cache line");
        for held in &self.held {
            assert!(!held.range().meets(&range), "{range:x?} is in {:x?}, which is tag {:#x}", held.range(), held.tag);
        }
        for OfGraph { graph, range: owned, .. } in &self.of_graphs {
            assert!(!owned.meets(&range), "{range:x?} is in {owned:x?}, which graph {graph} has");
        }
        let (met, rest) = std::mem::take(&mut self.waiting).into_iter().partition(|gone| gone.range.meets(&range));
        self.waiting = rest;
        let met: Vec<Waiting> = met;
        for mark in met.into_iter().flat_map(|gone| gone.marks) {
            match () {
                () if in_capture => self.suspects.push(mark),
                () if self.curious => assert!(machine.passed(mark), "{range:x?} came while a stream used it"),
                () => {}
            }
        }
        self.requests += 1;
        self.bytes += usable;
    }

    /// Looks at what could not be looked at in a capture. Streams only go on, so a mark that is ahead now was ahead
    /// then.
    pub fn look_at_suspects(&mut self, machine: &Machine) {
        for mark in std::mem::take(&mut self.suspects) {
            assert!(!self.curious || machine.passed(mark), "in a capture, memory came while a stream used it");
        }
    }

    /// Marks streams: before a block goes back, and behind that. To be followed by [`went`](Self::went).
    pub fn mark(&mut self, machine: &Machine, streams: &BTreeSet<usize>) -> Vec<EventId> {
        let marks: Vec<EventId> = streams.iter().map(|&stream| machine.mark(stream)).collect();
        self.marks.extend(&marks);
        marks
    }

    /// A block went back, by a destructor or not, and waits for those marks and others right ahead of `behind`.
    pub fn went(&mut self, range: Range, marks: Vec<EventId>, behind: Vec<EventId>, late: bool) {
        if let Some(owned) = self.of_graphs.iter_mut().find(|owned| owned.range == range) {
            owned.marks.extend(marks);
        } else if !marks.is_empty() {
            self.waiting.push(Waiting { range, marks, behind, late });
        }
    }

    /// Another cap is in force.
    pub fn capped(&mut self, cap: Option<u64>, each: Option<u64>, stats: &HostStats) {
        self.allowed = cap.map(|cap| cap.max(stats.allocated_bytes.current));
        self.allowed_each = each.map(|each| {
            let pinned = &stats.pinned_bytes_by_device;
            std::array::from_fn(|device| each.max(pinned.get(device).copied().unwrap_or(0)))
        });
    }

    /// A graph goes: what it has of pinned memory waits for those marks, and for those that it had.
    pub fn graph_went(&mut self, graph: u32, marks: &[EventId]) {
        let gone: Vec<OfGraph> = self.of_graphs.extract_if(.., |owned| owned.graph == graph).collect();
        for OfGraph { range, marks: own, .. } in gone {
            self.went(range, own.iter().chain(marks).copied().collect(), Vec::new(), true);
        }
    }

    pub fn nobody_waits(&self) -> bool {
        self.waiting.is_empty() && self.of_graphs.is_empty()
    }

    /// What must hold after every step outside of captures.
    pub fn check(&mut self, machine: &Machine, host: &HostAllocator) {
        host.check();
        machine.expect_no_hazards();
        let (stats, census) = (host.stats(), machine.sim.object_counts());
        assert_eq!(stats.allocations.current, census.pinned as u64, "segments held, and ranges pinned");
        assert_eq!(stats.allocated_bytes.current, census.bytes_pinned, "bytes held, and bytes pinned");
        assert_eq!(stats.pinned_bytes_by_device.iter().sum::<u64>(), census.bytes_pinned, "by device, and in all");
        let calls = |these: [Call; 2]| these.map(|call| machine.sim.call_count(call)).iter().sum::<u64>();
        assert_eq!(stats.num_host_alloc, calls([Call::HostAlloc, Call::HostRegister]), "times that memory was pinned");
        assert_eq!(stats.num_host_free, calls([Call::HostFree, Call::HostUnregister]), "times that it was unpinned");
        assert_eq!(stats.host_alloc_time.count, stats.num_host_alloc);
        assert_eq!(stats.host_free_time.count, stats.num_host_free);

        assert_eq!(stats.active_requests.allocated, self.requests, "blocks given out so far");
        assert_eq!(stats.active_bytes.allocated, self.bytes, "bytes given out so far");
        for stat in [stats.allocations, stats.allocated_bytes, stats.active_requests, stats.active_bytes] {
            assert_eq!(stat.allocated - stat.freed, stat.current, "{stats:?}");
            assert!(stat.peak >= stat.current, "{stats:?}");
        }
        let (blocks, bytes) = self.least(machine);
        let active = (stats.active_requests.current, stats.active_bytes.current);
        assert!(active.0 >= blocks && active.1 >= bytes, "active {active:?}, but {blocks} blocks of {bytes} bytes are");
        let (blocks, bytes) = self.most();
        assert!(
            active.0 <= blocks && active.1 <= bytes,
            "active {active:?}, but at most {blocks} of {bytes} bytes are"
        );
        let known = stats.active_bytes.current + stats.cached_bytes;
        // What captures gave back unused is kept for their graph, and is neither.
        let complete = if self.graphs == 0 {
            known == stats.allocated_bytes.current
        } else {
            known <= stats.allocated_bytes.current
        };
        assert!(complete, "active and cached are {known}, with {} graphs: {stats:?}", self.graphs);

        if let Some(allowed) = &mut self.allowed {
            assert!(census.bytes_pinned <= *allowed, "{} bytes are pinned, {allowed} may be", census.bytes_pinned);
        }
        if let Some(each) = self.allowed_each {
            let over = stats.pinned_bytes_by_device.iter().zip(each).find(|(pinned, each)| **pinned > *each);
            assert_eq!(over, None, "pinned for a device, and what may be");
        }
    }

    /// A cap that was exceeded when it came is not exceeded more than is left of that.
    pub fn tighten(&mut self, cap: Option<u64>, each: Option<u64>, stats: &HostStats) {
        if let (Some(allowed), Some(cap)) = (&mut self.allowed, cap) {
            *allowed = (*allowed).min(cap.max(stats.allocated_bytes.current));
        }
        if let (Some(allowed), Some(each)) = (&mut self.allowed_each, each) {
            for (allowed, &pinned) in allowed.iter_mut().zip(&stats.pinned_bytes_by_device) {
                *allowed = (*allowed).min(each.max(pinned));
            }
        }
    }

    /// Blocks and bytes that are active for certain: that somebody has, that graphs have, that streams are not done
    /// with.
    fn least(&self, machine: &Machine) -> (u64, u64) {
        let unfinished = |gone: &&Waiting| self.curious && gone.marks.iter().any(|&mark| !machine.passed(mark));
        let waiting: Vec<Range> = self.waiting.iter().filter(unfinished).map(|gone| gone.range).collect();
        self.sum(&waiting)
    }

    /// Blocks and bytes that may be.
    fn most(&self) -> (u64, u64) {
        let waiting: Vec<Range> = self.waiting.iter().map(|gone| gone.range).collect();
        self.sum(&waiting)
    }

    fn sum(&self, waiting: &[Range]) -> (u64, u64) {
        // What a graph has and the program too counts once.
        let held: Vec<Range> = self.held.iter().map(Held::range).collect();
        let graphs = self.of_graphs.iter().map(|owned| owned.range).filter(|range| !held.contains(range));
        let all: Vec<Range> = held.iter().copied().chain(graphs).chain(waiting.iter().copied()).collect();
        (all.len() as u64, all.iter().map(|range| range.bytes).sum())
    }

    /// With every stream done that is not held, and the allocator having looked: exactly what held streams use still
    /// waits.
    pub fn check_settled(&mut self, machine: &Machine, host: &HostAllocator) {
        let ahead = |marks: &[EventId]| marks.iter().any(|&mark| !machine.passed(mark));
        let any_held = !machine.held.is_empty();
        self.waiting.retain(|gone| ahead(&gone.marks) || ahead(&gone.behind) || (gone.late && any_held));
        let waiting = self.waiting.iter().filter(|gone| ahead(&gone.marks));
        let certain: Vec<Range> = waiting.map(|gone| gone.range).collect();
        let (least, most) = (self.sum(&certain), self.most());
        let stats = host.stats();
        let active = (stats.active_requests.current, stats.active_bytes.current);
        let fits = least.0 <= active.0 && active.0 <= most.0 && least.1 <= active.1 && active.1 <= most.1;
        assert!(fits, "{active:?} are active; somebody has or a held stream uses {least:?}, or at most {most:?}");
        self.check(machine, host);
    }

    /// What the snapshot says, against what the program has and the driver pinned. Says how much lies in segments of
    /// which nobody has anything.
    pub fn check_snapshot(&self, machine: &Machine, host: &HostAllocator) -> u64 {
        let mut snapshot = Snapshot::default();
        host.add_to(&mut snapshot);
        let segments = snapshot.host_segments.expect("the allocator just told");
        let total: u64 = segments.iter().map(|segment| segment.total_size).sum();
        assert_eq!(total, machine.sim.object_counts().bytes_pinned, "bytes of all segments");
        let mut idle = 0;
        let mut allocated = BTreeSet::new();
        for pair in segments.windows(2) {
            assert!(pair[0].address + pair[0].total_size <= pair[1].address, "segments overlap or are out of order");
        }
        for segment in &segments {
            assert_eq!(segment.device, -1, "host memory is no device's");
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at, "blocks tile their segment");
                at += block.size;
                if block.state == BlockState::ActiveAllocated {
                    allocated.insert((block.address, block.size, block.requested_size));
                }
            }
            assert_eq!(at, segment.address + segment.total_size, "blocks tile their segment");
            if segment.blocks.iter().all(|block| block.state == BlockState::Inactive) {
                idle += segment.total_size;
            }
        }
        let held: BTreeSet<(u64, u64, u64)> =
            self.held.iter().map(|held| (held.range().start, held.range().bytes, held.block.bytes())).collect();
        assert_eq!(allocated, held, "blocks of the snapshot that somebody has, and those that the program has");
        idle
    }

    /// Whether a cap stood in the way for good reason, judged by what is pinned after all was given back that nobody
    /// uses.
    pub fn refusal_is_right(&self, asked: u64, pinned: u64, cap: u64) {
        let enough = asked + asked / 8 + 2 * MIB;
        assert!(
            pinned + enough > cap,
            "{asked} bytes were refused, {pinned} are pinned that must be, and {cap} may be"
        );
    }

    /// An address where no block of the program starts.
    pub fn stranger(&self) -> HostPtr {
        let inside = self.held.iter().find(|held| held.block.bytes_usable() > 1);
        HostPtr(inside.map_or(4096, |held| held.block.ptr().0 + 1))
    }
}
