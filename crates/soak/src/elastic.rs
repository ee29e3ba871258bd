//! Elastic memory beside ordinary requests, on a device of few pages: commits take pages of other heaps, requests take
//! those of blocks that were decommitted, while driver calls fail. Graphs that were captured over a range are replayed
//! while the blocks that they use are committed. Pools come and go, limits change, in some programs idle pages decay.
//! A naive model has the contents of every block.
//!
//! The programs are correct: a stream that uses a range waits for the one that used it before.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use warpool::driver::DevicePtr;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::elastic::{ElasticLayout, ElasticRange};
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::{DeviceAllocator, MemPoolId, PagedAllocator, Settings};
use warpool::{Error, Stream};

use crate::context::Context;
use crate::machine::{Machine, Outcome, device_id};

const STREAMS: usize = 3;
const RANGES: usize = 4;
const POOLS: usize = 2;
const MIB: u64 = 1 << 20;

struct Run<'a> {
    context: &'a mut Context,
    machine: Machine,
    paged: Arc<PagedAllocator>,
    allocator: Arc<dyn DeviceAllocator>,
    ranges: Vec<Elastic>,
    /// Ordinary blocks, with their tags and streams.
    blocks: Vec<(Allocation, u32, usize)>,
    pools: Vec<MemPoolId>,
    capacity: u64,
    limit: Option<u64>,
    next_tag: u32,
}

/// A range, and the tag of each block that is committed.
struct Elastic {
    range: ElasticRange,
    tags: Vec<Option<u32>>,
    /// The stream that used it last.
    stream: usize,
    graphs: Vec<Captured>,
}

/// A graph that writes a tag into a block.
struct Captured {
    graph: Graph,
    block: u64,
    tag: u32,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let capacity = context.rng.pick(&[60, 100, 200]) * MIB;
    // What is not told cannot be seen, but takes the shortest paths.
    let is_told = !context.rng.one_in(4);
    let machine = Machine::with(context, 1, STREAMS, |config| {
        config.track_suballocations = is_told;
        config.devices[0].properties.bytes_total = capacity;
    });
    // Memory is idle after a millisecond of virtual time.
    let settings = Settings { idle_decay_ms: context.rng.one_in(2).then_some(1), ..Settings::default() };
    let paged = Arc::new(PagedAllocator::new(&machine.instance, settings).unwrap());
    let (medium, large) = context.rng.pick(&[(u64::MAX, u64::MAX), (0, u64::MAX), (0, 0)]);
    paged.set_page_sizes(medium, large);
    context.step(format!("{capacity} bytes"));
    let (allocator, ranges, blocks, pools) = (paged.clone(), Vec::new(), Vec::new(), Vec::new());
    let mut run = Run { context, machine, paged, allocator, ranges, blocks, pools, capacity, limit: None, next_tag: 0 };
    for _ in 0..40 + run.context.rng.below(100) {
        run.step();
        run.machine.check_hazards();
        run.paged.check();
    }
    run.finish();
}

impl Elastic {
    /// The places of a block, with their size.
    fn pieces(&self, block: u64) -> impl Iterator<Item = (DevicePtr, u64)> + use<> {
        let ElasticRange { ptr, layout: ElasticLayout { rows, blocks, block_bytes }, .. } = self.range;
        (0..rows).map(move |row| (ptr.offset((row * blocks + block) * block_bytes), block_bytes))
    }

    fn committed(&self) -> u64 {
        self.tags.iter().flatten().count() as u64
    }
}

impl Run<'_> {
    fn step(&mut self) {
        match self.context.rng.below(34) {
            0..2 => self.reserve(),
            2 if self.ranges.len() > 1 => self.release(),
            3..9 => self.commit(),
            9..13 => self.decommit(),
            13..17 => self.allocate(),
            17..21 => self.free(),
            21 => self.capture(),
            22..24 => self.replay(),
            24 => self.check_headroom(),
            25 => {
                self.context.step("trim");
                let paged = &self.paged;
                self.machine.call(self.context, || paged.trim(device_id(0), MemPoolId::DEFAULT));
            }
            26 => {
                let (stream, pause) = (self.context.rng.below(STREAMS), self.context.rng.one_in(2));
                self.machine.pause_or_resume(self.machine.stream(0, stream), pause);
            }
            27..30 => self.decay(),
            30 => {
                let limit = self.context.rng.one_in(2).then(|| self.context.rng.u64_in(1..=4) * self.capacity / 4);
                self.context.step(format!("at most {limit:?}"));
                self.paged.set_memory_cap(device_id(0), limit).unwrap();
                self.limit = limit;
            }
            31 => self.change_pools(),
            _ => {
                let stream = self.context.rng.below(STREAMS);
                self.machine.wait_for(self.machine.stream(0, stream));
            }
        }
    }

    fn decay(&mut self) {
        let micros = self.context.rng.pick(&[50, 200, 2000]);
        self.context.step(format!("after {micros} us idle pages are released"));
        self.machine.sim.pass_time(Duration::from_micros(micros));
        let paged = &self.paged;
        if matches!(self.machine.call(self.context, || paged.release_idle(device_id(0))), Outcome::Done(1..)) {
            self.context.made("decay");
        }
    }

    /// Makes a pool, or releases one, in which blocks may be live.
    fn change_pools(&mut self) {
        let pools = self.allocator.pools().unwrap();
        if self.pools.len() < POOLS {
            let pool = pools.create_pool(device_id(0), PoolOptions::default()).unwrap();
            self.context.step(format!("pool {pool}"));
            self.pools.push(pool);
        } else {
            let pool = self.pools.swap_remove(self.context.rng.below(POOLS));
            self.context.step(format!("release pool {pool}"));
            pools.release_pool(device_id(0), pool).unwrap();
        }
    }

    fn stream(&self, index: usize) -> Stream {
        self.machine.stream(0, index).clone()
    }

    fn new_tag(&mut self) -> u32 {
        self.next_tag += 1;
        self.next_tag
    }

    fn reserve(&mut self) {
        if self.ranges.len() >= RANGES {
            return;
        }
        let rng = &mut self.context.rng;
        let layout = ElasticLayout {
            rows: rng.u64_in(1..=3),
            blocks: rng.u64_in(1..=24),
            block_bytes: rng.pick(&[512, 64 << 10, 100 << 10, MIB, 3 * MIB, 4 * MIB]),
        };
        let stream = rng.below(STREAMS);
        self.context.step(format!("reserve {layout:?} on stream {stream}"));
        let (allocator, id) = (&self.allocator, self.machine.stream(0, stream).id());
        let reserved = self.machine.call(self.context, || allocator.elastic()?.reserve(device_id(0), id, layout));
        if let Outcome::Done(range) = reserved {
            let tags = vec![None; usize::try_from(layout.blocks).expect("few blocks")];
            self.ranges.push(Elastic { range, tags, stream, graphs: Vec::new() });
        }
    }

    /// A range that a stream uses now, after the stream that used it before; and some of its blocks.
    fn any_range(&mut self) -> Option<(usize, usize, Range<u64>)> {
        if self.ranges.is_empty() {
            return None;
        }
        let at = self.context.rng.below(self.ranges.len());
        let blocks = self.ranges[at].range.layout.blocks;
        let from = self.context.rng.u64_in(0..=blocks);
        let until = self.context.rng.u64_in(from..=blocks);
        Some((at, self.use_range(at), from..until))
    }

    fn use_range(&mut self, at: usize) -> usize {
        let stream = self.context.rng.below(STREAMS);
        let before = std::mem::replace(&mut self.ranges[at].stream, stream);
        self.machine.wait(self.machine.stream(0, stream), self.machine.stream(0, before));
        stream
    }

    fn commit(&mut self) {
        let Some((at, stream, blocks)) = self.any_range() else { return };
        self.context.step(format!("commit {blocks:?} of range {at} on stream {stream}"));
        let (allocator, range, stream) = (&self.allocator, self.ranges[at].range, self.stream(stream));
        let wanted = blocks.clone();
        let outcome =
            self.machine.call(self.context, || allocator.elastic()?.commit(&range, stream.id(), wanted.clone()));
        let done = matches!(outcome, Outcome::Done(()));
        self.context.made(if done { "commit" } else { "commit failed" });
        for block in blocks {
            let number = usize::try_from(block).expect("few blocks");
            if done && self.ranges[at].tags[number].is_none() {
                let tag = self.new_tag();
                self.ranges[at].tags[number] = Some(tag);
                let pieces = self.ranges[at].pieces(block);
                pieces.for_each(|(ptr, bytes)| self.machine.write_pages(ptr, bytes, tag, &stream));
            }
            self.check_block(at, block);
        }
        self.check_count(at);
    }

    /// Checks the contents of a block, if it is committed.
    fn check_block(&self, at: usize, block: u64) {
        let (elastic, ranges) = (&self.ranges[at], self.allocator.elastic().unwrap());
        let tag = elastic.tags[usize::try_from(block).expect("few blocks")];
        assert_eq!(ranges.is_committed(&elastic.range, block..block + 1), tag.is_some(), "block {block} of range {at}");
        if let Some(tag) = tag {
            let stream = self.machine.stream(0, elastic.stream);
            elastic.pieces(block).for_each(|(ptr, bytes)| self.machine.check_pages(ptr, bytes, tag, stream));
        }
    }

    fn check_count(&self, at: usize) {
        let elastic = &self.ranges[at];
        let committed = self.allocator.elastic().unwrap().committed(&elastic.range);
        assert_eq!(committed, elastic.committed(), "committed blocks of range {at}");
    }

    fn decommit(&mut self) {
        let Some((at, stream, blocks)) = self.any_range() else { return };
        self.context.step(format!("decommit {blocks:?} of range {at} on stream {stream}"));
        blocks.clone().for_each(|block| self.check_block(at, block));
        let (allocator, range, id) = (&self.allocator, self.ranges[at].range, self.machine.stream(0, stream).id());
        let wanted = blocks.clone();
        let outcome = self.machine.call(self.context, || allocator.elastic()?.decommit(&range, id, wanted.clone()));
        if let Outcome::Done(()) = outcome {
            for block in blocks {
                self.ranges[at].tags[usize::try_from(block).expect("few blocks")] = None;
            }
        }
        self.check_count(at);
    }

    fn release(&mut self) {
        let at = self.context.rng.below(self.ranges.len());
        self.release_at(at);
    }

    fn release_at(&mut self, at: usize) {
        self.context.step(format!("release range {at}"));
        let Elastic { range, stream, graphs, .. } = self.ranges.swap_remove(at);
        drop(graphs);
        // Its memory is free in the order of the stream that it was reserved for.
        let own = self.machine.streams[0].iter().find(|stream| stream.id() == range.stream).expect("one of them");
        self.machine.wait(own, self.machine.stream(0, stream));
        let ranges = self.allocator.elastic().unwrap();
        ranges.release(&range);
        assert_eq!(ranges.commit(&range, range.stream, 0..1), Err(Error::UnknownElastic { ptr: range.ptr }));
    }

    fn allocate(&mut self) {
        let stream = self.context.rng.below(STREAMS);
        let bytes = self.context.rng.pick(&[1000, MIB, 3 * MIB, 10 * MIB, 30 * MIB]);
        self.context.step(format!("allocate {bytes} on stream {stream}"));
        let mut request = Request::new(device_id(0), self.machine.stream(0, stream).id(), bytes);
        if !self.pools.is_empty() && self.context.rng.one_in(3) {
            request = request.in_pool(self.context.rng.pick(&self.pools));
        }
        let allocator = &self.allocator;
        let outcome = self.machine.call(self.context, || allocator.allocate_raw(request));
        if let Outcome::Done(allocation) = outcome {
            self.context.counts.allocations += 1;
            let tag = self.new_tag();
            self.machine.write_pages(allocation.ptr, bytes, tag, self.machine.stream(0, stream));
            self.blocks.push((allocation, tag, stream));
        }
    }

    fn free(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let (block, tag, stream) = self.blocks.swap_remove(self.context.rng.below(self.blocks.len()));
        self.context.step(format!("free {}", block.ptr));
        self.machine.check_pages(block.ptr, block.bytes_requested, tag, self.machine.stream(0, stream));
        self.allocator.free(block).unwrap();
    }

    /// Captures work on a block, whether or not it has memory.
    fn capture(&mut self) {
        if self.ranges.is_empty() {
            return;
        }
        let at = self.context.rng.below(self.ranges.len());
        let (block, stream) = (self.context.rng.u64_below(self.ranges[at].range.layout.blocks), self.stream(0));
        if self.ranges[at].graphs.len() >= 3 {
            self.ranges[at].graphs.remove(0);
        }
        self.context.step(format!("capture: writes block {block} of range {at}"));
        let mut graph = Graph::new(&self.allocator, &self.machine.device(0), GraphOptions::default()).unwrap();
        let (tag, machine, range) = (self.new_tag(), &self.machine, &self.ranges[at]);
        let captured = graph.capture(&stream, CaptureOptions::default(), |_| {
            let refused = self.allocator.elastic()?.commit(&range.range, stream.id(), 0..1);
            assert_eq!(refused, Err(Error::ElasticInCapture { stream: stream.id() }));
            range.pieces(block).for_each(|(ptr, bytes)| machine.write_pages(ptr, bytes, tag, &stream));
            Ok(())
        });
        captured.unwrap();
        self.context.counts.captures += 1;
        self.ranges[at].graphs.push(Captured { graph, block, tag });
    }

    /// Replays a graph whose block is committed.
    fn replay(&mut self) {
        let with_graphs: Vec<usize> = (0..self.ranges.len()).filter(|&at| !self.ranges[at].graphs.is_empty()).collect();
        if with_graphs.is_empty() {
            return;
        }
        let at = self.context.rng.pick(&with_graphs);
        let which = self.context.rng.below(self.ranges[at].graphs.len());
        let number = usize::try_from(self.ranges[at].graphs[which].block).expect("few blocks");
        if self.ranges[at].tags[number].is_none() {
            return;
        }
        let stream = self.use_range(at);
        let Captured { graph, block, tag } = &self.ranges[at].graphs[which];
        self.context.step(format!("replay: writes block {block} of range {at} on stream {stream}"));
        graph.replay(self.machine.stream(0, stream)).unwrap();
        self.context.counts.replays += 1;
        let (block, tag) = (*block, *tag);
        self.ranges[at].tags[number] = Some(tag);
        self.check_block(at, block);
    }

    /// What is said to be there can be had. Not what is above a limit that was lowered, if it may decay meanwhile.
    fn check_headroom(&mut self) {
        let reserved = self.paged.page_stats(device_id(0)).unwrap().reserved_bytes;
        if self.paged.settings().idle_decay_ms.is_some() && self.limit.is_some_and(|limit| reserved > limit) {
            return;
        }
        let (ranges, stream) = (self.allocator.elastic().unwrap(), self.machine.stream(0, 0).id());
        let slots = ranges.headroom(device_id(0)).unwrap() / (2 * MIB);
        self.context.step(format!("headroom: {slots} slots"));
        let layout = ElasticLayout { rows: 1, blocks: slots + 1, block_bytes: 2 * MIB };
        let all = ranges.reserve(device_id(0), stream, layout).unwrap();
        ranges.commit(&all, stream, 0..slots).unwrap();
        ranges.release(&all);
        self.context.made("headroom");
    }

    fn finish(mut self) {
        self.context.step("the end");
        while !self.ranges.is_empty() {
            let at = self.ranges.len() - 1;
            (0..self.ranges[at].range.layout.blocks).for_each(|block| self.check_block(at, block));
            self.release_at(at);
        }
        while !self.blocks.is_empty() {
            self.free();
        }
        let pools = self.allocator.pools().unwrap();
        self.pools.iter().for_each(|&pool| pools.release_pool(device_id(0), pool).unwrap());
        self.machine.synchronize();
        self.machine.check_contents();
        self.machine.check_hazards();
        self.allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        self.paged.check();
        let pages = self.paged.page_stats(device_id(0)).unwrap();
        assert_eq!((pages.active_bytes, pages.reserved_bytes), (0, 0), "{pages:?}");
        let Self { machine, paged, allocator, .. } = self;
        drop((paged, allocator));
        machine.close(true);
    }
}
