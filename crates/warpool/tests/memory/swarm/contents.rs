//! Random programs that use their memory: every block gets a tag from its owner's stream, which is checked there, from
//! other streams, and once more before the block is freed.
//!
//! The programs are correct: work of another stream on a block comes after its owner's work, and is recorded or joined
//! before the block is freed. So any overwritten tag, and any hazard that the simulation reports, is a bug of the
//! allocator.

use std::sync::Arc;

use warpool::driver::{
    CaptureMode, CaptureState, Captures as _, DeviceId, DevicePtr, GraphExecId, Graphs as _, InstantiateOptions,
};
use warpool::memory::{
    Allocation, CachingAllocator, DeviceAllocator, DeviceBlock, FreeBlockOrder, MemPool, MemPoolId, PoolOptions,
    PoolScope, PrivatePools, Request, Route, Settings,
};
use warpool::{Error, Stream};
use warpool_testing::FailingSeed;

use super::machine::Machine;
use crate::common::rng::Rng;

const MIB: u64 = 1 << 20;
const STREAMS: usize = 3;

/// An allocated block.
struct Held {
    owned: Owned,
    tag: u32,
    stream: Stream,
    /// Another stream may still read it.
    read_elsewhere: bool,
}

enum Owned {
    Raw(Allocation),
    Block(DeviceBlock),
}

impl Held {
    fn ptr(&self) -> DevicePtr {
        match &self.owned {
            Owned::Raw(allocation) => allocation.ptr,
            Owned::Block(block) => block.ptr(),
        }
    }

    fn bytes(&self) -> u64 {
        match &self.owned {
            Owned::Raw(allocation) => allocation.bytes_requested,
            Owned::Block(block) => block.bytes(),
        }
    }
}

/// A captured graph, with its pool and the blocks that it leaves allocated.
struct Graph {
    exec: GraphExecId,
    device: usize,
    pool: MemPoolId,
    left: Vec<Held>,
    /// Blocks from outside that it reads.
    inputs: Vec<Held>,
}

/// How often each operation happened.
#[derive(Debug, Default)]
pub struct Tally {
    pub allocations: u64,
    pub uses: u64,
    pub captures: u64,
    pub launches: u64,
    pub ooms: u64,
    pub retries: u64,
}

struct Run<'a> {
    machine: Machine,
    allocator: Arc<CachingAllocator>,
    settings: Settings,
    held: Vec<Held>,
    graphs: Vec<Graph>,
    /// The stream of the last launch of a graph, by pool: the next launch waits for it.
    last_launch: Vec<(MemPoolId, Stream)>,
    pools: Vec<(usize, MemPoolId)>,
    scopes: Vec<PoolScope>,
    /// Streams that take part in the current capture.
    capturing: Vec<Stream>,
    peers: bool,
    next_tag: u32,
    rng: Rng,
    failing: FailingSeed,
    tally: &'a mut Tally,
}

/// One program.
pub fn run(seed: u64, tally: &mut Tally) {
    let mut rng = Rng::new(seed);
    let machine = Machine::new(seed, 2, STREAMS);
    let settings = draw_settings(&mut rng);
    let allocator = Arc::new(CachingAllocator::new(&machine.instance, settings.clone()));
    let peers = rng.one_in(3);
    if peers {
        allocator.enable_peer_access(DeviceId(1), DeviceId(0)).unwrap();
        allocator.enable_peer_access(DeviceId(0), DeviceId(1)).unwrap();
    }
    let mut failing = FailingSeed::new(seed);
    failing.push(format!("peers {peers}, {}", settings.to_conf_string()));
    let mut run = Run {
        machine,
        allocator,
        settings,
        held: Vec::new(),
        graphs: Vec::new(),
        last_launch: Vec::new(),
        pools: Vec::new(),
        scopes: Vec::new(),
        capturing: Vec::new(),
        peers,
        next_tag: 1,
        rng,
        failing,
        tally,
    };
    for _ in 0..30 + run.rng.below(50) {
        run.step();
        run.allocator.check();
    }
    run.finish();
}

impl Run<'_> {
    fn step(&mut self) {
        match self.rng.below(40) {
            0..12 => self.allocate(),
            12..15 => self.check_tag(),
            15..20 => self.use_elsewhere(),
            20..28 => self.free(),
            28 => self.trim(),
            29 | 30 => self.change_pools(),
            31 => self.change_scopes(),
            32 => self.change_settings(),
            33 | 34 => self.capture(),
            35..38 => self.launch(),
            38 => self.destroy_graph(),
            _ => self.synchronize(),
        }
    }

    fn is_capturing(&self, stream: &Stream) -> bool {
        self.capturing.contains(stream)
    }

    /// A stream of the device that takes no part in a capture.
    fn idle_stream(&mut self, device: usize) -> Option<Stream> {
        let idle: Vec<usize> =
            (0..STREAMS).filter(|&index| !self.is_capturing(self.machine.stream(device, index))).collect();
        (!idle.is_empty()).then(|| self.machine.stream(device, self.rng.pick(&idle)).clone())
    }

    fn allocate(&mut self) {
        let device = self.rng.below(2);
        let Some(stream) = self.idle_stream(device) else { return };
        let of_device: Vec<MemPoolId> =
            self.pools.iter().filter(|(on, _)| *on == device).map(|&(_, pool)| pool).collect();
        let pool = (!of_device.is_empty() && self.rng.one_in(3)).then(|| self.rng.pick(&of_device));
        if let Some(held) = self.allocate_on(&stream, pool) {
            self.held.push(held);
        }
    }

    /// A block for a stream, with a tag.
    fn allocate_on(&mut self, stream: &Stream, pool: Option<MemPoolId>) -> Option<Held> {
        let bytes = self.rng.request_bytes();
        let mut request = Request::new(stream.device_id(), stream.id(), bytes);
        request.pool = pool;
        self.failing.push(format!("allocate {bytes} on {} from {pool:?}", stream.id()));
        let allocation = match self.allocator.allocate_raw(request) {
            Ok(allocation) => allocation,
            Err(Error::OutOfMemory(_)) => {
                self.tally.ooms += 1;
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        self.tally.allocations += 1;
        let tag = self.next_tag;
        self.next_tag += 1;
        self.failing.push(format!("  block {tag} at {}", allocation.ptr));
        self.machine.write_tag(allocation.ptr, bytes, tag, stream);
        let owned = match self.rng.below(2) {
            0 => Owned::Raw(allocation),
            // SAFETY: it was allocated just now, and has no other owner.
            _ => Owned::Block(unsafe { DeviceBlock::from_raw(self.allocator.clone(), allocation) }),
        };
        Some(Held { owned, tag, stream: stream.clone(), read_elsewhere: false })
    }

    fn check_tag(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.rng.below(self.held.len());
        let held = &mut self.held[at];
        if self.capturing.contains(&held.stream) {
            return;
        }
        self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &held.stream);
        if !held.read_elsewhere && self.rng.one_in(3) {
            held.tag = self.next_tag;
            self.next_tag += 1;
            self.machine.write_tag(held.ptr(), held.bytes(), held.tag, &held.stream);
        }
    }

    /// Another stream reads or writes a block; recorded, or joined.
    fn use_elsewhere(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.rng.below(self.held.len());
        let owner = self.held[at].stream.clone();
        let device = if self.peers && self.rng.one_in(3) { self.rng.below(2) } else { owner.device_id().0 as usize };
        let Some(other) = self.idle_stream(device) else { return };
        if self.is_capturing(&owner) || other == owner {
            return;
        }
        let held = self.held.swap_remove(at);
        let used = self.use_on(held, &other);
        self.held.push(used);
    }

    fn use_on(&mut self, mut held: Held, other: &Stream) -> Held {
        let (record, write) = (self.rng.one_in(2), self.rng.one_in(3) && !held.read_elsewhere);
        self.failing.push(format!("{} uses block {}, recorded {record}, writes {write}", other.id(), held.tag));
        self.tally.uses += 1;
        other.wait_stream(&held.stream).unwrap();
        self.machine.check_tag(held.ptr(), held.bytes(), held.tag, other);
        if write {
            held.tag = self.next_tag;
            self.next_tag += 1;
            self.machine.write_tag(held.ptr(), held.bytes(), held.tag, other);
        }
        if record {
            self.allocator.record_use_raw(held.ptr(), other.id()).unwrap();
            held.read_elsewhere = true;
        }
        if write || !record {
            held.stream.wait_stream(other).unwrap();
        }
        held
    }

    fn free(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let held = self.held.swap_remove(self.rng.below(self.held.len()));
        self.free_held(held);
    }

    fn free_held(&mut self, held: Held) {
        if !self.is_capturing(&held.stream) {
            self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &held.stream);
        }
        self.failing.push(format!("free block {}", held.tag));
        match held.owned {
            Owned::Raw(allocation) if self.rng.one_in(2) => self.allocator.free_raw(allocation.ptr).unwrap(),
            Owned::Raw(allocation) => self.allocator.free(allocation).unwrap(),
            Owned::Block(block) if self.rng.one_in(3) => block.free().unwrap(),
            Owned::Block(block) => drop(block),
        }
    }

    fn trim(&mut self) {
        let device = self.rng.below(2);
        let mut pools = vec![MemPoolId::DEFAULT; 2];
        pools.extend(self.pools.iter().filter(|(on, _)| *on == device).map(|&(_, pool)| pool));
        let pool = self.rng.pick(&pools);
        self.failing.push(format!("trim {pool} of device {device}"));
        self.allocator.trim(device_id(device), pool).unwrap();
    }

    fn change_pools(&mut self) {
        if self.pools.len() < 3 && self.rng.one_in(2) {
            let device = self.rng.below(2);
            let options = PoolOptions { upstream: None, use_on_oom: self.rng.one_in(2), no_split: self.rng.one_in(3) };
            let pool = self.allocator.create_pool(device_id(device), options).unwrap();
            self.failing.push(format!("pool {pool} of device {device}"));
            self.pools.push((device, pool));
        } else if !self.pools.is_empty() {
            let (device, pool) = self.pools.swap_remove(self.rng.below(self.pools.len()));
            self.failing.push(format!("pool {pool} is released"));
            self.allocator.release_pool(device_id(device), pool).unwrap();
        }
    }

    fn change_scopes(&mut self) {
        if !self.scopes.is_empty() && self.rng.one_in(2) {
            drop(self.scopes.swap_remove(self.rng.below(self.scopes.len())));
        } else if !self.pools.is_empty() {
            let (device, pool) = self.rng.pick(&self.pools);
            let route = match self.rng.below(2) {
                0 => Route::Thread(std::thread::current().id()),
                _ => Route::Stream(self.machine.stream(device, self.rng.below(STREAMS)).id()),
            };
            let allocator: Arc<dyn DeviceAllocator> = self.allocator.clone();
            let handle =
                MemPool::from_id(&allocator, &self.machine.instance.device(device as u32).unwrap(), pool).unwrap();
            match handle.route(route) {
                Ok(scope) => self.scopes.push(scope),
                Err(Error::AlreadyRouting { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn change_settings(&mut self) {
        self.settings = draw_settings(&mut self.rng);
        self.failing.push(format!("settings {}", self.settings.to_conf_string()));
        self.allocator.set_settings(self.settings.clone());
        let device = device_id(self.rng.below(2));
        let cap = self.rng.one_in(2).then(|| self.rng.pick(&[60, 100]) * MIB);
        self.allocator.set_memory_cap(device, cap).unwrap();
    }

    fn synchronize(&mut self) {
        let device = self.rng.below(2);
        self.machine.stream(device, self.rng.below(STREAMS)).synchronize().unwrap();
    }

    /// Captures a graph on one or two streams that allocates and frees, while other streams continue.
    fn capture(&mut self) {
        if self.graphs.len() >= 3 {
            return;
        }
        let device = self.rng.below(2);
        let (first, second) = (self.rng.below(STREAMS), self.rng.below(STREAMS));
        let root = self.machine.stream(device, first).clone();
        let branch = self.machine.stream(device, second).clone();
        let shared: Vec<MemPoolId> =
            self.graphs.iter().filter(|graph| graph.device == device).map(|graph| graph.pool).collect();
        let pools = self.allocator.clone();
        let pool = if !shared.is_empty() && self.rng.one_in(2) {
            let pool = self.rng.pick(&shared);
            pools.retain_pool(device_id(device), pool).unwrap();
            pool
        } else {
            pools.create_graph_pool(device_id(device)).unwrap()
        };
        // Its inputs are written before, in the order of any stream that it is launched on.
        let mut inputs = Vec::new();
        if self.rng.one_in(2)
            && let Some(input) = self.allocate_on(&root, None)
        {
            root.synchronize().unwrap();
            inputs.push(input);
        }
        let mode = self.rng.pick(&[CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]);
        self.failing.push(format!("capture on {} and {}, {mode:?}, pool {pool}", root.id(), branch.id()));
        self.machine.sim.capture_begin(root.id(), mode).unwrap();
        pools.capture_began(device_id(device)).unwrap();
        let CaptureState::Active(capture) = self.machine.sim.capture_state(root.id()).unwrap() else {
            panic!("the stream should capture");
        };
        pools.begin_routing(device_id(device), pool, Route::Capture(capture)).unwrap();
        self.capturing = vec![root.clone()];
        if branch != root {
            branch.wait_stream(&root).unwrap();
            self.capturing.push(branch.clone());
        }
        let left = self.body(&inputs);
        if branch != root {
            root.wait_stream(&branch).unwrap();
        }
        let graph = self.machine.sim.capture_end(root.id()).unwrap();
        self.failing.push("the capture ends".to_owned());
        self.capturing.clear();
        pools.end_routing(device_id(device), pool).unwrap();
        pools.capture_ended(device_id(device)).unwrap();
        let exec = self.machine.sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
        self.machine.sim.graph_destroy(graph).unwrap();
        self.graphs.push(Graph { exec, device, pool, left, inputs });
        self.tally.captures += 1;
        self.allocator.check();
    }

    /// The body of a capture. Returns the blocks that are allocated at its end.
    fn body(&mut self, inputs: &[Held]) -> Vec<Held> {
        let mut left: Vec<Held> = Vec::new();
        for input in inputs {
            let reader = self.capturing_stream();
            self.machine.check_tag(input.ptr(), input.bytes(), input.tag, &reader);
        }
        for _ in 0..2 + self.rng.below(12) {
            let stream = self.capturing_stream();
            match self.rng.below(10) {
                0..4 => left.extend(self.allocate_on(&stream, None)),
                4 | 5 if !left.is_empty() => {
                    let held = left.swap_remove(self.rng.below(left.len()));
                    left.push(if stream == held.stream {
                        self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &stream);
                        held
                    } else {
                        self.use_on(held, &stream)
                    });
                }
                6 | 7 if !left.is_empty() => {
                    let held = left.swap_remove(self.rng.below(left.len()));
                    self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &held.stream);
                    self.free_held(held);
                }
                8 => self.allocate(),
                9 => match self.rng.below(4) {
                    0 => self.trim(),
                    1 => self.use_elsewhere(),
                    _ => self.free(),
                },
                _ => {}
            }
            self.allocator.check();
        }
        left
    }

    /// One of the capturing streams.
    fn capturing_stream(&mut self) -> Stream {
        self.capturing[self.rng.below(self.capturing.len())].clone()
    }

    /// Launches a graph after the last launch with the same pool, and checks the blocks that it leaves.
    fn launch(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.rng.below(self.graphs.len());
        let device = self.graphs[at].device;
        let stream = self.machine.stream(device, self.rng.below(STREAMS)).clone();
        let graph = &self.graphs[at];
        self.failing.push(format!("launch the graph of pool {} on {}", graph.pool, stream.id()));
        if let Some((_, last)) = self.last_launch.iter().find(|(pool, _)| *pool == graph.pool) {
            stream.wait_stream(last).unwrap();
        }
        self.machine.sim.graph_launch(graph.exec, stream.id()).unwrap();
        for held in &graph.left {
            self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &stream);
        }
        for input in &graph.inputs {
            self.allocator.record_use_raw(input.ptr(), stream.id()).unwrap();
        }
        self.last_launch.retain(|(pool, _)| *pool != graph.pool);
        self.last_launch.push((graph.pool, stream));
        self.tally.launches += 1;
    }

    /// Destroys a graph: waits for its last launch, then frees its blocks and releases its pool.
    fn destroy_graph(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let graph = self.graphs.swap_remove(self.rng.below(self.graphs.len()));
        self.failing.push(format!("the graph of pool {} is destroyed", graph.pool));
        if let Some((_, last)) = self.last_launch.iter().find(|(pool, _)| *pool == graph.pool) {
            last.synchronize().unwrap();
        }
        self.machine.sim.graph_exec_destroy(graph.exec).unwrap();
        for held in graph.inputs {
            self.free_held(held);
        }
        for held in graph.left {
            // Another graph of the same pool may have run since: the contents are unknown.
            match held.owned {
                Owned::Raw(allocation) => self.allocator.free(allocation).unwrap(),
                Owned::Block(block) => drop(block),
            }
        }
        self.allocator.release_pool(device_id(graph.device), graph.pool).unwrap();
    }

    fn finish(mut self) {
        self.scopes.clear();
        while !self.graphs.is_empty() {
            self.destroy_graph();
        }
        for held in std::mem::take(&mut self.held) {
            self.free_held(held);
        }
        for (device, pool) in std::mem::take(&mut self.pools) {
            self.allocator.release_pool(device_id(device), pool).unwrap();
        }
        for device in [0, 1] {
            self.allocator.trim(device_id(device), MemPoolId::DEFAULT).unwrap();
            let stats = self.allocator.stats(device_id(device)).unwrap();
            let left = (stats.active_bytes.all.current, stats.reserved_bytes.all.current);
            assert_eq!(left, (0, 0), "active and reserved on device {device}");
            self.tally.retries += stats.num_alloc_retries;
        }
        self.allocator.check();
        self.machine.expect_clean();
    }
}

fn device_id(index: usize) -> DeviceId {
    DeviceId(u32::try_from(index).expect("two devices"))
}

fn draw_settings(rng: &mut Rng) -> Settings {
    Settings {
        expandable_segments: rng.one_in(2),
        graph_capture_record_stream_reuse: rng.one_in(2),
        max_split_bytes: rng.one_in(4).then(|| rng.pick(&[20, 30]) * MIB),
        garbage_collection_threshold: rng.pick(&[0.0, 0.0, 0.5]),
        roundup_power2_divisions: [rng.pick(&[0, 0, 4]); 16],
        free_block_order: rng.pick(&FreeBlockOrder::ALL),
        per_process_memory_fraction: rng.pick(&[1.0, 0.8]),
        ..Settings::default()
    }
}
