//! Statistics by PyTorch's names: they agree with snapshots, and reading them changes nothing.

use warpool::memory::pools::PoolOptions;
use warpool::memory::report::{BlockState, SnapshotOptions, StatByKind};
use warpool::memory::{Allocate as _, DeviceAllocator, MemPool};
use warpool_testing::{Rng, seeds};

use crate::{DEVICE, MIB, Machine};

/// Compares the statistics with a snapshot.
#[track_caller]
fn expect_as_in_snapshot(machine: &Machine) {
    machine.paged.check();
    let stats = machine.paged.stats(DEVICE).unwrap();
    let snapshot = machine.paged.snapshot(SnapshotOptions::default()).unwrap();
    let (mut segments, mut parts, mut bytes) = ([0; 2], [0; 2], [0; 2]);
    for segment in &snapshot.segments {
        let kind = segment.kind as usize;
        segments[kind] += 1;
        let is_free = |state: BlockState| state == BlockState::Inactive;
        if segment.blocks.len() > 1 {
            let free = segment.blocks.iter().filter(|block| is_free(block.state));
            parts[kind] += free.clone().count() as u64;
            bytes[kind] += free.map(|block| block.size).sum::<u64>();
        }
        assert!(
            !segment.blocks.windows(2).any(|two| is_free(two[0].state) && is_free(two[1].state)),
            "neighbours that are free are one block"
        );
    }
    let current = |stat: StatByKind| [stat.small_pool.current, stat.large_pool.current];
    assert_eq!(current(stats.segment), segments, "segments");
    assert_eq!(current(stats.inactive_split), parts, "free parts");
    assert_eq!(current(stats.inactive_split_bytes), bytes, "bytes of free parts");
    let mut by_pool = std::collections::BTreeMap::<_, u64>::new();
    for segment in snapshot.segments.iter().filter(|segment| !segment.pool.is_default()) {
        *by_pool.entry(segment.pool).or_default() += segment.total_size;
    }
    for (pool, stat) in &stats.reserved_bytes_by_private_pools {
        assert_eq!(stat.all.current, by_pool.remove(pool).unwrap_or(0), "reserved by pool {pool}");
    }
    assert_eq!(by_pool.len(), 0, "every private pool is counted");
    for stat in [stats.segment, stats.inactive_split, stats.inactive_split_bytes] {
        assert_eq!(stat.all.current, stat.small_pool.current + stat.large_pool.current);
        assert_eq!(stat.all.current, stat.all.allocated - stat.all.freed);
        assert!(stat.all.peak >= stat.all.current);
    }
}

#[test]
fn segments_and_free_parts_are_those_of_a_snapshot() {
    for seed in seeds(20) {
        println!("seed: {seed}");
        let mut rng = Rng::new(seed);
        let machine = Machine::new();
        let streams = [machine.stream(), machine.stream()];
        let pool = MemPool::new(&machine.allocator, &machine.device, PoolOptions::default()).unwrap();
        let mut live = Vec::new();
        for step in 0..200 {
            let stream = &streams[rng.below(2)];
            let _scope = (rng.below(3) == 0).then(|| pool.enter().unwrap());
            match rng.below(5) {
                0..3 => {
                    let magnitude = 9 + rng.below(16);
                    let bytes = 1 + rng.u64_below(1 << magnitude);
                    live.push(machine.allocator.allocate(bytes, stream).unwrap());
                }
                _ if !live.is_empty() => drop(live.swap_remove(rng.below(live.len()))),
                _ => {}
            }
            if step % 10 == 0 {
                expect_as_in_snapshot(&machine);
            }
        }
        drop(live);
        expect_as_in_snapshot(&machine);
        pool.close().unwrap();
        expect_as_in_snapshot(&machine);
        let stats = machine.paged.stats(DEVICE).unwrap();
        assert!(stats.reserved_bytes_by_private_pools.is_empty(), "removed with its pool");
    }
}

#[test]
fn reading_changes_nothing() {
    let run = |reads: bool| {
        let (machine, mut rng) = (Machine::new(), Rng::new(7));
        let stream = machine.stream();
        let (mut live, mut addresses) = (Vec::new(), Vec::new());
        for _ in 0..500 {
            if rng.below(2) == 0 {
                let magnitude = 9 + rng.below(14);
                let block = machine.block(1 + rng.u64_below(1 << magnitude), &stream);
                addresses.push(block.ptr());
                live.push(block);
            } else if !live.is_empty() {
                drop(live.swap_remove(rng.below(live.len())));
            }
            if reads {
                machine.paged.stats(DEVICE).unwrap();
                machine.paged.snapshot(SnapshotOptions::default()).unwrap();
                machine.paged.largest_available(DEVICE).unwrap();
            }
        }
        let first = addresses[0].0;
        addresses.iter().map(|ptr| ptr.0 - first).collect::<Vec<_>>()
    };
    assert_eq!(run(true), run(false), "the same addresses");
}

#[test]
fn a_segment_is_a_run_of_addresses_with_pages() {
    let machine = Machine::new();
    let stream = machine.stream();
    let [first, second, third] = [1, 2, 3].map(|_| machine.block(10 * MIB, &stream));
    let count = || {
        let stats = machine.paged.stats(DEVICE).unwrap();
        (stats.segment.large_pool.current, stats.inactive_split.large_pool.current)
    };
    assert_eq!(count(), (1, 0), "three neighbours are one segment");
    drop(first);
    assert_eq!(count(), (1, 1));
    drop(third);
    assert_eq!(count(), (1, 2));
    let large = machine.block(20 * MIB, &stream);
    assert_eq!(count().1, 0, "all free pages were taken");
    drop((second, large));
    machine.allocator.trim(DEVICE, warpool::memory::MemPoolId::DEFAULT).unwrap();
    let stats = machine.paged.stats(DEVICE).unwrap();
    assert_eq!((stats.segment.all.current, stats.segment.all.allocated), (0, stats.segment.all.freed));
}
