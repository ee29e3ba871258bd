//! The hot path calls no driver, and what threads do on it stays apart.

use std::thread;

use warpool::memory::HostBlock;

use super::lab::{HostLab, KIB, MIB};

/// Every call that was made to the driver.
fn calls(lab: &HostLab) -> u64 {
    lab.counting.counts().iter().map(|count| count.calls).sum()
}

#[test]
fn a_cached_pair_calls_no_driver() {
    let lab = HostLab::new("");
    for bytes in [1, 4 * KIB, 100_000, MIB, 40 * MIB] {
        lab.free(lab.alloc(bytes));
        lab.counting.reset();
        for _ in 0..100 {
            drop(lab.pinned.allocate(bytes).unwrap());
            lab.pinned.allocate(bytes - bytes / 100).unwrap().free().unwrap();
        }
        assert_eq!(lab.counting.counts(), [], "{bytes}");
    }
    lab.finish();
}

#[test]
fn the_newest_block_comes_back_first() {
    let lab = HostLab::new("");
    let blocks: Vec<_> = (0..3).map(|_| lab.alloc(4 * KIB)).collect();
    let ptrs: Vec<_> = blocks.iter().map(HostBlock::ptr).collect();
    drop(blocks);
    let again: Vec<_> = (0..3).map(|_| lab.alloc(4 * KIB)).collect();
    let back: Vec<_> = again.iter().map(HostBlock::ptr).rev().collect();
    assert_eq!(back, ptrs);
    drop(again);
    lab.finish();
}

/// Neither drop nor making an allocator calls the driver, used or not.
#[test]
fn drop_calls_no_driver() {
    let lab = HostLab::new("");
    let stream = lab.stream();
    let [plain, used, large] = [KIB, 2 * KIB, 80 * MIB].map(|bytes| lab.alloc(bytes));
    lab.pause_stream(&stream);
    lab.upload(&used, &stream);
    lab.counting.reset();
    drop((plain, used, large));
    let other = warpool::memory::HostAllocator::new(&lab.instance, lab.pinned.settings());
    drop(other);
    assert_eq!(calls(&lab), 0);
    lab.let_go(&stream);
    lab.finish();
}

/// A block goes back to the cache that it came from: who gives it back on another thread does not keep it.
#[test]
fn blocks_travel_between_threads() {
    let lab = HostLab::new("");
    let blocks: Vec<_> = (0..64).map(|_| lab.alloc(4 * KIB)).collect();
    let pinned = lab.pinned_bytes();
    lab.counting.reset();
    let mut blocks = blocks;
    for _ in 0..10 {
        thread::scope(|scope| scope.spawn(move || drop(blocks)).join()).unwrap();
        blocks = (0..64).map(|_| lab.pinned.allocate(4 * KIB).unwrap()).collect();
    }
    assert_eq!((calls(&lab), lab.pinned_bytes()), (0, pinned));
    assert_eq!(lab.stats().active_requests.peak, 64);
    drop(blocks);
    lab.finish();
}

/// What a thread that ended had in its cache serves others before anything is pinned.
#[test]
fn the_cache_of_a_thread_that_ended_is_not_lost() {
    let lab = HostLab::new("");
    let in_thread = lab.pinned.clone();
    thread::spawn(move || drop([in_thread.allocate(30 * MIB).unwrap(), in_thread.allocate(20 * MIB).unwrap()]))
        .join()
        .unwrap();
    let pinned = lab.pinned_bytes();
    let blocks = [lab.alloc(20 * MIB), lab.alloc(30 * MIB)];
    assert_eq!(lab.pinned_bytes(), pinned);
    drop(blocks);
    lab.finish();
}

/// Threads take and give at random; every block is one thread's alone, and nothing is lost.
#[test]
fn threads_share_nothing_but_the_memory() {
    let lab = HostLab::new("");
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let pinned = &lab.pinned;
            scope.spawn(move || {
                let mut state = thread + 1;
                let mut held = Vec::new();
                for _ in 0..3_000 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let bytes = 8 + (state >> 33) % (if state % 8 == 0 { 3 * MIB } else { 20 * KIB });
                    let block = pinned.allocate(bytes).unwrap();
                    block.write(0, &(block.ptr().0 ^ thread).to_le_bytes()).unwrap();
                    held.push(block);
                    if held.len() > 20 {
                        let block = held.swap_remove((state >> 40) as usize % 20);
                        let mut back = [0; 8];
                        block.read(0, &mut back).unwrap();
                        assert_eq!(u64::from_le_bytes(back), block.ptr().0 ^ thread, "somebody else wrote there");
                    }
                }
            });
        }
    });
    let stats = lab.stats();
    assert_eq!((stats.active_requests.current, stats.active_bytes.current), (0, 0));
    assert_eq!(stats.cached_bytes, stats.allocated_bytes.current);
    lab.finish();
}
