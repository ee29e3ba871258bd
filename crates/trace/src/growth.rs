//! Recordings of any size, to measure how the cost of a replay grows with what a recording contains. Used by tests and
//! by `warpool bench scale`; not a stable interface.
//!
//! Each is what PyTorch's allocator would have recorded: its replay is exact.

use warpool::memory::MemPoolId;
use warpool::memory::report::{
    Action, BlockInfo, BlockState, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, TraceEntry,
};

const MIB: u64 = 1 << 20;
const FIRST: u64 = 0x7f00_0000_0000;
/// The distance of expandable segments: more than a device has memory.
const RANGE: u64 = 1 << 38;

/// A kind of recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrowthCase {
    /// Each of `n` streams allocates a block in an expandable segment of its own and frees it; then the cache is
    /// emptied.
    Streams,
    /// The history starts late: `n` free pieces between allocated blocks exist already, and each is allocated once.
    LateStart,
    /// `n` segments are cached in `n` private pools; the pools are released one after another.
    Releases,
    /// `n` segments are in use; each is freed and released before the next.
    Trims,
}

impl GrowthCase {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Streams, Self::LateStart, Self::Releases, Self::Trims];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Streams => "streams",
            Self::LateStart => "late start",
            Self::Releases => "releases",
            Self::Trims => "trims",
        }
    }

    /// A recording of size `n`.
    #[must_use]
    pub fn recording(self, n: u64) -> Snapshot {
        match self {
            Self::Streams => streams(n),
            Self::LateStart => late_start(n),
            Self::Releases => releases(n),
            Self::Trims => trims(n),
        }
    }
}

/// Events with increasing times.
#[derive(Default)]
struct Events(Vec<TraceEntry>);

impl Events {
    fn add(&mut self, action: Action, addr: u64, size: u64, stream: u64, pool: MemPoolId) {
        let time_us = i64::try_from(self.0.len()).expect("few events");
        self.0.push(TraceEntry { pool: Some(pool), ..TraceEntry::new(action, addr, size, stream, time_us) });
    }

    fn free(&mut self, addr: u64, size: u64, stream: u64, pool: MemPoolId) {
        self.add(Action::FreeRequested, addr, size, stream, pool);
        self.add(Action::FreeCompleted, addr, size, stream, pool);
    }

    fn snapshot(self, segments: Vec<SegmentInfo>, expandable: bool) -> Snapshot {
        let settings = RecordedSettings { expandable_segments: Some(expandable), ..RecordedSettings::default() };
        Snapshot { segments, traces: vec![self.0], settings, ..Snapshot::default() }
    }
}

fn segment(address: u64, total_size: u64, stream: u64, kind: SegmentKind, blocks: Vec<BlockInfo>) -> SegmentInfo {
    let allocated = || blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated);
    let allocated_size = allocated().map(|block| block.size).sum();
    SegmentInfo {
        device: 0,
        address,
        total_size,
        allocated_size,
        active_size: allocated_size,
        requested_size: allocated().map(|block| block.requested_size).sum(),
        stream,
        kind,
        pool: MemPoolId::DEFAULT,
        is_expandable: false,
        is_elastic: false,
        stack: None,
        blocks,
    }
}

fn block(address: u64, size: u64, state: BlockState) -> BlockInfo {
    let requested_size = if state == BlockState::Inactive { 0 } else { size };
    BlockInfo { address, size, requested_size, state, stack: None }
}

fn streams(n: u64) -> Snapshot {
    let mut events = Events::default();
    let base = |stream: u64| FIRST + stream * RANGE;
    for stream in 1..=n {
        events.add(Action::SegmentMap, base(stream), 2 * MIB, stream, MemPoolId::DEFAULT);
        events.add(Action::Alloc, base(stream), MIB, stream, MemPoolId::DEFAULT);
    }
    for stream in 1..=n {
        events.free(base(stream), MIB, stream, MemPoolId::DEFAULT);
    }
    for stream in 1..=n {
        events.add(Action::SegmentUnmap, base(stream), 2 * MIB, stream, MemPoolId::DEFAULT);
    }
    events.snapshot(Vec::new(), true)
}

fn late_start(n: u64) -> Snapshot {
    const PIECES: u64 = 16;
    const PIECE: u64 = 64 << 10;
    let (mut events, mut segments) = (Events::default(), Vec::new());
    for at in 0..n.div_ceil(PIECES) {
        let base = FIRST + at * 2 * MIB;
        let pieces = (0..2 * PIECES).map(|piece| {
            let state = if piece % 2 == 0 { BlockState::ActiveAllocated } else { BlockState::Inactive };
            block(base + piece * PIECE, PIECE, state)
        });
        segments.push(segment(base, 2 * MIB, 0, SegmentKind::Small, pieces.collect()));
    }
    // The lowest piece is used first, so all are used in turn.
    let free: Vec<u64> = segments
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state == BlockState::Inactive)
        .map(|block| block.address)
        .collect();
    for &addr in &free {
        events.add(Action::Alloc, addr, PIECE, 0, MemPoolId::DEFAULT);
    }
    for &addr in &free {
        events.free(addr, PIECE, 0, MemPoolId::DEFAULT);
    }
    events.snapshot(segments, false)
}

fn releases(n: u64) -> Snapshot {
    let mut events = Events::default();
    let base = |at: u64| FIRST + at * 20 * MIB;
    let pool = |at: u64| MemPoolId { graph: 0, user: u32::try_from(at + 1).expect("few pools") };
    for at in 0..n {
        events.add(Action::SegmentAlloc, base(at), 20 * MIB, 0, pool(at));
        events.add(Action::Alloc, base(at), 2 * MIB, 0, pool(at));
        events.free(base(at), 2 * MIB, 0, pool(at));
    }
    for at in 0..n {
        events.add(Action::SegmentFree, base(at), 20 * MIB, 0, pool(at));
    }
    events.snapshot(Vec::new(), false)
}

fn trims(n: u64) -> Snapshot {
    let mut events = Events::default();
    let base = |at: u64| FIRST + at * 20 * MIB;
    for at in 0..n {
        events.add(Action::SegmentAlloc, base(at), 20 * MIB, 0, MemPoolId::DEFAULT);
        events.add(Action::Alloc, base(at), 20 * MIB, 0, MemPoolId::DEFAULT);
    }
    for at in 0..n {
        events.free(base(at), 20 * MIB, 0, MemPoolId::DEFAULT);
        events.add(Action::SegmentFree, base(at), 20 * MIB, 0, MemPoolId::DEFAULT);
    }
    events.snapshot(Vec::new(), false)
}
