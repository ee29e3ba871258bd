//! The hot path makes no driver call, and threads do not interfere with each other.

use std::thread;

use warpool::driver::HostPtr;
use warpool::memory::HostBlock;

use super::context::{KIB, MIB, TestContext};
use crate::common::rng::Rng;

/// The number of driver calls.
fn calls(context: &TestContext) -> u64 {
    context.counting.counts().iter().map(|count| count.calls).sum()
}

#[test]
fn allocating_and_freeing_a_cached_block_makes_no_driver_call() {
    let context = TestContext::new("");
    for bytes in [1, 4 * KIB, 100_000, MIB, 40 * MIB] {
        context.free(context.alloc(bytes));
        context.counting.reset();
        for _ in 0..100 {
            drop(context.pinned.allocate(bytes).unwrap());
            context.pinned.allocate(bytes - bytes / 100).unwrap().free().unwrap();
        }
        assert_eq!(context.counting.counts(), [], "{bytes}");
    }
    context.finish();
}

#[test]
fn the_newest_cached_block_is_reused_first() {
    let context = TestContext::new("");
    let blocks: Vec<_> = (0..3).map(|_| context.alloc(4 * KIB)).collect();
    let ptrs: Vec<_> = blocks.iter().map(HostBlock::ptr).collect();
    drop(blocks);
    let again: Vec<_> = (0..3).map(|_| context.alloc(4 * KIB)).collect();
    let reused: Vec<_> = again.iter().map(HostBlock::ptr).rev().collect();
    assert_eq!(reused, ptrs);
    drop(again);
    context.finish();
}

/// Two allocators run the same random program; one reads its statistics after every step, the other rarely. The
/// allocators have different addresses, so the test compares which addresses are equal to earlier ones. Only sizes of
/// size classes are used: for larger requests the smallest block that fits is taken, but the last freed one first.
#[test]
fn repeated_pairs_leave_blocks_and_statistics_as_they_are() {
    for seed in 0..20 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mut sides = [(); 2].map(|()| (TestContext::new(""), Vec::<HostBlock>::new()));
        for step in 0..500 {
            let bytes = [100, 4 * KIB, 5000, 256 * KIB][rng.below(4)] - rng.u64_below(3);
            let (draw, pairs, chosen, by_drop) = (rng.below(8), rng.below(4), rng.below(64), rng.below(2) == 0);
            let mut seen = [Vec::new(), Vec::new()];
            for (number, ((context, live), seen)) in sides.iter_mut().zip(&mut seen).enumerate() {
                let read = || drop((number == 0).then(|| context.stats()));
                let free = |block: HostBlock| match by_drop {
                    true => drop(block),
                    false => assert!(context.pinned.free_cached(block).is_ok(), "nothing about it is unusual"),
                };
                match draw {
                    0..5 => {
                        for _ in 0..pairs {
                            let block = context.pinned.allocate(bytes).unwrap();
                            read();
                            seen.push((block.ptr(), block.bytes(), block.bytes_usable()));
                            free(block);
                            read();
                        }
                        live.push(context.pinned.allocate(bytes).unwrap());
                    }
                    5 if pairs == 0 => context.pinned.reset_peak_stats(),
                    5 if pairs == 1 => context.pinned.reset_accumulated_stats(),
                    5 if pairs == 2 => drop(context.trim(0)),
                    _ if !live.is_empty() => free(live.swap_remove(chosen % live.len())),
                    _ => {}
                }
                read();
                seen.extend(live.iter().map(|block| (block.ptr(), block.bytes(), block.bytes_usable())));
            }
            let [often, seldom] = seen.map(|seen| {
                let first = |ptr: HostPtr| seen.iter().position(|&(other, ..)| other == ptr);
                seen.iter().map(|&(ptr, bytes, usable)| (first(ptr), bytes, usable)).collect::<Vec<_>>()
            });
            assert_eq!(often, seldom, "blocks in step {step}");
            if step % 16 == 0 {
                let [often, seldom] = [0, 1].map(|side| {
                    sides[side].0.pinned.check();
                    let stats = sides[side].0.stats();
                    // How much a trim leaves depends on the order of the segments' addresses.
                    assert_eq!(stats.cached_bytes, stats.allocated_bytes.current - stats.active_bytes.current);
                    (stats.active_requests, stats.active_bytes)
                });
                assert_eq!(often, seldom, "statistics in step {step}");
            }
        }
        for (context, live) in sides {
            drop(live);
            context.finish();
        }
    }
}

#[test]
fn dropping_blocks_and_creating_allocators_makes_no_driver_call() {
    let context = TestContext::new("");
    let stream = context.stream();
    let [plain, used, large] = [KIB, 2 * KIB, 80 * MIB].map(|bytes| context.alloc(bytes));
    context.pause_stream(&stream);
    context.upload(&used, &stream);
    context.counting.reset();
    drop((plain, used, large));
    let other = warpool::memory::HostAllocator::new(&context.instance, context.pinned.settings());
    drop(other);
    assert_eq!(calls(&context), 0);
    context.finish_stream(&stream);
    context.finish();
}

/// A block returns to the cache that it was taken from, not to that of the freeing thread.
#[test]
fn a_block_freed_by_another_thread_returns_to_its_cache() {
    let context = TestContext::new("");
    let blocks: Vec<_> = (0..64).map(|_| context.alloc(4 * KIB)).collect();
    let pinned = context.pinned_bytes();
    context.counting.reset();
    let mut blocks = blocks;
    for _ in 0..10 {
        thread::scope(|scope| scope.spawn(move || drop(blocks)).join()).unwrap();
        blocks = (0..64).map(|_| context.pinned.allocate(4 * KIB).unwrap()).collect();
    }
    assert_eq!((calls(&context), context.pinned_bytes()), (0, pinned));
    assert_eq!(context.stats().active_requests.peak, 64);
    drop(blocks);
    context.finish();
}

#[test]
fn the_cache_of_an_ended_thread_serves_other_threads() {
    let context = TestContext::new("");
    let in_thread = context.pinned.clone();
    thread::spawn(move || drop([in_thread.allocate(30 * MIB).unwrap(), in_thread.allocate(20 * MIB).unwrap()]))
        .join()
        .unwrap();
    let pinned = context.pinned_bytes();
    let blocks = [context.alloc(20 * MIB), context.alloc(30 * MIB)];
    assert_eq!(context.pinned_bytes(), pinned);
    drop(blocks);
    context.finish();
}

/// Random allocations and frees: no block has two owners, and none is leaked.
#[test]
fn threads_never_share_a_block() {
    let context = TestContext::new("");
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let pinned = &context.pinned;
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                let mut held = Vec::new();
                for _ in 0..3_000 {
                    let most = if rng.one_in(8) { 3 * MIB } else { 20 * KIB };
                    let bytes = 8 + rng.u64_below(most);
                    let block = pinned.allocate(bytes).unwrap();
                    block.write(0, &(block.ptr().0 ^ thread).to_le_bytes()).unwrap();
                    held.push(block);
                    if held.len() > 20 {
                        let block = held.swap_remove(rng.below(20));
                        let mut read = [0; 8];
                        block.read(0, &mut read).unwrap();
                        assert_eq!(u64::from_le_bytes(read), block.ptr().0 ^ thread, "another thread wrote to it");
                    }
                }
            });
        }
    });
    let stats = context.stats();
    assert_eq!((stats.active_requests.current, stats.active_bytes.current), (0, 0));
    assert_eq!(stats.cached_bytes, stats.allocated_bytes.current);
    context.finish();
}
