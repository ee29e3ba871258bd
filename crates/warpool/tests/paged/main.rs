//! The paged allocator on the simulated GPU: pages are mapped where they are needed, and memory keeps its contents.
//! Random programs over it, with faults, captures, pools and threads, are in `warpool soak`; what holds for every
//! allocator is in `uncached/allocators.rs`.

#[path = "../common/sizes.rs"]
mod sizes;

mod checkpoint;
mod elastic;
mod history;
mod out_of_memory;
mod placement;
mod statistics;
mod streams;
mod upstream;

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Copies as _, DeviceId, Driver, Pattern};
use warpool::memory::pools::{Checkpoints as _, PoolOptions};
use warpool::memory::report::SnapshotOptions;
use warpool::memory::settings::Backend;
use warpool::memory::{Allocate as _, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, PagedAllocator, Settings};
use warpool::{Device, Error, Instance, Stream};

const MIB: u64 = 1 << 20;
const DEVICE: DeviceId = DeviceId(0);

struct Machine {
    sim: Arc<SimDriver>,
    paged: Arc<PagedAllocator>,
    allocator: Arc<dyn DeviceAllocator>,
    device: Device,
}

/// Its pages have 2 MiB, unless a test changes that.
impl Machine {
    fn new() -> Self {
        Self::with_capacity(4 << 30)
    }

    fn with_capacity(bytes: u64) -> Self {
        Self::with_config(SimConfig::default().with_capacity(bytes))
    }

    /// With a driver that tracks allocations and frees, or one that does not.
    fn tracking(tracks_suballocations: bool) -> Self {
        let config = SimConfig::default().with_capacity(4 << 30);
        Self::with_config(if tracks_suballocations { config } else { config.without_suballocation_tracking() })
    }

    fn with_config(config: SimConfig) -> Self {
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(Arc::clone(&sim) as Arc<dyn Driver>).unwrap();
        let device = instance.device(0).unwrap();
        let paged = Arc::new(PagedAllocator::new(&instance, Settings::default()).unwrap());
        paged.set_page_sizes(u64::MAX, u64::MAX);
        Self { sim, allocator: paged.clone(), paged, device }
    }

    fn stream(&self) -> Stream {
        self.device.pool_stream().unwrap()
    }

    fn block(&self, bytes: u64, stream: &Stream) -> DeviceBlock {
        self.try_block(bytes, stream).unwrap()
    }

    fn try_block(&self, bytes: u64, stream: &Stream) -> warpool::Result<DeviceBlock> {
        self.allocator.allocate(bytes, stream)
    }

    fn sim_driver(&self) -> &dyn Driver {
        &*self.sim
    }

    fn reserved(&self) -> u64 {
        self.paged.check();
        self.paged.page_stats(DeviceId(0)).unwrap().reserved_bytes
    }

    fn fill(&self, block: &DeviceBlock, value: u8, stream: &Stream) {
        self.sim.fill(block.ptr(), Pattern::U8(value), block.bytes_usable(), stream.id()).unwrap();
    }

    fn expect(&self, block: &DeviceBlock, value: u8, stream: &Stream) {
        let mut bytes = vec![0; usize::try_from(block.bytes_usable()).unwrap()];
        stream.synchronize().unwrap();
        self.sim.download(DeviceId(0), block.ptr(), &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == value), "contents of the block at {}", block.ptr());
    }

    fn expect_no_hazard(&self) {
        assert_eq!(self.sim.hazards().len(), 0, "{:?}", self.sim.hazards());
    }
}

#[test]
fn free_pages_are_taken_before_memory_grows() {
    let machine = Machine::new();
    let stream = machine.stream();
    let [first, second, third] = [1, 2, 3].map(|_| machine.block(10 * MIB, &stream));
    machine.fill(&second, 7, &stream);
    assert_eq!(machine.reserved(), 30 * MIB);
    drop((first, third));
    let large = machine.block(20 * MIB, &stream);
    assert_eq!(machine.reserved(), 30 * MIB, "the pages of both free blocks are behind the new one");
    machine.fill(&large, 8, &stream);
    machine.expect(&second, 7, &stream);
    machine.expect(&large, 8, &stream);
    let stats = machine.paged.page_stats(DeviceId(0)).unwrap();
    assert_eq!((stats.totals.taken, stats.totals.created), (5, 15));
    assert_eq!(stats.bytes_mapped_twice, 10 * MIB, "where they were before they are still mapped");
    machine.expect_no_hazard();
}

/// The window that needs the fewest driver calls would need a new page. Another one begins in a page that a
/// neighbouring block uses too, and needs no new page.
#[test]
fn memory_does_not_grow_where_another_place_has_enough_pages() {
    let machine = Machine::new();
    let stream = machine.stream();
    let first = machine.block(5 * MIB, &stream);
    let second = machine.block(5 * MIB, &stream);
    let third = machine.block(5 * MIB, &stream);
    let place = second.ptr();
    assert_eq!(place.0, first.ptr().0 + 5 * MIB, "they share a page");
    drop(second);
    // It gets the two pages that only the second block used, so the second block's window needs new pages.
    let fourth = machine.block(7 * MIB, &stream);
    let last = machine.block(4 * MIB, &stream);
    let blocks = [&first, &third, &fourth];
    blocks.iter().zip(1..).for_each(|(block, value)| machine.fill(block, value, &stream));
    drop(last);
    stream.synchronize().unwrap();
    let reserved = machine.reserved();
    assert_eq!(reserved, 22 * MIB);
    // One page is missing in the window of the last block.
    let fifth = machine.block(5 * MIB, &stream);
    assert_eq!((fifth.ptr(), machine.reserved()), (place, reserved));
    machine.fill(&fifth, 4, &stream);
    let blocks = [&first, &third, &fourth, &fifth];
    blocks.iter().zip(1..).for_each(|(block, value)| machine.expect(block, value, &stream));
    machine.expect_no_hazard();
}

#[test]
fn pages_that_are_taken_back_need_no_driver_call() {
    let machine = Machine::new();
    let stream = machine.stream();
    let kept = machine.block(10 * MIB, &stream);
    let first = machine.block(10 * MIB, &stream);
    let between = machine.block(2 * MIB, &stream);
    let round = |first: DeviceBlock| {
        drop(first);
        drop(machine.block(14 * MIB, &stream));
        machine.block(10 * MIB, &stream)
    };
    let mut first = round(first);
    let mut mapped = Vec::new();
    for _ in 0..6 {
        first = round(first);
        mapped.push(machine.paged.page_stats(DeviceId(0)).unwrap().totals.mapped);
    }
    assert_eq!(mapped[2], mapped[5], "a program that repeats itself maps nothing any more: {mapped:?}");
    drop((kept, first, between));
    machine.expect_no_hazard();
}

#[test]
fn another_stream_takes_pages_behind_the_work_of_their_last_user() {
    let machine = Machine::new();
    let (one, other) = (machine.stream(), machine.stream());
    let first = machine.block(64 * MIB, &one);
    machine.fill(&first, 1, &one);
    drop(first);
    let second = machine.block(64 * MIB, &other);
    machine.fill(&second, 2, &other);
    assert_eq!(machine.reserved(), 64 * MIB);
    machine.expect(&second, 2, &other);
    machine.expect_no_hazard();
}

#[test]
fn pages_of_a_pool_in_use_stay() {
    let machine = Machine::new();
    let stream = machine.stream();
    let pool = MemPool::new(&machine.allocator, &machine.device, PoolOptions::default()).unwrap();
    {
        let _scope = pool.enter().unwrap();
        drop(machine.block(32 * MIB, &stream));
    }
    let outside = machine.block(32 * MIB, &stream);
    assert_eq!(machine.reserved(), 64 * MIB, "a graph may use the pool's addresses");
    pool.close().unwrap();
    let more = machine.block(32 * MIB, &stream);
    assert_eq!(machine.reserved(), 64 * MIB, "once it is released its pages serve others");
    drop((outside, more));
}

/// Like a graph, a checkpoint contains the addresses of blocks that are freed later.
#[test]
fn pages_of_a_pool_with_checkpoints_stay_for_its_own_requests_too() {
    let machine = Machine::new();
    let stream = machine.stream();
    let pool = MemPool::new(&machine.allocator, &machine.device, PoolOptions::default()).unwrap();
    let _scope = pool.enter().unwrap();
    let [first, second, third] = [1, 2, 3].map(|_| machine.block(10 * MIB, &stream));
    let checkpoint = machine.paged.checkpoint(DEVICE, pool.id()).unwrap();
    drop((first, third));
    let large = machine.block(20 * MIB, &stream);
    assert_eq!(machine.paged.restore(&checkpoint).unwrap().allocated.len(), 3);
    let stats = machine.paged.page_stats(DEVICE).unwrap();
    assert_eq!((stats.totals.taken, stats.bytes_mapped_twice), (0, 0));
    // These blocks are stale since the restore.
    drop((second, large));
    machine.paged.check();
}

#[test]
fn trim_returns_what_is_free_down_to_a_target() {
    let machine = Machine::new();
    let stream = machine.stream();
    let kept = machine.block(10 * MIB, &stream);
    drop(machine.block(100 * MIB, &stream));
    assert_eq!(machine.reserved(), 110 * MIB);
    machine.paged.trim_to(DeviceId(0), 200 * MIB).unwrap();
    assert_eq!(machine.reserved(), 110 * MIB);
    assert_eq!(machine.allocator.trim(DeviceId(0), MemPoolId::DEFAULT).unwrap(), 100 * MIB);
    assert_eq!(machine.reserved(), 10 * MIB);
    drop(kept);
    machine.allocator.trim(DeviceId(0), MemPoolId::DEFAULT).unwrap();
    assert_eq!((machine.reserved(), machine.sim.object_counts().physical), (0, 0));
}

#[test]
fn trim_to_a_target_gives_back_no_more_than_needed() {
    for target in [110, 109, 100, 61, 60, 12, 11, 10, 5] {
        let machine = Machine::new();
        let streams = [machine.stream(), machine.stream()];
        let kept = machine.block(10 * MIB, &streams[0]);
        let freed = [(20, 0), (30, 1), (50, 0)].map(|(mib, on): (u64, usize)| machine.block(mib * MIB, &streams[on]));
        drop(freed);
        assert_eq!(machine.reserved(), 110 * MIB);
        let trimmed = machine.paged.trim_to(DEVICE, target * MIB).unwrap();
        let expected = (target / 2 * 2).max(10) * MIB;
        assert_eq!((machine.reserved(), trimmed), (expected, 110 * MIB - expected), "down to {target} MiB");
        machine.fill(&kept, 1, &streams[0]);
        machine.expect(&kept, 1, &streams[0]);
        machine.expect_no_hazard();
    }
}

#[test]
fn a_snapshot_names_the_allocator() {
    let machine = Machine::new();
    let of = |settings: &str| {
        let given = Settings::parse(settings).unwrap();
        let paged = PagedAllocator::new(machine.paged.instance(), given).unwrap();
        let recorded = paged.snapshot(SnapshotOptions::default()).unwrap().settings;
        (recorded.conf.clone().unwrap(), Settings::from_recorded(&recorded).unwrap().backend)
    };
    assert_eq!(of(""), ("backend:paged".to_owned(), Backend::Paged));
    assert_eq!(of("memory_cap_mb:64, backend:paged"), ("memory_cap_mb:64, backend:paged".to_owned(), Backend::Paged));
    assert_eq!(of("memory_cap_mb:100"), ("backend:paged,memory_cap_mb:100".to_owned(), Backend::Paged));
}

#[test]
fn a_request_that_cannot_fit_is_out_of_memory_at_once() {
    let machine = Machine::with_capacity(2048 * MIB);
    let stream = machine.stream();
    let half = machine.block(1000 * MIB, &stream);
    for bytes in [1100 * MIB, 1 << 50] {
        let refused = machine.allocator.allocate(bytes, &stream).unwrap_err();
        assert!(matches!(refused, Error::OutOfMemory(_)), "{refused}");
    }
    drop(half);
    drop(machine.block(1100 * MIB, &stream));
}

#[test]
fn peaks_are_exact_over_several_streams_of_one_thread() {
    let machine = Machine::new();
    let streams = [machine.stream(), machine.stream()];
    let first = machine.block(10 * MIB, &streams[0]);
    let second = machine.block(20 * MIB, &streams[1]);
    drop(first);
    let third = machine.block(5 * MIB, &streams[0]);
    let bytes = machine.allocator.stats(DeviceId(0)).unwrap().allocated_bytes.all;
    assert_eq!((bytes.current, bytes.peak, bytes.allocated, bytes.freed), (25 * MIB, 30 * MIB, 35 * MIB, 10 * MIB));
    drop((second, third));
}

/// Two streams alternately need most of the device: once the pages are mapped for both, they move between the streams
/// without being mapped again.
#[test]
fn pages_that_change_hands_between_streams_stay_mapped_for_both() {
    let machine = Machine::with_capacity(2 << 30);
    let streams = [machine.stream(), machine.stream()];
    let mapped = || machine.paged.page_stats(DEVICE).unwrap().totals.mapped;
    let mut after_first = 0;
    for round in 0..20 {
        for stream in &streams {
            let block = machine.block(1 << 30, stream);
            machine.fill(&block, 1, stream);
            drop(block);
        }
        if round == 0 {
            after_first = mapped();
        }
    }
    assert_eq!(mapped(), after_first);
    assert_eq!(machine.reserved(), 1 << 30);
}
