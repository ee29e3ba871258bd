//! Steps with graphs: captures that succeed, fail or panic, replays on any stream, resets and drops while replays run.

use std::sync::Arc;

use warpool::driver::{CaptureMode, DevicePtr};
use warpool::graph::{BufferKey, Capture, CaptureOptions, Fork, Graph, GraphOptions};
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::Allocation;
use warpool::memory::{DeviceBlock, MemPool, MemPoolId};
use warpool::{Error, Result, Stream};

use super::Run;
use super::blocks::{Held, Owned};
use crate::allocators::into_block;
use crate::caught::{caught, inject_panic};
use crate::machine::Outcome;

/// The graphs of a program.
#[derive(Default)]
pub struct Graphs {
    all: Vec<Captured>,
    /// The stream of the last replay with each pool: the next replay waits for it.
    last_replay: Vec<(usize, MemPoolId, Stream)>,
}

impl Graphs {
    pub fn count(&self) -> usize {
        self.all.len()
    }

    fn last_replay(&self, device: usize, pool: MemPoolId) -> Option<&Stream> {
        let same = |(on, of, _): &&(usize, MemPoolId, Stream)| (*on, *of) == (device, pool);
        self.last_replay.iter().find(same).map(|(_, _, stream)| stream)
    }
}

/// A captured graph, and what belongs to it.
struct Captured {
    graph: Graph,
    device: usize,
    pool: MemPoolId,
    /// A pool of the program that it was captured into.
    lent: Option<MemPool>,
    body: Body,
}

/// The blocks of a capture.
#[derive(Default)]
struct Body {
    /// Blocks that the graph allocated and owns, with their tags.
    owned: Vec<(BufferKey, DevicePtr, u64, u32)>,
    /// Blocks that the program allocated in the capture and did not free there.
    left: Vec<Held>,
    /// Blocks that the program shares with the graph.
    shared: Vec<(Arc<DeviceBlock>, u32)>,
    /// Blocks that were moved into the graph.
    moved: Vec<DevicePtr>,
}

impl Run<'_> {
    /// Captures a graph that allocates and frees, while other streams go on.
    pub fn capture(&mut self) {
        if self.graphs.count() >= 4 || self.context.skips("captures") || !self.subject.has_pools() {
            return;
        }
        let device = self.context.rng.below(self.devices);
        let Some(root) = self.idle_stream(device) else { return };
        let options = GraphOptions { keep_graph: self.context.rng.one_in(3) };
        let mut graph = Graph::new(&self.subject.allocator, &self.machine.device(device), options).unwrap();
        let mut body = Body::default();
        // Inputs are written before the capture, ordered before any stream that the graph is replayed on.
        for _ in 0..self.context.rng.below(3) {
            let Some(held) = self.allocate_on(&root, None) else { continue };
            let tag = held.tag;
            body.shared.push((Arc::new(self.owned_block(held)), tag));
        }
        self.machine.wait_for(&root);
        let (mode, mut pool) = self.capture_options(device);
        let lent = self.lent_pool(device, pool.is_none());
        pool = pool.or_else(|| lent.clone());
        let mut options = CaptureOptions::default().with_mode(mode);
        options.pool = pool.as_ref();
        self.context.step(format!("capture on {}, {options:?}", root.id()));
        let mut gave_up = false;
        let armed = self.machine.arm(self.context);
        let outcome = caught(|| {
            graph.capture(&root, options, |capture| {
                self.machine.suspend();
                let outcome = self.body(capture, &mut body, &mut gave_up);
                self.machine.resume(&armed);
                outcome
            })
        });
        self.capturing.clear();
        let outcome = self.machine.settle(self.context, armed, outcome, gave_up);
        self.context.step(format!("the capture ends: {}", graph.is_captured()));
        assert_eq!(graph.is_captured(), outcome == Outcome::Done(()), "whether the graph is captured");
        self.machine.expect_capture_ended(&mut graph, &root);
        if outcome == Outcome::Done(()) {
            self.context.counts.captures += 1;
            let pool = graph.pool().unwrap().id();
            self.graphs.all.push(Captured { graph, device, pool, lent, body });
        } else {
            self.context.counts.captures_failed += 1;
            drop(graph);
            self.end_body(body);
        }
    }

    /// The mode of a capture, and the pool of another graph, or none.
    fn capture_options(&mut self, device: usize) -> (CaptureMode, Option<MemPool>) {
        let modes = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        let mode = self.context.rng.pick(&modes);
        let shared: Vec<usize> = (0..self.graphs.count()).filter(|&at| self.graphs.all[at].device == device).collect();
        if !shared.is_empty() && self.context.rng.one_in(3) {
            let other = self.context.rng.pick(&shared);
            return (mode, Some(self.graphs.all[other].graph.pool().unwrap().clone()));
        }
        (mode, None)
    }

    /// A pool for one graph with `use_on_oom`: it would lend its memory, but not while a graph uses it.
    fn lent_pool(&mut self, device: usize, wanted: bool) -> Option<MemPool> {
        let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        let is_drawn = wanted && self.subject.caching.is_some() && self.context.rng.one_in(3);
        is_drawn.then(|| MemPool::new(&self.subject.allocator, &self.machine.device(device), options).unwrap())
    }

    /// Checks that raw calls do not free a block that a graph owns.
    pub fn free_owned(&self, at: usize) {
        if self.subject.caching.is_none() && self.subject.paged.is_none() {
            return;
        }
        for &(_, ptr, _, _) in &self.graphs.all[at].body.owned {
            let freed = self.subject.allocator.free_raw(ptr);
            assert!(matches!(freed, Err(Error::HeldByGraph { .. })), "a free of a graph's block at {ptr}: {freed:?}");
        }
    }

    /// The owned block of a held allocation.
    fn owned_block(&self, held: Held) -> DeviceBlock {
        match held.owned {
            Owned::Block(block) => block,
            Owned::Raw(allocation) => into_block(&self.subject.allocator, allocation),
        }
    }

    /// The body of the capture. In some captures it gives up with an error or a panic.
    fn body(&mut self, capture: &mut Capture<'_>, body: &mut Body, gave_up: &mut bool) -> Result<()> {
        self.capturing = vec![capture.stream().clone()];
        let mut forks: Vec<Fork> = Vec::new();
        let root = capture.stream().clone();
        for index in 0..body.shared.len() {
            let (block, tag) = body.shared[index].clone();
            self.machine.check_tag(block.ptr(), block.bytes(), tag, &root);
            capture.share(block)?;
        }
        for _ in 0..2 + self.context.rng.below(14) {
            let stream = self.capturing[self.context.rng.below(self.capturing.len())].clone();
            match self.context.rng.below(16) {
                0..4 => {
                    let held = self.allocate_on(&stream, None);
                    body.left.extend(held);
                }
                4 | 5 => self.allocate_owned(capture, &stream, body),
                6 | 7 if !body.left.is_empty() => {
                    let held = body.left.swap_remove(self.context.rng.below(body.left.len()));
                    let used = if stream == held.stream {
                        self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &stream);
                        held
                    } else {
                        self.use_on(held, &stream)
                    };
                    body.left.push(used);
                }
                8 | 9 if !body.left.is_empty() => {
                    let held = body.left.swap_remove(self.context.rng.below(body.left.len()));
                    self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &held.stream);
                    self.free_unchecked(held);
                }
                10 if !body.left.is_empty() => {
                    let held = body.left.swap_remove(self.context.rng.below(body.left.len()));
                    self.context.step(format!("  block {} is moved into the graph", held.tag));
                    let (ptr, block) = (held.ptr(), self.owned_block(held));
                    body.moved.push(ptr);
                    capture.keep(block)?;
                }
                11 if forks.len() < 2 => match self.machine.call(self.context, || capture.fork()) {
                    Outcome::Done(fork) => {
                        self.context.step(format!("  fork {}", fork.id()));
                        self.capturing.push((*fork).clone());
                        forks.push(fork);
                    }
                    _ => return self.give_up(gave_up),
                },
                12 => self.allocate(),
                13 => self.free(),
                14 => match self.context.rng.below(3) {
                    0 => self.trim(),
                    1 => self.use_elsewhere(),
                    _ => self.switch_caching(),
                },
                15 if self.context.rng.one_in(6) => return self.give_up(gave_up),
                15 if self.context.rng.one_in(6) => {
                    self.context.step("  the body panics");
                    inject_panic();
                }
                _ => {}
            }
            self.check();
        }
        for fork in forks {
            if self.machine.call(self.context, || capture.join(fork)) != Outcome::Done(()) {
                return self.give_up(gave_up);
            }
        }
        Ok(())
    }

    fn give_up(&self, gave_up: &mut bool) -> Result<()> {
        self.context.step("  the body gives up");
        *gave_up = true;
        Err(Error::NoDevice { driver: "none: the program gave up" })
    }

    /// A block that the graph owns.
    fn allocate_owned(&mut self, capture: &mut Capture<'_>, stream: &Stream, body: &mut Body) {
        let bytes = self.sizes.next(&mut self.context.rng);
        self.context.step(format!("  allocate {bytes} for the graph, on {}", stream.id()));
        let outcome = self.machine.call(self.context, || capture.allocate_on(bytes, stream));
        let Outcome::Done(key) = outcome else {
            self.not_allocated(&outcome, stream);
            return;
        };
        let block = capture.buffer(key).unwrap();
        let (ptr, device) = (block.ptr(), block.device_id());
        let slot = match &self.subject.caching {
            Some(caching) => u64::from(warpool::memory::DeviceAllocator::find(&**caching, ptr).is_ok()),
            None => 1,
        };
        let (bytes_usable, stream_id) = (block.bytes_usable(), stream.id());
        let allocation = Allocation {
            ptr,
            bytes: bytes_usable,
            bytes_requested: bytes,
            device,
            stream: stream_id,
            slot,
            generation: 0,
        };
        let counted = self.is_counted(&allocation);
        self.table.insert(&allocation, counted);
        self.context.counts.allocations += 1;
        let tag = self.tag();
        self.context.step(format!("  block {tag} at {ptr}"));
        self.machine.write_tag(ptr, bytes, tag, stream);
        body.owned.push((key, ptr, bytes, tag));
    }

    /// Replays a graph after the last replay with the same pool, and checks the blocks that it leaves.
    pub fn replay(&mut self) {
        if self.graphs.count() == 0 {
            return;
        }
        let at = self.context.rng.below(self.graphs.count());
        let device = self.graphs.all[at].device;
        let stream = self.machine.stream(device, self.context.rng.below(self.streams)).clone();
        if self.is_capturing(&stream) {
            return;
        }
        if self.context.rng.one_in(4) {
            self.free_owned(at);
        }
        let captured = &self.graphs.all[at];
        self.context.step(format!("replay the graph of pool {} on {}", captured.pool, stream.id()));
        if let Some(last) = self.graphs.last_replay(device, captured.pool) {
            self.machine.wait(&stream, last);
        }
        let outcome = self.machine.call(self.context, || captured.graph.replay(&stream));
        if outcome != Outcome::Done(()) {
            // After a panic it is not known whether the graph was launched.
            self.machine.wait_for(&stream);
            return;
        }
        self.context.counts.replays += 1;
        for &(_, ptr, bytes, tag) in &captured.body.owned {
            self.machine.check_tag(ptr, bytes, tag, &stream);
        }
        for held in &captured.body.left {
            self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &stream);
        }
        let pool = captured.pool;
        self.graphs.last_replay.retain(|(on, of, _)| (*on, *of) != (device, pool));
        self.graphs.last_replay.push((device, pool, stream));
    }

    /// Drops or resets a graph, mostly with replays still under way.
    pub fn drop_graph(&mut self) {
        if self.graphs.count() == 0 {
            return;
        }
        let at = self.context.rng.below(self.graphs.count());
        let Captured { mut graph, pool, body, device, lent } = self.graphs.all.swap_remove(at);
        self.context.step(format!("the graph of pool {pool} is dropped"));
        if self.context.rng.one_in(2) {
            let _ = self.machine.call(self.context, || graph.reset());
        }
        // Blocks that the program did not free are not reused before the last replay either: they are in the graph's
        // pool.
        if self.context.rng.one_in(4)
            && let Some(last) = self.graphs.last_replay(device, pool)
        {
            self.machine.wait_for(last);
        }
        drop(graph);
        self.end_body(body);
        drop(lent);
    }

    /// Frees the blocks of a capture. Their contents are unknown: another graph of the pool may have been replayed.
    fn end_body(&mut self, body: Body) {
        let Body { owned, left, shared, moved } = body;
        for (_, ptr, _, _) in owned {
            self.table.remove(ptr);
        }
        for ptr in moved {
            self.table.remove(ptr);
        }
        for (block, _) in shared {
            let ptr = block.ptr();
            let block = Arc::try_unwrap(block).unwrap_or_else(|_| panic!("a graph that is gone shares {ptr}"));
            drop(block);
            self.table.remove(ptr);
        }
        for held in left {
            self.free_unchecked(held);
        }
    }
}
