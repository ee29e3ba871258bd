//! Stable pools, range observers, and memory that another device accesses, with every allocator that has them. Kernels
//! write contents and check them. At most 512 MiB of a device are used.

use std::sync::{Arc, Mutex};

use warpool::memory::pools::PoolOptions;
use warpool::memory::report::{RangeEvent, SnapshotOptions};
use warpool::memory::{
    Allocate, CachingAllocator, DeviceBlock, DriverPoolAllocator, MemPool, MemPoolId, PagedAllocator, Settings,
};
use warpool::{Device, Stream};

use super::helpers::{PLAIN, SharedAllocator, graph, reserved_bytes};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    segments_are_aligned_and_stay_where_they_are,
    observers_are_told_of_a_pool_that_comes_and_goes,
    kernels_access_memory_of_a_peer_with_every_allocator,
    graphs_copy_between_devices_with_every_allocator,
];

const MIB: u64 = 1 << 20;

/// The allocators that have stable pools.
fn with_pools(context: &TestContext) -> CheckResult<[SharedAllocator; 3]> {
    require(context.device().properties().virtual_memory, "the device has no virtual memory management")?;
    let (instance, expandable) = (context.instance(), Settings { expandable_segments: true, ..Settings::default() });
    Ok([
        Arc::new(CachingAllocator::new(instance, Settings::default())),
        Arc::new(CachingAllocator::new(instance, expandable)),
        Arc::new(PagedAllocator::new(instance, Settings::default())?),
    ])
}

/// Runs `body` with memory of another device by every allocator, of its default pool and of stable pools, allocated
/// before and after the device of the checks gets access to it.
fn with_each_far(context: &TestContext, body: impl Fn(&[DeviceBlock], &Stream) -> CheckResult) -> CheckResult {
    let (here, there) = (context.device_id, context.peer_device_id()?);
    let far_device = context.instance().device(there.0)?;
    let mut allocators: Vec<SharedAllocator> = with_pools(context)?.into();
    if far_device.properties().async_pools {
        allocators.push(Arc::new(DriverPoolAllocator::new(context.instance())));
    }
    for allocator in allocators {
        let (near_stream, far_stream) = (context.device().lease_stream()?, far_device.lease_stream()?);
        let outcome = far_blocks(context, &allocator, &far_device, &far_stream).and_then(|blocks| {
            far_stream.synchronize()?;
            body(&blocks, &near_stream)
        });
        // Work of a failed body must not use memory that is freed now.
        let synchronized = context.device().synchronize().and_then(|()| far_device.synchronize());
        // Of an allocator that was not enabled, it was not.
        let _ = context.driver.peer_disable(here, there);
        outcome?;
        synchronized?;
        allocator.trim(there, MemPoolId::DEFAULT)?;
    }
    Ok(())
}

fn far_blocks(
    context: &TestContext,
    allocator: &SharedAllocator,
    device: &Device,
    stream: &Stream,
) -> CheckResult<Vec<DeviceBlock>> {
    let pool = || MemPool::new(allocator, device, PoolOptions::stable());
    let mut pools = Vec::from_iter(pool().ok());
    let mut blocks = Vec::new();
    let allocate_all = |blocks: &mut Vec<DeviceBlock>, pools: &[MemPool]| -> CheckResult {
        blocks.push(allocator.allocate(3 * MIB, stream)?);
        for pool in pools {
            blocks.push(allocator.allocate_in(pool, 3 * MIB, stream)?);
            blocks.push(allocator.allocate_in(pool, 30 * MIB, stream)?);
        }
        Ok(())
    };
    allocate_all(&mut blocks, &pools)?;
    allocator.enable_peer_access(context.device_id, device.id())?;
    // One that begins with the peer.
    pools.extend(pool().ok());
    allocate_all(&mut blocks, &pools)?;
    Ok(blocks)
}

fn segments_are_aligned_and_stay_where_they_are(context: &TestContext) -> CheckResult {
    let properties = context.device().properties();
    let step = (2 * MIB).max(properties.granularity).max(properties.multicast_granularity);
    for allocator in with_pools(context)? {
        let stream = context.device().lease_stream()?;
        let pool = MemPool::new(&allocator, context.device(), PoolOptions::stable())?;
        let mut blocks = Vec::new();
        for (first, bytes) in (1..).zip([1000, 3 * MIB, 40 * MIB]) {
            let block = allocator.allocate_in(&pool, bytes, &stream)?;
            context.write_sequence(block.ptr(), block.bytes(), first * 1000, &stream)?;
            blocks.push(block);
        }
        let segments = || -> CheckResult<Vec<(u64, u64)>> {
            let all = allocator.snapshot(SnapshotOptions { pool: Some(pool.id()), traces: false })?.segments;
            Ok(all.iter().map(|segment| (segment.address, segment.total_size)).collect())
        };
        let before = segments()?;
        expect(
            before.iter().all(|(at, size)| at % step == 0 && size % step == 0),
            "addresses and sizes are multiples",
        )?;
        // Other memory comes and goes, in another stream too.
        let other = context.device().lease_stream()?;
        for round in 0..3 {
            let sizes = [5, 20, 60].map(|size| (size + 7 * round) * MIB);
            for (size, stream) in sizes.into_iter().zip([&stream, &other, &stream]) {
                let block = allocator.allocate(size, stream)?;
                context.write_sequence(block.ptr(), block.bytes(), 7, stream)?;
            }
            allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        }
        for (first, block) in (1..).zip(&blocks) {
            context.expect_sequence("a stable block", block.ptr(), block.bytes(), first * 1000, &stream)?;
        }
        drop(blocks);
        allocator.trim(context.device_id, pool.id())?;
        expect_eq("the segments of a pool in use", segments()?, before)?;
        context.device().synchronize()?;
        pool.close()?;
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("reserved bytes at the end", reserved_bytes(context, &allocator)?, 0)?;
    }
    Ok(())
}

fn observers_are_told_of_a_pool_that_comes_and_goes(context: &TestContext) -> CheckResult {
    for allocator in with_pools(context)? {
        let told: Arc<Mutex<Vec<(RangeEvent, u64)>>> = Arc::default();
        let tell = Arc::clone(&told);
        allocator.observers().attach_range_observer(Arc::new(move |change| {
            tell.lock().expect("no check panics in it").push((change.event, change.ptr.0));
        }));
        let stream = context.device().lease_stream()?;
        let pool = MemPool::new(&allocator, context.device(), PoolOptions::stable())?;
        let at = allocator.allocate_in(&pool, 40 * MIB, &stream)?.ptr().0;
        let again = allocator.allocate_in(&pool, 40 * MIB, &stream)?;
        expect_eq("the block that was freed", again.ptr().0, at)?;
        drop(again);
        stream.synchronize()?;
        pool.close()?;
        let told = told.lock().expect("as above").clone();
        expect_eq("what observers were told", told, vec![(RangeEvent::Mapped, at), (RangeEvent::Unmapping, at)])?;
    }
    Ok(())
}

fn kernels_access_memory_of_a_peer_with_every_allocator(context: &TestContext) -> CheckResult {
    with_each_far(context, |far, stream| {
        for (first, block) in (1..).zip(far) {
            context.write_sequence(block.ptr(), block.bytes(), first * 1000, stream)?;
            context.expect_sequence("memory of the peer", block.ptr(), block.bytes(), first * 1000, stream)?;
        }
        stream.synchronize()?;
        Ok(())
    })
}

fn graphs_copy_between_devices_with_every_allocator(context: &TestContext) -> CheckResult {
    let (here, there) = (context.device_id, context.peer_device_id()?);
    with_each_far(context, |far, stream| {
        let near: SharedAllocator = Arc::new(CachingAllocator::new(context.instance(), Settings::default()));
        let (source, back) = (near.allocate(3 * MIB, stream)?, near.allocate(3 * MIB, stream)?);
        let (from, to, bytes) = (source.ptr(), back.ptr(), source.bytes().min(3 * MIB));
        for (first, block) in (1..).zip(far) {
            let mut captured = graph(context, &near)?;
            captured.capture(stream, PLAIN, |capture| {
                let on = capture.stream().id();
                context.driver.copy_peer(block.ptr(), there, from, here, bytes, on)?;
                Ok(context.driver.copy_peer(to, here, block.ptr(), there, bytes, on)?)
            })?;
            for replay in 0..2 {
                context.write_sequence(from, bytes, first * 1000 + replay, stream)?;
                captured.replay(stream)?;
                context.expect_sequence("what came back", to, bytes, first * 1000 + replay, stream)?;
            }
            stream.synchronize()?;
            drop(captured);
        }
        drop((source, back));
        near.trim(here, MemPoolId::DEFAULT)?;
        Ok(())
    })
}
