//! A freed block waits for exactly the streams that used it.
//!
//! Streams are paused here, so no assertion depends on time: the work of a paused stream never completes by itself.

use std::sync::Arc;

use warpool::driver::decorate::Counting;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, DevicePtr, HostPtr, Memory as _};
use warpool::memory::report::Snapshot;
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool::{Instance, Stream, StreamLease};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Two devices, four streams on the second, and pinned memory of the first, so that unpinning waits for none of the
/// streams.
struct TestContext {
    sim: Arc<SimDriver>,
    counting: Arc<Counting>,
    instance: Instance,
    host: HostAllocator,
    streams: Vec<Stream>,
    buffer: DevicePtr,
    _leases: Vec<StreamLease>,
}

impl TestContext {
    fn new() -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).unwrap();
        let device = instance.device(1).unwrap();
        let mut leases: Vec<StreamLease> = (0..4).map(|_| device.lease_stream().unwrap()).collect();
        let streams = leases.iter().map(|lease| lease.stream().clone()).collect();
        // Creates a context on the first device; otherwise the second one would pin.
        leases.push(instance.device(0).unwrap().lease_stream().unwrap());
        let buffer = sim.mem_alloc(device.id(), MIB).unwrap();
        let host = HostAllocator::new(&instance, PinnedSettings::default());
        Self { sim, counting, instance, host, streams, buffer, _leases: leases }
    }

    fn block(&self, bytes: u64) -> HostBlock {
        let block = self.host.allocate_for(bytes, &self.instance.device(0).unwrap()).unwrap();
        block.write(0, &[7; 64]).unwrap();
        block
    }

    /// The stream copies from the block, and the use is recorded. Each stream has its own part of the buffer.
    fn use_on(&self, block: &HostBlock, stream: usize) {
        let to = self.buffer.offset(64 * stream as u64);
        self.sim.copy(to.into(), block.ptr().into(), 64, self.streams[stream].id()).unwrap();
        block.record_use(&self.streams[stream]).unwrap();
    }

    fn pause(&self, stream: usize) {
        self.sim.pause_stream(self.streams[stream].id()).unwrap();
    }

    fn resume(&self, stream: usize) {
        self.sim.resume_stream(self.streams[stream].id()).unwrap();
        self.streams[stream].synchronize().unwrap();
    }

    /// Synchronizes all streams but the first. Pending frees are processed twice: the first time records the fences of
    /// dropped blocks.
    fn sync_others(&self) {
        for _ in 0..2 {
            for stream in &self.streams[1..] {
                stream.synchronize().unwrap();
            }
            self.host.process_pending().unwrap();
        }
        self.host.check();
    }

    /// The number of blocks that are allocated or pending free.
    fn active(&self) -> u64 {
        self.host.stats().active_requests.current
    }

    fn times_pinned(&self) -> u64 {
        self.counting.count(Call::HostAlloc).calls + self.counting.count(Call::HostRegister).calls
    }

    fn finish(self) {
        for stream in 0..self.streams.len() {
            self.resume(stream);
        }
        self.host.process_pending().unwrap();
        assert_eq!(self.active(), 0);
        self.host.trim(0).unwrap();
        assert_eq!(self.sim.object_counts().pinned, 0);
        assert_eq!(self.sim.hazards(), []);
        self.host.close().unwrap();
    }
}

/// How a block is freed.
#[derive(Clone, Copy, Debug)]
enum FreeBy {
    Call,
    Drop,
}

fn free(block: HostBlock, by: FreeBy) {
    match by {
        FreeBy::Call => block.free().unwrap(),
        FreeBy::Drop => drop(block),
    }
}

fn overlaps(one: (HostPtr, u64), two: (HostPtr, u64)) -> bool {
    one.0.0 < two.0.0 + two.1 && two.0.0 < one.0.0 + one.1
}

#[test]
fn a_paused_stream_delays_only_the_blocks_that_it_used() {
    for by in [FreeBy::Call, FreeBy::Drop] {
        for paused_at in 0..8_u64 {
            let context = TestContext::new();
            context.pause(0);
            let blocks: Vec<HostBlock> = (0..8).map(|_| context.block(MIB)).collect();
            let mut delayed = Vec::new();
            for (index, block) in (0..).zip(&blocks) {
                // One block is used by the paused stream alone, one by that and another.
                match index {
                    _ if index == paused_at => context.use_on(block, 0),
                    _ if index == (paused_at + 3) % 8 => {
                        context.use_on(block, 2);
                        context.use_on(block, 0);
                    }
                    _ => {
                        context.use_on(block, 1 + index as usize % 3);
                        continue;
                    }
                }
                delayed.push((block.ptr(), block.bytes_usable()));
            }
            blocks.into_iter().for_each(|block| free(block, by));
            context.sync_others();
            assert_eq!(context.active(), 2, "{by:?}, paused at {paused_at}");
            // The six others are reused without pinning, and none overlaps a delayed one.
            let times = context.times_pinned();
            let again: Vec<HostBlock> = (0..6).map(|_| context.block(MIB)).collect();
            assert_eq!(context.times_pinned(), times, "{by:?}, paused at {paused_at}");
            for block in &again {
                let met = delayed.iter().find(|&&range| overlaps(range, (block.ptr(), block.bytes_usable())));
                assert_eq!(met, None, "{by:?}, paused at {paused_at}");
            }
            drop(again);
            context.finish();
        }
    }
}

/// PyTorch's issue 71616: while the oldest event had not passed, no later block was freed.
#[test]
fn passed_blocks_are_free_while_the_oldest_is_pending_71616() {
    for by in [FreeBy::Call, FreeBy::Drop] {
        let context = TestContext::new();
        context.pause(0);
        let oldest = context.block(3 * MIB);
        context.use_on(&oldest, 0);
        free(oldest, by);
        for round in 0..50 {
            for stream in 1..4 {
                let block = context.block(MIB);
                context.use_on(&block, stream);
                free(block, by);
            }
            context.sync_others();
            assert_eq!(context.active(), 1, "{by:?}, round {round}: only the oldest");
        }
        assert!(
            context.sim.object_counts().bytes_pinned <= 40 * MIB,
            "blocks pile up: {}",
            context.sim.object_counts().bytes_pinned
        );
        context.finish();
    }
}

#[test]
fn blocks_of_one_stream_are_reclaimed_one_by_one() {
    let context = TestContext::new();
    context.pause(0);
    let blocks: Vec<HostBlock> = (0..6).map(|_| context.block(100 * KIB)).collect();
    let id = context.streams[0].id();
    let mut ends = Vec::new();
    for block in blocks {
        context.use_on(&block, 0);
        block.free().unwrap();
        // The fence is in the stream by now.
        ends.push(context.sim.paused_work(id).unwrap());
    }
    context.host.process_pending().unwrap();
    assert_eq!(context.active(), 6);
    let mut completed = 0;
    for (done, end) in (1..).zip(ends) {
        context.sim.run_paused(id, end - completed - 1).unwrap();
        context.host.process_pending().unwrap();
        assert_eq!(context.active(), 6 - (done - 1), "all but the fence of block {done} has passed");
        context.sim.run_paused(id, 1).unwrap();
        completed = end;
        context.host.process_pending().unwrap();
        assert_eq!(context.active(), 6 - done, "the fence of block {done} has passed");
    }
    context.finish();
}

#[test]
fn requests_never_wait_for_a_paused_stream() {
    let context = TestContext::new();
    context.pause(0);
    let delayed = context.block(5 * MIB);
    context.use_on(&delayed, 0);
    drop(delayed);
    context.counting.reset();
    let queued = context.sim.paused_work(context.streams[0].id()).unwrap();
    for round in 0..100_u64 {
        let block = context.block(5 * MIB);
        context.use_on(&block, 1 + round as usize % 3);
        free(block, if round % 2 == 0 { FreeBy::Call } else { FreeBy::Drop });
    }
    for call in [Call::StreamSynchronize, Call::EventSynchronize, Call::DeviceSynchronize, Call::HostFree] {
        assert_eq!(context.counting.count(call).calls, 0, "{}", call.name());
    }
    assert!(context.sim.paused_work(context.streams[0].id()).unwrap() >= queued, "a call waited for the paused stream");
    context.finish();
}

#[test]
fn trim_leaves_only_the_blocks_of_a_paused_stream() {
    let context = TestContext::new();
    context.pause(0);
    let blocks: Vec<HostBlock> = (0..4).map(|_| context.block(64 * MIB)).collect();
    context.use_on(&blocks[1], 0);
    let range = (blocks[1].ptr(), blocks[1].bytes_usable());
    drop(blocks);
    context.host.trim(0).unwrap();
    let pinned = context.sim.object_counts().bytes_pinned;
    assert!((64 * MIB..=80 * MIB).contains(&pinned), "{pinned} are pinned for one block of 64 MiB");
    assert_eq!(context.active(), 1);
    assert_ne!(context.sim.paused_work(context.streams[0].id()).unwrap(), 0, "trim waited for the paused stream");
    let mut snapshot = Snapshot::default();
    context.host.add_to(&mut snapshot);
    let segments = snapshot.host_segments.unwrap();
    let has = |segment: &warpool::memory::report::SegmentInfo| {
        segment.address <= range.0.0 && range.0.0 + range.1 <= segment.address + segment.total_size
    };
    assert!(segments.iter().any(has), "the block's segment stays pinned");
    context.resume(0);
    context.host.trim(0).unwrap();
    assert_eq!(context.sim.object_counts().pinned, 0);
    context.finish();
}

/// A use may be recorded before its work is enqueued, and repeatedly: the block waits for the work that is in the
/// stream when it is freed.
#[test]
fn work_queued_after_the_use_was_recorded_delays_the_block() {
    let context = TestContext::new();
    let block = context.block(MIB);
    for _ in 0..3 {
        block.record_use(&context.streams[0]).unwrap();
        assert!(context.host.record_use_at(block.ptr(), &context.streams[0]).unwrap());
    }
    context.pause(0);
    let to = context.buffer;
    context.sim.copy(to.into(), block.ptr().into(), 64, context.streams[0].id()).unwrap();
    let range = (block.ptr(), block.bytes_usable());
    block.free().unwrap();
    context.sync_others();
    assert_eq!(context.active(), 1);
    let other = context.block(MIB);
    assert!(!overlaps(range, (other.ptr(), other.bytes_usable())));
    drop(other);
    context.finish();
}
