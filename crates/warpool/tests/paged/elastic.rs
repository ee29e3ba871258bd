//! Elastic memory: blocks at fixed addresses get and lose pages of the device's stock. Random programs with faults are
//! the campaign `elastic` of `warpool soak`.

use std::sync::Arc;

use warpool::driver::decorate::Counting;
use warpool::driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, DevicePtr, Devices as _, Driver, Pattern};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::elastic::{ElasticLayout, ElasticMemory, headroom};
use warpool::memory::pools::Checkpoints as _;
use warpool::memory::raw::Request;
use warpool::memory::report::SnapshotOptions;
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, MemPoolId, OomCause, PagedAllocator, Settings,
};
use warpool::{Error, Instance, Stream};
use warpool_testing::Tags;

use crate::{DEVICE, MIB, Machine};

/// Contiguous blocks.
fn blocks(blocks: u64, block_bytes: u64) -> ElasticLayout {
    ElasticLayout { rows: 1, blocks, block_bytes }
}

impl Machine {
    /// A device of which so much is left beside its context.
    fn small(bytes: u64) -> Self {
        let mut config = SimConfig::default().with_capacity(bytes + 2 * MIB);
        config.devices[0].bytes_context = 2 * MIB;
        Self::with_config(config)
    }

    fn elastic(&self, layout: ElasticLayout, stream: &Stream) -> ElasticMemory {
        ElasticMemory::new(&self.paged, layout, stream).unwrap()
    }

    /// Queues a write of a value into a block of a layout with one row.
    fn fill_at(&self, elastic: &ElasticMemory, block: u64, value: u8, stream: &Stream) {
        let bytes = elastic.layout().block_bytes;
        self.sim.fill(elastic.ptr().offset(block * bytes), Pattern::U8(value), bytes, stream.id()).unwrap();
    }

    fn first_byte(&self, elastic: &ElasticMemory, block: u64) -> u8 {
        self.sim.device_synchronize(DEVICE).unwrap();
        let mut byte = [0];
        self.sim.download(DEVICE, elastic.ptr().offset(block * elastic.layout().block_bytes), &mut byte).unwrap();
        byte[0]
    }

    fn remaps(&self) -> u64 {
        [Call::VmCreate, Call::VmMap, Call::VmSetAccess, Call::VmUnmap, Call::VmRelease]
            .map(|call| self.sim.call_count(call))
            .iter()
            .sum()
    }

    fn hazard_kinds(&self) -> Vec<HazardKind> {
        self.sim.device_synchronize(DEVICE).ok();
        self.sim.hazards().iter().map(|hazard| hazard.kind).collect()
    }
}

#[test]
fn what_was_there_before_is_committed_again_without_a_driver_call() {
    let machine = Machine::tracking(true);
    let stream = machine.stream();
    let cache = machine.elastic(blocks(512, 2 * MIB), &stream);
    assert_eq!((machine.reserved(), cache.committed()), (0, 0), "addresses only");
    cache.commit(0..100, &stream).unwrap();
    assert_eq!((machine.reserved(), cache.committed(), cache.committed_bytes()), (200 * MIB, 100, 200 * MIB));
    (0..100).for_each(|block| machine.fill_at(&cache, block, block as u8, &stream));
    cache.decommit(40..60, &stream).unwrap();
    assert!(!cache.is_committed(39..41) && cache.is_committed(0..40) && cache.is_committed(60..100));
    let before = machine.sim.calls_made();
    cache.commit(30..70, &stream).unwrap();
    assert_eq!(machine.sim.calls_made(), before, "its pages are still mapped there");
    assert_eq!((machine.reserved(), cache.committed()), (200 * MIB, 100));
    for block in [0, 39, 60, 99] {
        assert_eq!(machine.first_byte(&cache, block), block as u8, "block {block} kept its contents");
    }
    machine.expect_no_hazard();
}

#[test]
fn cache_and_activations_share_one_stock() {
    let machine = Machine::new();
    let (compute, other) = (machine.stream(), machine.stream());
    let cache = machine.elastic(blocks(400, 4 * MIB), &compute);
    cache.commit(0..100, &compute).unwrap();
    (0..100).for_each(|block| machine.fill_at(&cache, block, 1, &compute));
    for round in 0..4 {
        // A prefill in another stream takes what the cache gave up, and the cache what the prefill freed.
        cache.decommit(20..100, &compute).unwrap();
        let activations = machine.block(320 * MIB, &other);
        machine.fill(&activations, 7, &other);
        assert_eq!(machine.reserved(), 400 * MIB, "round {round}: the pages of the blocks that left");
        machine.expect(&activations, 7, &other);
        drop(activations);
        cache.commit(20..100, &compute).unwrap();
        (20..100).for_each(|block| machine.fill_at(&cache, block, 2, &compute));
        assert_eq!(machine.reserved(), 400 * MIB, "round {round}: the pages of what was freed");
        assert_eq!((machine.first_byte(&cache, 19), machine.first_byte(&cache, 99)), (1, 2));
    }
    machine.expect_no_hazard();
}

/// A page serves others once the last of the blocks that touch it has left.
#[test]
fn a_page_stays_as_long_as_a_block_touches_it() {
    let machine = Machine::new();
    let stream = machine.stream();
    // Two rows, with four blocks to a page.
    let layout = ElasticLayout { rows: 2, blocks: 64, block_bytes: MIB / 2 };
    let cache = machine.elastic(layout, &stream);
    assert_eq!((layout.blocks_per_page(2 * MIB), layout.blocks_per_page(cache.page_bytes())), (Some(4), Some(16)));
    cache.commit(2..5, &stream).unwrap();
    assert_eq!((machine.reserved(), cache.committed_bytes()), (8 * MIB, 3 * MIB), "two pages in each row");
    cache.decommit(2..4, &stream).unwrap();
    let one = machine.block(4 * MIB, &stream);
    assert_eq!(machine.reserved(), 8 * MIB, "the first page of each row is free");
    cache.decommit(4..5, &stream).unwrap();
    let two = machine.block(4 * MIB, &stream);
    assert_eq!(machine.reserved(), 8 * MIB, "and now the second");
    drop((one, two));
    assert_eq!(ElasticLayout { rows: 2, blocks: 63, block_bytes: MIB / 2 }.blocks_per_page(2 * MIB), None);
    assert_eq!(ElasticLayout { rows: 1, blocks: 63, block_bytes: 3 * MIB / 2 }.blocks_per_page(2 * MIB), Some(4));
    machine.expect_no_hazard();
}

/// Pages of up to 8 MiB: whatever was committed in which steps, ranges that begin and end with the largest page share
/// none.
#[test]
fn no_page_lies_across_the_border_of_an_aligned_range() {
    let machine = Machine::new();
    machine.paged.set_page_sizes(0, 0);
    let stream = machine.stream();
    // Its addresses have been another heap's, whose pages are still mapped there, wherever they were.
    let (gone, other) = (machine.device.lease_stream().unwrap(), machine.stream());
    drop([2, 14, 30, 62, 90].map(|mib| machine.block(mib * MIB, &gone)));
    gone.synchronize().unwrap();
    drop((0..40).map(|_| machine.block(9 * MIB, &other)).collect::<Vec<_>>());
    let cache = machine.elastic(blocks(256, MIB), &stream);
    assert_eq!(cache.layout().blocks_per_page(cache.page_bytes()), Some(8));
    for seed in warpool_testing::seeds(20) {
        let mut rng = warpool_testing::Rng::new(seed);
        for _ in 0..6 {
            let first = rng.u64_below(256);
            cache.commit(first..rng.u64_in(first..=256), &stream).unwrap();
            // Pages of many sizes come back as spare or free ones.
            drop(machine.block(rng.pick(&[2, 6, 30]) * MIB, &stream));
            let first = rng.u64_below(256);
            cache.decommit(first..rng.u64_in(first..=256), &stream).unwrap();
        }
        cache.commit(0..256, &stream).unwrap();
        machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        assert_eq!(machine.reserved(), 256 * MIB, "seed {seed}");
        let first = 8 * rng.u64_below(16);
        cache.decommit(first..first + 80, &stream).unwrap();
        assert_eq!(machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap(), 80 * MIB, "seed {seed}");
    }
    machine.expect_no_hazard();
}

#[test]
fn blocks_without_memory_are_hazards_with_the_label() {
    let kinds = |act: fn(&Machine, &ElasticMemory, &Stream)| {
        let machine = Machine::new();
        let stream = machine.stream();
        let cache = machine.elastic(blocks(64, MIB / 2), &stream).with_label("kv");
        act(&machine, &cache, &stream);
        let kinds = machine.hazard_kinds();
        let hazards = machine.sim.hazards();
        assert!(hazards.iter().all(|hazard| hazard.label.as_deref() == Some("kv")), "{hazards:?}");
        kinds
    };
    let never = kinds(|machine, cache, stream| {
        cache.commit(0..4, stream).unwrap();
        // The driver refuses a fill of an address without memory, but a kernel may have it.
        let ptr = cache.ptr().offset(40 * cache.layout().block_bytes);
        assert!(machine.sim.fill(ptr, Pattern::U8(1), 4, stream.id()).is_err());
        Tags::new(&machine.sim, DEVICE).write(ptr, 4, 1, stream.id());
    });
    assert_eq!(never, [HazardKind::IllegalAccess]);
    let beside = kinds(|machine, cache, stream| {
        cache.commit(0..2, stream).unwrap();
        machine.fill_at(cache, 1, 1, stream);
        machine.fill_at(cache, 2, 1, stream);
    });
    assert_eq!(beside, [HazardKind::UseAfterFree], "a page is there, but not for this block");
    let left = kinds(|machine, cache, stream| {
        cache.commit(0..16, stream).unwrap();
        cache.decommit(4..16, stream).unwrap();
        machine.fill_at(cache, 3, 1, stream);
        machine.fill_at(cache, 7, 1, stream);
    });
    assert_eq!(left, [HazardKind::UseAfterFree], "its page is still mapped");
}

#[test]
fn streams_are_ordered_by_commits_and_decommits() {
    let used_and_taken = |ordered: bool| {
        let machine = Machine::new();
        let [home, worker, taker] = [(); 3].map(|()| machine.stream());
        let cache = machine.elastic(blocks(8, 2 * MIB), &home);
        machine.sim.pause_stream(worker.id()).unwrap();
        cache.commit(0..8, &worker).unwrap();
        (0..8).for_each(|block| machine.fill_at(&cache, block, 3, &worker));
        // The decommit is ordered after the work of its stream, and of no other one.
        cache.decommit(0..8, if ordered { &worker } else { &home }).unwrap();
        let taken = machine.block(16 * MIB, &taker);
        assert_eq!(machine.reserved(), 16 * MIB);
        machine.fill(&taken, 4, &taker);
        machine.sim.resume_stream(worker.id()).unwrap();
        machine.sim.device_synchronize(DEVICE).unwrap();
        machine.sim.hazards().len()
    };
    assert_eq!(used_and_taken(true), 0);
    assert!(used_and_taken(false) > 0, "the control");
}

#[test]
fn a_commit_waits_for_the_stream_that_had_the_memory() {
    let machine = Machine::small(64 * MIB);
    let [home, worker, owner] = [(); 3].map(|()| machine.stream());
    let cache = machine.elastic(blocks(8, 4 * MIB), &home);
    let before = machine.block(32 * MIB, &owner);
    machine.sim.pause_stream(owner.id()).unwrap();
    machine.fill(&before, 1, &owner);
    drop(before);
    cache.commit(0..8, &worker).unwrap();
    (0..8).for_each(|block| machine.fill_at(&cache, block, 2, &worker));
    machine.sim.resume_stream(owner.id()).unwrap();
    assert_eq!(machine.first_byte(&cache, 7), 2);
    assert_eq!(machine.reserved(), 32 * MIB);
    machine.expect_no_hazard();
}

/// A page that another heap has taken is still mapped at the old place. Committing that place again before the work
/// that used it there is done waits for that work.
#[test]
fn a_place_whose_page_was_taken_is_committed_again() {
    let machine = Machine::new();
    let [stream, taker] = [(); 2].map(|()| machine.stream());
    let cache = machine.elastic(blocks(16, 2 * MIB), &stream);
    cache.commit(0..16, &stream).unwrap();
    (0..16).for_each(|block| machine.fill_at(&cache, block, 1, &stream));
    cache.decommit(4..12, &stream).unwrap();
    let taken = machine.block(16 * MIB, &taker);
    machine.fill(&taken, 2, &taker);
    cache.commit(0..16, &stream).unwrap();
    (4..12).for_each(|block| machine.fill_at(&cache, block, 3, &stream));
    machine.expect(&taken, 2, &taker);
    assert_eq!([3, 4, 11, 12].map(|block| machine.first_byte(&cache, block)), [1, 3, 3, 1]);
    assert_eq!(machine.reserved(), 48 * MIB);
    machine.expect_no_hazard();
}

#[test]
fn graphs_are_replayed_over_blocks_that_come_and_go() {
    let machine = Machine::new();
    let [stream, other] = [(); 2].map(|()| machine.device.lease_stream().unwrap().stream().clone());
    let cache = machine.elastic(blocks(64, 2 * MIB), &stream);
    let tags = Tags::new(&machine.sim, DEVICE);
    let mut graph = Graph::new(&machine.paged, &machine.device, GraphOptions::default()).unwrap();
    let captured = graph.capture(&stream, CaptureOptions::default(), |_| {
        // Nothing is committed yet: the graph has the addresses.
        tags.write(cache.ptr().offset(10 * MIB), 4, 0x0909_0909, stream.id());
        for refused in [cache.commit(0..1, &stream), cache.decommit(0..1, &stream)] {
            assert_eq!(refused, Err(Error::ElasticInCapture { stream: stream.id() }));
        }
        Ok(())
    });
    captured.unwrap();
    for _ in 0..3 {
        let activations = machine.block(64 * MIB, &other);
        machine.fill(&activations, 1, &other);
        drop(activations);
        cache.commit(0..32, &stream).unwrap();
        graph.replay(&stream).unwrap();
        assert_eq!(machine.first_byte(&cache, 5), 9);
        cache.decommit(0..32, &stream).unwrap();
    }
    machine.expect_no_hazard();
    graph.replay(&stream).unwrap();
    assert_eq!(machine.hazard_kinds(), [HazardKind::GraphUsesFreedMemory], "the block is not committed");
}

#[test]
fn a_commit_is_complete_or_changes_nothing() {
    let machine = Machine::small(256 * MIB);
    let stream = machine.stream();
    let cache = machine.elastic(blocks(1000, 2 * MIB), &stream);
    cache.commit(0..39, &stream).unwrap();
    cache.commit(41..42, &stream).unwrap();
    (0..39).for_each(|block| machine.fill_at(&cache, block, 6, &stream));
    // The first run of blocks is there when the second one does not fit.
    let hungry = [(20..500, OomCause::Device), (100..1000, OomCause::Device)];
    for (wanted, cause) in hungry {
        let stats = machine.paged.stats(DEVICE).unwrap();
        let Err(Error::OutOfMemory(report)) = cache.commit(wanted, &stream) else { panic!("it does not fit") };
        assert_eq!(report.cause, cause);
        assert_eq!(report.bytes_allocated, 80 * MIB, "{report}");
        assert_eq!((cache.committed(), machine.reserved() >= 80 * MIB), (40, true));
        let after = machine.paged.stats(DEVICE).unwrap();
        assert_eq!(after.allocated_bytes.all.current, stats.allocated_bytes.all.current);
        assert_eq!(after.num_ooms, stats.num_ooms + 1);
    }
    machine.paged.set_memory_cap(DEVICE, Some(100 * MIB)).unwrap();
    let Err(Error::OutOfMemory(report)) = cache.commit(39..60, &stream) else { panic!("beyond the cap") };
    assert_eq!((report.cause, report.bytes_limit), (OomCause::Limit, Some(100 * MIB)));
    cache.commit(39..50, &stream).unwrap();
    machine.paged.set_memory_cap(DEVICE, None).unwrap();
    cache.commit(39..60, &stream).unwrap();
    assert_eq!((machine.first_byte(&cache, 38), cache.committed()), (6, 60));
    machine.expect_no_hazard();
}

#[test]
fn headroom_is_what_can_be_committed() {
    let machine = Machine::small(300 * MIB);
    let [stream, other] = [(); 2].map(|()| machine.stream());
    let kept = machine.block(40 * MIB, &other);
    drop(machine.block(60 * MIB, &other));
    let cache = machine.elastic(blocks(1000, 2 * MIB), &stream);
    for cap in [None, Some(200 * MIB)] {
        machine.paged.set_memory_cap(DEVICE, cap).unwrap();
        let slots = headroom(&machine.paged, &machine.device).unwrap() / (2 * MIB);
        assert!(cap.is_none_or(|cap| slots * 2 * MIB == cap - 40 * MIB), "{slots} slots");
        cache.commit(0..slots, &stream).unwrap();
        assert_eq!(headroom(&machine.paged, &machine.device).unwrap(), 0);
        assert!(matches!(cache.commit(0..slots + 1, &stream), Err(Error::OutOfMemory(_))));
        cache.decommit(0..slots, &stream).unwrap();
        machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    }
    drop(kept);
}

#[test]
fn dropping_it_makes_no_driver_call_and_its_addresses_serve_others() {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_capacity(4 << 30)));
    let counting = Arc::new(Counting::new(sim.clone()));
    let instance = Instance::new(counting.clone() as Arc<dyn Driver>).unwrap();
    let paged = Arc::new(PagedAllocator::new(&instance, Settings::default()).unwrap());
    let stream = instance.device(0).unwrap().pool_stream().unwrap();
    let (mut reserved, mut first) = (0, None);
    for round in 0..100 {
        let cache = ElasticMemory::new(&paged, blocks(1500, 2 * MIB), &stream).unwrap();
        first.get_or_insert(cache.ptr());
        cache.commit(round..round + 20, &stream).unwrap();
        sim.fill(cache.ptr().offset(round * 2 * MIB), Pattern::U8(1), 4096, stream.id()).unwrap();
        counting.reset();
        drop(cache);
        let calls: u64 = counting
            .counts()
            .iter()
            .filter(|count| count.call != Call::SuballocationFreed)
            .map(|count| count.calls)
            .sum();
        assert_eq!(calls, 0, "round {round}");
        stream.synchronize().unwrap();
        // Another request returns what was released.
        drop(paged.allocate(20 * MIB, &stream).unwrap());
        reserved = sim.call_count(Call::VmReserve);
        assert!(paged.page_stats(DEVICE).unwrap().reserved_bytes <= 80 * MIB, "round {round}");
    }
    assert!(reserved <= 2, "{reserved} reservations of 12 times the device's memory for 100 ranges");
    assert_eq!(sim.hazards().len(), 0, "{:?}", sim.hazards());
}

#[test]
fn only_commits_and_decommits_change_its_memory() {
    let machine = Machine::new();
    let stream = machine.stream();
    only_they_change(&machine, &stream);
    // In addresses that another heap has had: blocks began where its blocks are.
    let machine = Machine::new();
    let (gone, other) = (machine.device.lease_stream().unwrap(), machine.stream());
    drop([40, 3, 7].map(|mib| machine.block(mib * MIB, &gone)));
    gone.synchronize().unwrap();
    let before = machine.sim.call_count(Call::VmMap);
    let kept: Vec<_> = (0..40).map(|_| machine.block(9 * MIB, &other)).collect();
    assert!(machine.sim.call_count(Call::VmMap) > before, "requests for pages, so that the heap is retired");
    drop(kept);
    machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    only_they_change(&machine, &machine.stream());
}

fn only_they_change(machine: &Machine, stream: &Stream) {
    let cache = machine.elastic(blocks(10, 2 * MIB), stream);
    let (machine, stream) = (machine, stream.clone());
    cache.commit(0..5, &stream).unwrap();
    cache.decommit(3..5, &stream).unwrap();
    let snapshot = machine.paged.snapshot(SnapshotOptions::default()).unwrap();
    let [segment] = &snapshot.segments[..] else { panic!("one segment: {:?}", snapshot.segments) };
    assert_eq!((segment.address, segment.total_size, segment.allocated_size), (cache.ptr().0, 10 * MIB, 6 * MIB));
    assert!(segment.is_elastic && !segment.pool.is_default());
    for ptr in [cache.ptr(), cache.ptr().offset(2 * MIB)] {
        assert_eq!(machine.paged.free_raw(ptr), Err(Error::UnknownPointer { ptr }));
        assert_eq!(machine.paged.record_use_raw(ptr, stream.id()), Err(Error::UnknownPointer { ptr }));
    }
    let request = Request::new(DEVICE, stream.id(), 100).in_pool(segment.pool);
    assert!(matches!(machine.paged.allocate_raw(request), Err(Error::Unsupported { .. })));
    assert!(matches!(machine.paged.checkpoint(DEVICE, segment.pool), Err(Error::Checkpoint { .. })));
    let released = machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!((released, cache.committed()), (4 * MIB, 3), "what is not committed");
    let stats = machine.paged.page_stats(DEVICE).unwrap();
    assert_eq!((stats.reserved_bytes, stats.elastic_bytes), (6 * MIB, 6 * MIB));
}

#[test]
fn wrong_uses_are_errors() {
    let machine = Machine::new();
    let stream = machine.stream();
    for layout in [blocks(0, 10), blocks(10, 0), ElasticLayout { rows: 0, blocks: 1, block_bytes: 1 }] {
        assert_eq!(ElasticMemory::new(&machine.paged, layout, &stream).err(), Some(Error::EmptyElastic));
    }
    let huge = ElasticMemory::new(&machine.paged, blocks(u64::MAX, 2), &stream).err();
    assert_eq!(huge, Some(Error::RequestTooLarge { bytes: u64::MAX }));
    let cache = machine.elastic(blocks(10, 100), &stream);
    for (start, end) in [(0, 11), (11, 11), (5, 4)] {
        let expected = Err(Error::ElasticBlocks { start, end, blocks: 10 });
        assert_eq!(
            (cache.commit(start..end, &stream), cache.decommit(start..end, &stream)),
            (expected.clone(), expected)
        );
        assert!(!cache.is_committed(start..end));
    }
    cache.commit(3..3, &stream).unwrap();
    let other = Machine::new();
    assert!(matches!(cache.commit(0..1, &other.stream()), Err(Error::ForeignInstance { .. })));
    let caching = Arc::new(CachingAllocator::new(machine.device.instance(), Settings::default()));
    let error = ElasticMemory::new(&caching, blocks(1, 1), &stream).err().unwrap();
    assert!(error.to_string().contains("backend:paged"), "{error}");
    let _ = DevicePtr(0);
    assert_eq!(machine.remaps(), 0);
}
