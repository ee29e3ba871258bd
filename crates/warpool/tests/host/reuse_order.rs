//! Who waits for whom: a block of pinned memory that streams used waits for exactly those, and for nothing else.
//!
//! Streams are stuck on purpose here. No assertion is about time: what a stuck stream has not let through is not done,
//! however long one waits.

use std::sync::Arc;

use warpool::driver::decorate::Counting;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, DevicePtr, HostPtr, Memory as _};
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings, Snapshot};
use warpool::{Instance, Stream, StreamLease};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Two devices, four streams on the second, and pinned memory that belongs to the first: so giving memory back waits
/// for none of them.
struct Lab {
    sim: Arc<SimDriver>,
    counting: Arc<Counting>,
    instance: Instance,
    host: HostAllocator,
    streams: Vec<Stream>,
    buffer: DevicePtr,
    _leases: Vec<StreamLease>,
}

impl Lab {
    fn new() -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).unwrap();
        let device = instance.device(1).unwrap();
        let mut leases: Vec<StreamLease> = (0..4).map(|_| device.lease_stream().unwrap()).collect();
        let streams = leases.iter().map(|lease| lease.stream().clone()).collect();
        // With a context of its own; else its memory would be pinned with the other device.
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

    /// The stream copies from the block, and the allocator is told. Streams have parts of the buffer of their own.
    fn used(&self, block: &HostBlock, stream: usize) {
        let to = self.buffer.offset(64 * stream as u64);
        self.sim.copy(to.into(), block.ptr().into(), 64, self.streams[stream].id()).unwrap();
        block.record_use(&self.streams[stream]).unwrap();
    }

    fn stick(&self, stream: usize) {
        self.sim.pause_stream(self.streams[stream].id()).unwrap();
    }

    fn unstick(&self, stream: usize) {
        self.sim.resume_stream(self.streams[stream].id()).unwrap();
        self.streams[stream].synchronize().unwrap();
    }

    /// All streams but the first are done, and the allocator looks twice: what was only dropped is marked at the first
    /// look.
    fn settle(&self) {
        for _ in 0..2 {
            for stream in &self.streams[1..] {
                stream.synchronize().unwrap();
            }
            self.host.process_pending().unwrap();
        }
        self.host.check();
    }

    /// Blocks that somebody has or that wait.
    fn active(&self) -> u64 {
        self.host.stats().active_requests.current
    }

    fn times_pinned(&self) -> u64 {
        self.counting.count(Call::HostAlloc).calls + self.counting.count(Call::HostRegister).calls
    }

    fn finish(self) {
        for stream in 0..self.streams.len() {
            self.unstick(stream);
        }
        self.host.process_pending().unwrap();
        assert_eq!(self.active(), 0);
        self.host.trim(0).unwrap();
        assert_eq!(self.sim.object_counts().pinned, 0);
        assert_eq!(self.sim.hazards(), []);
        self.host.close().unwrap();
    }
}

/// How a block goes back.
#[derive(Clone, Copy, Debug)]
enum Way {
    Free,
    Drop,
}

fn give_back(block: HostBlock, way: Way) {
    match way {
        Way::Free => block.free().unwrap(),
        Way::Drop => drop(block),
    }
}

fn overlaps(one: (HostPtr, u64), two: (HostPtr, u64)) -> bool {
    one.0.0 < two.0.0 + two.1 && two.0.0 < one.0.0 + one.1
}

#[test]
fn one_stuck_event_delays_exactly_the_blocks_that_recorded_it() {
    for way in [Way::Free, Way::Drop] {
        for stuck_at in 0..8_u64 {
            let lab = Lab::new();
            lab.stick(0);
            let blocks: Vec<HostBlock> = (0..8).map(|_| lab.block(MIB)).collect();
            let mut stuck = Vec::new();
            for (index, block) in (0..).zip(&blocks) {
                // One block is used by the stuck stream alone, one by that and another.
                match index {
                    _ if index == stuck_at => lab.used(block, 0),
                    _ if index == (stuck_at + 3) % 8 => {
                        lab.used(block, 2);
                        lab.used(block, 0);
                    }
                    _ => {
                        lab.used(block, 1 + index as usize % 3);
                        continue;
                    }
                }
                stuck.push((block.ptr(), block.bytes_usable()));
            }
            blocks.into_iter().for_each(|block| give_back(block, way));
            lab.settle();
            assert_eq!(lab.active(), 2, "{way:?}, stuck at {stuck_at}");
            // The six others come again without the driver, and none of them is one that is stuck.
            let times = lab.times_pinned();
            let again: Vec<HostBlock> = (0..6).map(|_| lab.block(MIB)).collect();
            assert_eq!(lab.times_pinned(), times, "{way:?}, stuck at {stuck_at}");
            for block in &again {
                let met = stuck.iter().find(|&&range| overlaps(range, (block.ptr(), block.bytes_usable())));
                assert_eq!(met, None, "{way:?}, stuck at {stuck_at}");
            }
            drop(again);
            lab.finish();
        }
    }
}

/// PyTorch's issue 71616: the oldest event was looked at first, and while it was ahead nothing behind it was freed.
#[test]
fn finished_blocks_are_free_although_the_oldest_is_not_finished_71616() {
    for way in [Way::Free, Way::Drop] {
        let lab = Lab::new();
        lab.stick(0);
        let oldest = lab.block(3 * MIB);
        lab.used(&oldest, 0);
        give_back(oldest, way);
        for round in 0..50 {
            for stream in 1..4 {
                let block = lab.block(MIB);
                lab.used(&block, stream);
                give_back(block, way);
            }
            lab.settle();
            assert_eq!(lab.active(), 1, "{way:?}, round {round}: only the oldest");
        }
        assert!(
            lab.sim.object_counts().bytes_pinned <= 40 * MIB,
            "it piles up: {}",
            lab.sim.object_counts().bytes_pinned
        );
        lab.finish();
    }
}

#[test]
fn blocks_of_one_stream_come_free_as_it_goes_on() {
    let lab = Lab::new();
    lab.stick(0);
    let blocks: Vec<HostBlock> = (0..6).map(|_| lab.block(100 * KIB)).collect();
    let id = lab.streams[0].id();
    let mut ends = Vec::new();
    for block in blocks {
        lab.used(&block, 0);
        block.free().unwrap();
        // Its mark is in the stream by now.
        ends.push(lab.sim.paused_work(id).unwrap());
    }
    lab.host.process_pending().unwrap();
    assert_eq!(lab.active(), 6);
    let mut through = 0;
    for (done, end) in (1..).zip(ends) {
        lab.sim.run_paused(id, end - through - 1).unwrap();
        lab.host.process_pending().unwrap();
        assert_eq!(lab.active(), 6 - (done - 1), "all but the mark of block {done} is through");
        lab.sim.run_paused(id, 1).unwrap();
        through = end;
        lab.host.process_pending().unwrap();
        assert_eq!(lab.active(), 6 - done, "the mark of block {done} is through");
    }
    lab.finish();
}

#[test]
fn requests_go_on_beside_a_stuck_stream_and_wait_for_nothing() {
    let lab = Lab::new();
    lab.stick(0);
    let stuck = lab.block(5 * MIB);
    lab.used(&stuck, 0);
    drop(stuck);
    lab.counting.reset();
    let held = lab.sim.paused_work(lab.streams[0].id()).unwrap();
    for round in 0..100_u64 {
        let block = lab.block(5 * MIB);
        lab.used(&block, 1 + round as usize % 3);
        give_back(block, if round % 2 == 0 { Way::Free } else { Way::Drop });
    }
    for call in [Call::StreamSynchronize, Call::EventSynchronize, Call::DeviceSynchronize, Call::HostFree] {
        assert_eq!(lab.counting.count(call).calls, 0, "{}", call.name());
    }
    assert!(lab.sim.paused_work(lab.streams[0].id()).unwrap() >= held, "somebody waited for the stuck stream");
    lab.finish();
}

#[test]
fn trim_leaves_what_a_stuck_stream_uses_and_takes_the_rest() {
    let lab = Lab::new();
    lab.stick(0);
    let blocks: Vec<HostBlock> = (0..4).map(|_| lab.block(64 * MIB)).collect();
    lab.used(&blocks[1], 0);
    let range = (blocks[1].ptr(), blocks[1].bytes_usable());
    drop(blocks);
    lab.host.trim(0).unwrap();
    let pinned = lab.sim.object_counts().bytes_pinned;
    assert!((64 * MIB..=80 * MIB).contains(&pinned), "{pinned} are pinned for one block of 64 MiB");
    assert_eq!(lab.active(), 1);
    assert_ne!(lab.sim.paused_work(lab.streams[0].id()).unwrap(), 0, "trim waited for the stuck stream");
    let mut snapshot = Snapshot::default();
    lab.host.add_to(&mut snapshot);
    let segments = snapshot.host_segments.unwrap();
    let has = |segment: &warpool::memory::SegmentInfo| {
        segment.address <= range.0.0 && range.0.0 + range.1 <= segment.address + segment.total_size
    };
    assert!(segments.iter().any(has), "the block's segment stays");
    lab.unstick(0);
    lab.host.trim(0).unwrap();
    assert_eq!(lab.sim.object_counts().pinned, 0);
    lab.finish();
}

/// A use may be recorded before its work is queued, and many times: what counts is what is in the stream when the block
/// goes back.
#[test]
fn work_that_is_queued_after_the_use_was_recorded_counts_too() {
    let lab = Lab::new();
    let block = lab.block(MIB);
    for _ in 0..3 {
        block.record_use(&lab.streams[0]).unwrap();
        assert!(lab.host.record_use_at(block.ptr(), &lab.streams[0]).unwrap());
    }
    lab.stick(0);
    let to = lab.buffer;
    lab.sim.copy(to.into(), block.ptr().into(), 64, lab.streams[0].id()).unwrap();
    let range = (block.ptr(), block.bytes_usable());
    block.free().unwrap();
    lab.settle();
    assert_eq!(lab.active(), 1);
    let other = lab.block(MIB);
    assert!(!overlaps(range, (other.ptr(), other.bytes_usable())));
    drop(other);
    lab.finish();
}
