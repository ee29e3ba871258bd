//! Short-lived streams: the owner of a stream may destroy it once all its memory is freed, and destroyed streams cost
//! nothing.

use std::sync::Arc;

use warpool::driver::decorate::Counting;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{
    Call, Copies as _, DeviceId, Devices as _, ForeignStream, Pattern, StreamId, StreamOptions, Streams as _,
};
use warpool::memory::raw::Request;
use warpool::memory::{Allocate as _, DeviceAllocator, PagedAllocator, Settings};
use warpool::{Device, Instance, Stream};
use warpool_testing::{Rng, scaled};

use crate::MIB;

const DEVICE: DeviceId = DeviceId(0);

/// A device whose calls are counted.
struct Counted {
    sim: Arc<SimDriver>,
    counting: Arc<Counting>,
    device: Device,
    paged: Arc<PagedAllocator>,
    allocator: Arc<dyn DeviceAllocator>,
}

impl Counted {
    fn new(capacity: u64) -> Self {
        Self::with(SimConfig::default().with_capacity(capacity))
    }

    fn with(config: SimConfig) -> Self {
        let sim = Arc::new(SimDriver::new(config));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).unwrap();
        let paged = Arc::new(PagedAllocator::new(&instance, Settings::default()).unwrap());
        Self { sim, counting, device: instance.device(0).unwrap(), allocator: paged.clone(), paged }
    }

    /// A foreign stream, and its id for its creator.
    fn foreign(&self) -> (Stream, StreamId) {
        let theirs = self.sim.create_foreign_stream(DEVICE, StreamOptions::default()).unwrap();
        let raw = self.sim.stream_handle(theirs).unwrap().raw;
        // SAFETY: a stream of the simulation, which is destroyed after all memory of it was freed.
        (Stream::external(&self.device, unsafe { ForeignStream::new(raw) }).unwrap(), theirs)
    }

    /// Allocates, writes a part, and frees by a call.
    fn use_memory(&self, stream: &Stream, bytes: u64) {
        let block = self.paged.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap();
        self.sim.fill(block.ptr, Pattern::U8(1), bytes.min(4096), stream.id()).unwrap();
        self.paged.free_raw(block.ptr).unwrap();
    }

    /// Driver calls of `act`.
    fn calls(&self, act: impl FnOnce()) -> u64 {
        self.counting.reset();
        act();
        self.counting.counts().iter().map(|count| count.calls).sum()
    }

    #[track_caller]
    fn expect_no_hazards(&self) {
        self.sim.device_synchronize(DEVICE).unwrap();
        let hazards = self.sim.hazards();
        assert!(hazards.is_empty(), "{} hazards; the first is: {}", hazards.len(), hazards[0]);
        self.paged.check();
    }
}

/// Whether the last block is freed by a call, which may call the driver, or dropped, which may not.
#[derive(Clone, Copy, Debug)]
enum Free {
    Call,
    Drop,
}

#[test]
fn a_destroyed_stream_is_never_named_again() {
    for free in [Free::Call, Free::Drop] {
        let gpu = Counted::new(4 << 30);
        let gone: Vec<_> = (0..50).map(|_| gpu.foreign()).collect();
        for (stream, _) in &gone {
            match free {
                Free::Call => gpu.use_memory(stream, 64 * MIB),
                Free::Drop => drop(gpu.allocator.allocate(64 * MIB, stream).unwrap()),
            }
        }
        gone.iter().for_each(|(_, theirs)| gpu.sim.stream_destroy(*theirs).unwrap());
        let streams = [gpu.device.pool_stream().unwrap(), gpu.device.pool_stream().unwrap()];
        for round in 0..200 {
            gpu.use_memory(&streams[round % 2], 64 * MIB);
        }
        println!("{free:?}");
        gpu.expect_no_hazards();
        assert_eq!(gpu.paged.page_stats(DEVICE).unwrap().reserved_bytes, 64 * MIB, "pages of gone streams are used");
        gpu.paged.trim_to(DEVICE, 0).unwrap();
        gpu.expect_no_hazards();
        assert_eq!(gpu.paged.page_stats(DEVICE).unwrap().reserved_bytes, 0);
    }
}

#[test]
fn work_of_a_destroyed_stream_is_waited_for() {
    let gpu = Counted::new(4 << 30);
    let (stream, theirs) = gpu.foreign();
    let other = gpu.device.pool_stream().unwrap();
    gpu.sim.pause_stream(stream.id()).unwrap();
    gpu.use_memory(&stream, 64 * MIB);
    gpu.use_memory(&other, 64 * MIB);
    assert!(!gpu.sim.stream_query(other.id()).unwrap(), "it waits for the paused stream");
    gpu.sim.resume_stream(stream.id()).unwrap();
    gpu.sim.stream_destroy(theirs).unwrap();
    gpu.use_memory(&other, 128 * MIB);
    gpu.expect_no_hazards();
}

#[test]
fn addresses_of_streams_that_have_gone_are_used_again() {
    let gpu = Counted::with(SimConfig::default().with_capacity(16 << 30).without_suballocation_tracking());
    for _ in 0..scaled(20_000) {
        let (stream, theirs) = gpu.foreign();
        gpu.use_memory(&stream, 1000);
        gpu.use_memory(&stream, 3 * MIB);
        gpu.sim.stream_destroy(theirs).unwrap();
    }
    gpu.expect_no_hazards();
    let reserved = gpu.paged.page_stats(DEVICE).unwrap().reserved_bytes;
    assert!(reserved <= 128 * MIB, "{} MiB reserved", reserved / MIB);
}

#[test]
fn thousands_of_streams_have_memory_at_once() {
    let gpu = Counted::with(SimConfig::default().with_capacity(16 << 30).without_suballocation_tracking());
    let streams: Vec<_> = (0..4_000).map(|_| gpu.foreign()).collect();
    let request = |(stream, _): &(Stream, StreamId)| Request::new(DEVICE, stream.id(), 1000);
    let blocks: Vec<_> = streams.iter().map(|stream| gpu.paged.allocate_raw(request(stream)).unwrap()).collect();
    blocks.iter().for_each(|block| gpu.paged.free_raw(block.ptr).unwrap());
    streams.iter().for_each(|(_, theirs)| gpu.sim.stream_destroy(*theirs).unwrap());
    let stream = gpu.device.pool_stream().unwrap();
    gpu.use_memory(&stream, 12 << 30);
    gpu.expect_no_hazards();
}

/// The driver calls of an allocation that takes pages of another stream, with `count` further streams.
fn calls_beside(count: usize, set_up: fn(&Counted, usize)) -> u64 {
    let gpu = Counted::with(SimConfig::default().with_capacity(64 << 30).without_suballocation_tracking());
    set_up(&gpu, count);
    let streams = [gpu.device.pool_stream().unwrap(), gpu.device.pool_stream().unwrap()];
    let mut round = (0..).map(|round| gpu.use_memory(&streams[round % 2], 64 * MIB));
    // The first allocations take pages of destroyed streams, and retire their heaps.
    (0..200).for_each(|_| round.next().unwrap());
    let calls = gpu.calls(|| (0..100).for_each(|_| round.next().unwrap())) / 100;
    gpu.sim.device_synchronize(DEVICE).unwrap();
    calls
}

fn gone(gpu: &Counted, count: usize) {
    let streams: Vec<_> = (0..count).map(|_| gpu.foreign()).collect();
    streams.iter().for_each(|(stream, _)| gpu.use_memory(stream, 4 * MIB));
    streams.iter().for_each(|(_, theirs)| gpu.sim.stream_destroy(*theirs).unwrap());
}

fn idle_with_memory(gpu: &Counted, count: usize) {
    for _ in 0..count {
        let (stream, _) = gpu.foreign();
        gpu.paged.allocate_raw(Request::new(DEVICE, stream.id(), 1000)).unwrap();
    }
}

#[test]
fn streams_that_have_gone_or_do_nothing_cost_no_driver_calls() {
    for (name, set_up) in [("gone", gone as fn(&Counted, usize)), ("idle", idle_with_memory)] {
        let [none, many] = [0, 1000].map(|count| calls_beside(count, set_up));
        println!("{name}: {none} calls an allocation beside none, {many} beside 1,000");
        assert!(many <= none + 1, "{name}: {none} calls beside none, {many} beside 1,000");
    }
}

/// The driver calls of an allocation if `count` streams take pages from each other.
fn calls_in_turns(count: usize) -> u64 {
    let gpu = Counted::with(SimConfig::default().with_capacity(64 << 30).without_suballocation_tracking());
    let streams: Vec<_> = (0..count).map(|_| gpu.foreign().0).collect();
    streams.iter().for_each(|stream| gpu.use_memory(stream, 64 * MIB));
    gpu.calls(|| streams.iter().for_each(|stream| gpu.use_memory(stream, 64 * MIB))) / count as u64
}

#[test]
fn what_streams_cost_that_take_pages_from_each_other_is_bounded() {
    let calls = [2, 10, 100, 1000].map(calls_in_turns);
    println!("2, 10, 100, 1,000 streams: {calls:?} calls an allocation");
    assert!(calls.iter().all(|&calls| calls <= 150), "{calls:?}");
}

/// The average cost of a short-lived stream.
#[derive(Debug, Default)]
struct Life {
    mappings: f64,
    waits_for_events: f64,
    calls: f64,
    /// The fraction of streams that wait for another one.
    waiting: f64,
}

/// A training whose batch size changes in every step, together with a library that creates four streams in every step,
/// uses memory on each and destroys them.
fn short_lived_streams() -> Life {
    const STREAMS: u64 = 4;
    const STEPS: std::ops::Range<u64> = 60..120;
    let gpu = Counted::with(SimConfig::default().with_capacity(16 << 30).without_suballocation_tracking());
    let (main, mut rng) = (gpu.device.pool_stream().unwrap(), Rng::new(11));
    let allocate = |stream: &Stream, bytes| gpu.paged.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap();
    let _weights = allocate(&main, 2 << 30);
    let mut life = Life::default();
    for step in 0..STEPS.end {
        for _ in 0..STREAMS {
            let (stream, theirs) = gpu.foreign();
            let bytes = (1 + rng.u64_below(23)) * MIB;
            let before = gpu.paged.page_stats(DEVICE).unwrap().totals.mapped;
            let calls = gpu.calls(|| {
                let blocks = [bytes, bytes, bytes, 512].map(|bytes| allocate(&stream, bytes));
                gpu.sim.fill(blocks[0].ptr, Pattern::U8(1), bytes, stream.id()).unwrap();
                gpu.sim.stream_synchronize(stream.id()).unwrap();
                blocks.iter().for_each(|block| gpu.paged.free_raw(block.ptr).unwrap());
            });
            gpu.sim.stream_destroy(theirs).unwrap();
            if STEPS.contains(&step) {
                let share = 1.0 / ((STEPS.end - STEPS.start) * STREAMS) as f64;
                let waits = gpu.counting.count(Call::StreamWaitEvent).calls;
                let mapped = gpu.paged.page_stats(DEVICE).unwrap().totals.mapped - before;
                life.mappings += mapped as f64 * share;
                life.waits_for_events += waits as f64 * share;
                life.calls += calls as f64 * share;
                life.waiting += f64::from(u8::from(waits > 0)) * share;
            }
        }
        let length = 64 + rng.u64_below(448);
        let activations: Vec<_> = (0..64).map(|layer| allocate(&main, (1 + layer % 4) * length * (64 << 10))).collect();
        gpu.sim.fill(activations[0].ptr, Pattern::U8(1), 4096, main.id()).unwrap();
        activations.iter().rev().for_each(|block| gpu.paged.free_raw(block.ptr).unwrap());
    }
    gpu.expect_no_hazards();
    life
}

/// Earlier, every stream waited for the training's work, 8 times on average, and so did a host that waited for the
/// stream.
#[test]
fn a_new_stream_gets_memory_of_one_that_has_gone_and_waits_for_nobody() {
    let life = short_lived_streams();
    println!("{life:.2?}");
    assert!(life.waiting < 0.6 && life.mappings < 0.5 && life.calls < 15.0, "{life:.2?}");
}

/// Memory that another stream uses without a recorded use is not given to a new stream before that work is done.
#[test]
fn an_adopted_heap_is_not_in_use_by_bystanders() {
    let gpu = Counted::new(4 << 30);
    let bystander = gpu.device.pool_stream().unwrap();
    let busy = gpu.paged.allocate_raw(Request::new(DEVICE, bystander.id(), MIB)).unwrap();
    let life = |fills: Option<&Stream>| {
        let (stream, theirs) = gpu.foreign();
        let block = gpu.paged.allocate_raw(Request::new(DEVICE, stream.id(), 8 * MIB)).unwrap();
        gpu.sim.fill(block.ptr, Pattern::U8(1), 4096, stream.id()).unwrap();
        if let Some(other) = fills {
            gpu.sim.stream_synchronize(stream.id()).unwrap();
            gpu.sim.fill(block.ptr, Pattern::U8(2), 4096, other.id()).unwrap();
        }
        gpu.paged.free_raw(block.ptr).unwrap();
        gpu.sim.stream_destroy(theirs).unwrap();
        block.ptr
    };
    // Paused, so that its work is pending during the life of all later streams.
    gpu.sim.pause_stream(bystander.id()).unwrap();
    let used = life(Some(&bystander));
    for _ in 0..20 {
        assert_ne!(life(None), used, "it would be written in the middle of the bystander's work");
    }
    gpu.sim.resume_stream(bystander.id()).unwrap();
    gpu.paged.free_raw(busy.ptr).unwrap();
    for _ in 0..20 {
        life(None);
    }
    gpu.expect_no_hazards();
}

/// Long-lived streams that repeatedly free all their memory keep their heaps when a new stream appears.
#[test]
fn streams_that_live_on_do_not_take_heaps_from_each_other() {
    let gpu = Counted::new(4 << 30);
    let streams: Vec<_> = (0..8).map(|_| gpu.foreign().0).collect();
    let round = || streams.iter().for_each(|stream| gpu.use_memory(stream, MIB));
    (0..3).for_each(|_| round());
    gpu.use_memory(&gpu.foreign().0, MIB);
    round();
    gpu.counting.reset();
    (0..10).for_each(|_| round());
    assert_eq!(gpu.counting.count(Call::StreamHandle).calls, 0, "each has its heap");
    gpu.expect_no_hazards();
}

/// A destructor makes no driver call.
#[test]
fn addresses_of_a_dropped_allocator_are_freed_by_a_later_call() {
    let gpu = Counted::new(4 << 30);
    let stream = gpu.device.pool_stream().unwrap();
    let next = || PagedAllocator::new(gpu.device.instance(), Settings::default()).unwrap();
    let mut paged = next();
    for round in 0..5 {
        let block = paged.allocate_raw(Request::new(DEVICE, stream.id(), MIB)).unwrap();
        paged.free_raw(block.ptr).unwrap();
        paged.trim_to(DEVICE, 0).unwrap();
        assert_eq!(gpu.sim.object_counts().reservations, 1, "round {round}");
        assert_eq!(gpu.calls(|| drop(std::mem::replace(&mut paged, next()))), 0, "round {round}");
    }
    let Counted { sim, counting, device, paged: other, allocator } = gpu;
    drop((paged, other, allocator, counting, stream));
    let instance = device.instance().clone();
    drop(device);
    instance.close().unwrap();
    assert_eq!(sim.object_counts().reservations, 0);
}
