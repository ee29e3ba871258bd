//! A block that is freed and allocated again at once. Two allocators run the same random program: in one, every step is
//! followed by a read of the statistics, which carries out each free; in the other, only a few steps are. Addresses and
//! statistics are the same.

use crate::common::memory::{FIRST, GIB, KIB, MIB, TestContext};
use crate::common::rng::Rng;
use warpool::Error;
use warpool::driver::{DevicePtr, StreamId};
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{BlockState, SegmentInfo};
use warpool::memory::{DeviceAllocator, MemPoolId};

#[test]
fn repeated_pairs_leave_addresses_and_statistics_as_they_are() {
    for settings in ["", "expandable_segments:True", "max_split_size_mb:20", "free_block_order:address"] {
        for seed in 0..10 {
            println!("settings {settings:?}, seed {seed}");
            compare(settings, seed);
        }
    }
}

/// One of the two allocators.
struct Side {
    context: TestContext,
    streams: [StreamId; 2],
    pool: MemPoolId,
    live: Vec<Allocation>,
}

impl Side {
    fn new(settings: &str) -> Self {
        let context = TestContext::with_capacity(2 * GIB, settings);
        let streams = [context.main.id(), context.side_stream().id()];
        let pool = context.pools().create_pool(FIRST, PoolOptions::default()).unwrap();
        Self { context, streams, pool, live: Vec::new() }
    }

    fn allocate(&self, bytes: u64, stream: usize, private: bool) -> Allocation {
        let request = Request::new(FIRST, self.streams[stream], bytes);
        let request = if private { request.in_pool(self.pool) } else { request };
        self.context.allocator.allocate_raw(request).unwrap()
    }

    fn free(&self, allocation: Allocation, by_address: bool) {
        match by_address {
            true => assert!(self.context.allocator.free_cached(FIRST, allocation.ptr)),
            false => self.context.allocator.free(allocation).unwrap(),
        }
    }
}

fn compare(settings: &str, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut sides = [Side::new(settings), Side::new(settings)];
    for step in 0..400 {
        let draw = rng.below(10);
        let bytes = match rng.below(3) {
            0 => 1 + rng.u64_below(64 * KIB),
            1 => 512 * (1 + rng.u64_below(8)),
            _ => 1 + rng.u64_below(30 * MIB),
        };
        let (stream, private, by_address) = (rng.below(2), rng.below(8) == 0, rng.below(2) == 0);
        let (pairs, chosen, kept) = (rng.below(5), rng.below(64), rng.below(2) == 0);
        let mut seen: [Vec<DevicePtr>; 2] = Default::default();
        for (number, (side, seen)) in sides.iter_mut().zip(&mut seen).enumerate() {
            let read = |side: &Side| {
                if number == 0 {
                    side.context.stats();
                }
            };
            match draw {
                // The same request repeatedly; the last block is kept or freed.
                0..6 => {
                    for _ in 0..pairs {
                        let allocation = side.allocate(bytes, stream, private);
                        read(side);
                        seen.push(allocation.ptr);
                        side.free(allocation, by_address);
                        read(side);
                    }
                    if kept {
                        side.live.push(side.allocate(bytes, stream, private));
                    }
                }
                6..8 if !side.live.is_empty() => {
                    let freed = side.live.swap_remove(chosen % side.live.len());
                    side.free(freed, by_address);
                }
                8 if !side.live.is_empty() => {
                    let used = side.live[chosen % side.live.len()];
                    side.context.allocator.record_use(used, side.streams[1 - stream]).unwrap();
                }
                9 if pairs == 0 => side.context.allocator.reset_peak_stats(FIRST).unwrap(),
                9 if pairs == 1 => side.context.allocator.reset_accumulated_stats(FIRST).unwrap(),
                9 if pairs == 2 => drop(side.context.trim()),
                _ => {}
            }
            read(side);
            seen.extend(side.live.iter().map(|allocation| allocation.ptr));
        }
        assert_eq!(seen[0], seen[1], "addresses in step {step}");
        if step % 16 == 0 {
            let [often, seldom] = [&sides[0], &sides[1]].map(|side| {
                side.context.allocator.check();
                side.context.stats()
            });
            assert_eq!(often, seldom, "statistics in step {step}");
        }
    }
    let [often, seldom] = sides.map(|side| {
        side.context.free_all(side.live);
        (side.context.stats(), segments(&side.context))
    });
    assert_eq!(often, seldom);
}

/// The segments, without what free blocks say of the last request there: merges that are not carried out leave it.
fn segments(context: &TestContext) -> Vec<SegmentInfo> {
    let mut segments = context.segments();
    let blocks = segments.iter_mut().flat_map(|segment| &mut segment.blocks);
    blocks.filter(|block| block.state == BlockState::Inactive).for_each(|block| block.requested_size = 0);
    segments
}

/// A freed block is not found any more, and cannot be freed twice; nor can an earlier allocation of the same block.
#[test]
fn a_freed_block_is_gone_though_the_next_request_gets_it() {
    let context = TestContext::new("");
    let kept = context.alloc(KIB);
    let allocate = || context.allocator.allocate_raw(Request::new(FIRST, context.main.id(), 3 * KIB)).unwrap();
    let first = allocate();
    context.allocator.free(first).unwrap();
    let second = allocate();
    assert_eq!((first.ptr, first.bytes), (second.ptr, second.bytes));
    assert!(matches!(context.allocator.free(first), Err(Error::UnknownPointer { .. })), "an earlier one");
    assert_eq!(context.allocator.find(second.ptr).unwrap(), second);
    let mut last = second;
    for _ in 0..3 {
        context.allocator.free(last).unwrap();
        last = allocate();
    }
    assert_eq!(context.allocator.find(last.ptr).unwrap(), last);
    context.allocator.free(last).unwrap();
    assert!(matches!(context.allocator.free(last), Err(Error::UnknownPointer { .. })), "twice");
    let last = allocate();
    context.allocator.free_raw(last.ptr).unwrap();
    assert!(!context.allocator.free_cached(FIRST, last.ptr), "twice, by its address");
    assert!(matches!(context.allocator.free_raw(last.ptr), Err(Error::UnknownPointer { .. })));
    // A request of another size gets the memory of the freed block.
    let larger = context.alloc(64 * KIB);
    assert_eq!(larger.ptr, last.ptr);
    let stats = context.stats();
    assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (8, 6));
    context.free_all([kept, larger]);
    context.finish();
}

/// The block waits for a stream that used it between its allocation and its free.
#[test]
fn a_use_on_another_stream_defers_the_reuse() {
    let context = TestContext::new("");
    let side = context.side_stream();
    let allocate = || context.allocator.allocate_raw(Request::new(FIRST, context.main.id(), 3 * KIB)).unwrap();
    let first = allocate();
    context.allocator.free(first).unwrap();
    let first = allocate();
    context.pause_stream(&side);
    context.fill(first, 7, &side);
    context.record_use(first, &side);
    context.allocator.free(first).unwrap();
    let second = allocate();
    assert_ne!(first.ptr, second.ptr, "the other stream still uses it");
    context.resume_stream(&side);
    context.free(second);
    context.finish();
}
