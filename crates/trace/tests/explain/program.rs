//! Programs on the caching allocator over the simulated GPU, recorded by its own history: one for each verdict. The
//! same are in `recordings/`, as `verdict.*`; `cargo test -p warpool-trace --test explain write_recordings --
//! --ignored` writes them again, uncompressed.

use std::sync::{Arc, Mutex};

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, Driver, Memory, StreamId, StreamOptions, Streams};
use warpool::memory::pools::{PoolOptions, PrivatePools};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{Frame, HistoryOptions, Snapshot, SnapshotOptions, StackLevel};
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Error, Instance};

use crate::common::{MIB, RECORDINGS, read, recording, written};

pub const GIB: u64 = 1024 * MIB;
const DEVICE: DeviceId = DeviceId(0);

/// A running program.
struct Program {
    driver: Arc<SimDriver>,
    allocator: CachingAllocator,
    streams: [StreamId; 2],
    /// The line that allocates.
    line: Arc<Mutex<&'static str>>,
}

impl Program {
    fn new() -> Self {
        let driver = Arc::new(SimDriver::new(SimConfig::default().without_suballocation_tracking()));
        let instance = Instance::new(Arc::clone(&driver) as Arc<dyn Driver>).expect("an instance");
        let allocator = CachingAllocator::new(&instance, Settings::default());
        let line = Arc::new(Mutex::new("main"));
        let shown = Arc::clone(&line);
        allocator.observers().set_stack_hook(Some(Arc::new(move || {
            let name = (*shown.lock().expect("not poisoned")).to_owned();
            let frame = |name: String, filename: &str, line| Frame { name, filename: filename.to_owned(), line };
            let inner = frame("empty".to_owned(), "torch/functional.py", 7);
            let line = u64::from(name.as_bytes()[0]);
            Some(vec![inner, frame(name, "train.py", line)].into())
        })));
        let history = HistoryOptions { stacks: StackLevel::Alloc, ..HistoryOptions::default() };
        allocator.record_history(Some(history)).expect("a history");
        let other = driver.stream_create(DEVICE, StreamOptions::default()).expect("a stream");
        let streams = [driver.stream_default(DEVICE).expect("a device"), other];
        Self { driver, allocator, streams, line }
    }

    fn limit(&self, bytes: u64) -> &Self {
        self.allocator.set_memory_cap(DEVICE, Some(bytes)).expect("a device");
        self
    }

    /// Allocates on a stream, in a line of the program.
    fn on(&self, stream: usize, line: &'static str, bytes: u64) -> Option<Allocation> {
        *self.line.lock().expect("not poisoned") = line;
        self.request(Request::new(DEVICE, self.streams[stream], bytes))
    }

    fn request(&self, request: Request) -> Option<Allocation> {
        match self.allocator.allocate_raw(request) {
            Ok(allocation) => Some(allocation),
            Err(Error::OutOfMemory(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn free(&self, allocation: Option<Allocation>) {
        self.allocator.free(allocation.expect("it was allocated")).expect("a block");
    }

    fn snapshot(&self) -> Snapshot {
        self.allocator.snapshot(SnapshotOptions::default()).expect("a snapshot")
    }
}

/// Weights, activations, and a request that nothing on the device could have served.
pub fn too_much() -> Snapshot {
    let program = Program::new();
    for _ in 0..20 {
        program.on(0, "weights", 4 * GIB).expect("there is room");
    }
    while program.on(0, "activations", 3 * GIB).is_some() {}
    program.snapshot()
}

/// The same under a limit of 2 GiB, on a device that has more.
pub fn limited() -> Snapshot {
    let program = Program::new();
    program.limit(2 * GIB);
    while program.on(0, "weights", 200 * MIB).is_some() {}
    program.snapshot()
}

/// Large blocks are freed and reused for small ones, some of which stay allocated, so no large block fits any more.
pub fn fragmented() -> Snapshot {
    let program = Program::new();
    program.limit(2 * GIB);
    let large: Vec<_> = (0..9).map(|_| program.on(0, "buffers", 200 * MIB)).collect();
    large.into_iter().for_each(|block| program.free(block));
    let rows: Vec<_> = (0..36).map(|_| program.on(0, "rows", 50 * MIB)).collect();
    for row in rows.into_iter().step_by(2) {
        program.free(row);
    }
    assert!(program.on(0, "buffers", 400 * MIB).is_none(), "it is in pieces");
    program.snapshot()
}

/// The second stream has freed the memory that the first one needs, and a small part of each segment is still in use.
pub fn other_stream() -> Snapshot {
    let program = Program::new();
    program.limit(2 * GIB);
    let large: Vec<_> = (0..8).map(|_| program.on(1, "prefetch", 200 * MIB)).collect();
    large.into_iter().for_each(|block| program.free(block));
    // Two blocks in each segment; one of them stays allocated.
    let halves: Vec<_> = (0..16).map(|_| program.on(1, "prefetch", 95 * MIB)).collect();
    for half in halves.into_iter().step_by(2) {
        program.free(half);
    }
    while program.on(0, "forward", 100 * MIB).is_some() {}
    program.snapshot()
}

/// A private pool keeps the memory that was freed in it.
pub fn other_pool() -> Snapshot {
    let program = Program::new();
    program.limit(2 * GIB);
    let pool = program.allocator.create_pool(DEVICE, PoolOptions::default()).expect("a device");
    *program.line.lock().expect("not poisoned") = "graph";
    let in_pool = |bytes| program.request(Request::new(DEVICE, program.streams[0], bytes).in_pool(pool));
    let blocks: Vec<_> = (0..6).map(|_| in_pool(200 * MIB)).collect();
    blocks.into_iter().for_each(|block| program.free(block));
    assert!(!pool.is_default() && MemPoolId::DEFAULT.is_default());
    while program.on(0, "forward", 150 * MIB).is_some() {}
    program.snapshot()
}

/// Somebody else takes 120 GiB of the device.
pub fn outside() -> Snapshot {
    let program = Program::new();
    program.driver.mem_alloc(DEVICE, 120 * GIB).expect("there is room");
    while program.on(0, "weights", 512 * MIB).is_some() {}
    program.snapshot()
}

/// Every iteration keeps 96 MiB.
pub fn growing() -> Snapshot {
    let program = Program::new();
    program.limit(4 * GIB);
    program.on(0, "weights", 512 * MIB).expect("there is room");
    'iterations: loop {
        let mut temporary = Vec::new();
        for bytes in [64 * MIB, 128 * MIB, 256 * MIB] {
            match program.on(0, "forward", bytes) {
                Some(block) => temporary.push(block),
                None => break 'iterations,
            }
        }
        if program.on(0, "losses", 96 * MIB).is_none() {
            break;
        }
        temporary.into_iter().for_each(|block| program.free(Some(block)));
    }
    program.snapshot()
}

/// All of them, by the names of their recordings.
pub fn all() -> [(&'static str, Snapshot); 7] {
    [
        ("verdict.growth", growing()),
        ("verdict.limit", limited()),
        ("verdict.live_exceeds_device", too_much()),
        ("verdict.other_pool", other_pool()),
        ("verdict.other_stream", other_stream()),
        ("verdict.outside", outside()),
        ("verdict.fragmentation", fragmented()),
    ]
}

/// The files in `recordings/` are what these programs record now.
#[test]
fn recordings_are_up_to_date() {
    for (name, snapshot) in all() {
        let now = read(&written(&snapshot)).expect("it was just written").snapshot;
        let recorded = recording(&format!("{name}.pickle.xz")).snapshot;
        assert!(now == recorded, "{name} records something else now: run write_recordings and compress them");
    }
}

#[test]
#[ignore = "writes files into recordings/"]
fn write_recordings() {
    for (name, snapshot) in all() {
        std::fs::write(format!("{RECORDINGS}/{name}.pickle"), written(&snapshot)).expect("a file");
    }
}
