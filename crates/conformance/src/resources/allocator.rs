//! Device allocators: reuse, stream fences, expandable segments, pools, captures, limits. Kernels write and compare the
//! contents of blocks. Checks of the caching allocator run with native and with expandable segments. At most 2 GiB of
//! the device are used.

use std::sync::Arc;

use warpool::memory::pools::{PoolOptions, Route};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{SegmentInfo, SnapshotOptions};
use warpool::memory::{
    Allocate, CachingAllocator, DeviceBlock, DriverPoolAllocator, MemPool, MemPoolId, OomCause, OomReport, Settings,
};
use warpool::{Error, Stream};
use warpool_driver::{CaptureMode, CaptureState, InstantiateOptions, NodeKind};

use super::helpers::{SharedAllocator, expect_wait_for_recorded_stream};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, require};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    freed_block_is_reused_at_once_on_its_stream,
    freed_block_waits_for_recorded_streams,
    expandable_segment_grows_and_shrinks,
    private_pool_does_not_share_memory,
    capture_allocates_from_the_graph_pool,
    memory_limit_releases_cached_memory_first,
    oversized_request_is_out_of_memory,
    threads_allocate_concurrently,
    statistics_match_snapshots,
    driver_pool_allocates_in_stream_order,
    driver_pool_waits_for_recorded_streams,
    driver_pool_has_a_memory_limit,
    driver_pool_blocks_become_graph_nodes,
];

const MIB: u64 = 1 << 20;

/// How much of a large block is written and compared.
const SAMPLE: u64 = 4 * MIB;

/// Runs `body` on the caching allocator with native and with expandable segments.
fn on_caching(context: &TestContext, body: impl Fn(&SharedAllocator) -> CheckResult) -> CheckResult {
    on_allocator(context, "native", Arc::new(CachingAllocator::new(context.instance(), Settings::default())), &body)?;
    if context.device().properties().virtual_memory {
        on_allocator(context, "expandable", expandable(context), &body)?;
    }
    Ok(())
}

/// Runs `body` on an allocator over the driver's pools. Skips the check where there are none.
fn on_driver_pool(context: &TestContext, body: impl Fn(&SharedAllocator) -> CheckResult) -> CheckResult {
    require(context.device().properties().async_pools, "the device has no stream-ordered pools")?;
    on_allocator(context, "driver-pool", Arc::new(DriverPoolAllocator::new(context.instance())), body)
}

fn expandable(context: &TestContext) -> SharedAllocator {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    Arc::new(CachingAllocator::new(context.instance(), settings))
}

/// Runs `body`, and then expects that all memory can be returned to the driver.
fn on_allocator(
    context: &TestContext,
    name: &str,
    allocator: SharedAllocator,
    body: impl Fn(&SharedAllocator) -> CheckResult,
) -> CheckResult {
    let outcome = body(&allocator).and_then(|()| {
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        let stats = allocator.stats(context.device_id)?;
        let left = (stats.active.all.current, stats.reserved_bytes.all.current);
        expect_eq("active blocks and reserved bytes at the end", left, (0, 0))
    });
    outcome.map_err(|stop| match stop {
        CheckError::Failed(text) => CheckError::Failed(format!("{name}: {text}")),
        other => other,
    })
}

fn request(context: &TestContext, bytes: u64, stream: &Stream) -> Request {
    Request::new(context.device_id, stream.id(), bytes)
}

fn freed_block_is_reused_at_once_on_its_stream(context: &TestContext) -> CheckResult {
    on_caching(context, |allocator| {
        let stream = context.device().lease_stream()?;
        for bytes in [4096, 3 * MIB, 14 * MIB] {
            let mut addresses = Vec::new();
            for round in 0..4 {
                let block = allocator.allocate(bytes, &stream)?;
                context.write_sequence(block.ptr(), bytes, 1000 * round, &stream)?;
                if round == 3 {
                    context.expect_sequence("the last of four blocks", block.ptr(), bytes, 1000 * round, &stream)?;
                }
                addresses.push(block.ptr());
                block.free()?;
            }
            addresses.dedup();
            expect_eq("addresses of four successive blocks", addresses.len(), 1)?;
        }
        Ok(())
    })
}

fn freed_block_waits_for_recorded_streams(context: &TestContext) -> CheckResult {
    on_caching(context, |allocator| expect_wait_for_recorded_stream(context, allocator))
}

fn expandable_segment_grows_and_shrinks(context: &TestContext) -> CheckResult {
    require(context.device().properties().virtual_memory, "the device has no virtual memory")?;
    on_allocator(context, "expandable", expandable(context), |allocator| {
        let stream = context.device().lease_stream()?;
        let reserved = || Ok::<_, Error>(allocator.stats(context.device_id)?.reserved_bytes.all.current);
        // Each follows the one before, across the boundaries of the mapped chunks.
        let blocks = [21, 42, 6].map(|mib| allocator.allocate(mib * MIB, &stream));
        let [first, middle, last] = blocks.map(|block| block.map_err(CheckError::from));
        let (first, middle, last) = (first?, middle?, last?);
        expect_eq("the address of the second block", middle.ptr(), first.ptr().offset(first.bytes_usable()))?;
        expect_eq("the address of the third block", last.ptr(), middle.ptr().offset(middle.bytes_usable()))?;
        for (value, block) in [(1, &first), (2, &middle), (3, &last)] {
            context.write_sequence(block.ptr(), block.bytes(), value << 28, &stream)?;
        }
        for (value, block) in [(1, &first), (2, &middle), (3, &last)] {
            context.expect_sequence(
                "a block of the grown segment",
                block.ptr(),
                block.bytes(),
                value << 28,
                &stream,
            )?;
        }

        let before = reserved()?;
        middle.free()?;
        let trimmed = allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect(trimmed >= 20 * MIB, &format!("part of the 42 MiB is released, got {trimmed}"))?;
        expect_eq("reserved bytes", reserved()?, before - trimmed)?;
        context.expect_sequence(
            "the block before the unmapped chunks",
            first.ptr(),
            first.bytes(),
            1 << 28,
            &stream,
        )?;
        context.expect_sequence("the block after the unmapped chunks", last.ptr(), last.bytes(), 3 << 28, &stream)?;

        let again = allocator.allocate(42 * MIB, &stream)?;
        context.write_sequence(again.ptr(), again.bytes(), 4 << 28, &stream)?;
        for (value, block) in [(1, &first), (4, &again), (3, &last)] {
            context.expect_sequence(
                "a block after the chunks were mapped again",
                block.ptr(),
                block.bytes(),
                value << 28,
                &stream,
            )?;
        }
        Ok(())
    })
}

fn private_pool_does_not_share_memory(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 2 * MIB;
    on_caching(context, |allocator| {
        let stream = context.device().lease_stream()?;
        let reserved_by =
            |pool| Ok::<_, Error>(segments(allocator, Some(pool))?.iter().map(|segment| segment.total_size).sum());
        let pool = MemPool::new(allocator, context.device(), PoolOptions::default())?;
        let routed = {
            let _scope = pool.enter()?;
            allocator.allocate(BYTES, &stream)?
        };
        let open = allocator.allocate(BYTES, &stream)?;
        expect(
            reserved_by(pool.id())? >= BYTES && reserved_by(MemPoolId::DEFAULT)? >= BYTES,
            "both pools have memory",
        )?;
        context.write_sequence(routed.ptr(), BYTES, 1, &stream)?;
        context.write_sequence(open.ptr(), BYTES, 2, &stream)?;

        let address = routed.ptr();
        routed.free()?;
        let other = allocator.allocate(BYTES, &stream)?;
        expect(other.ptr() != address, "the default pool does not use memory of the private pool")?;
        context.write_sequence(other.ptr(), BYTES, 3, &stream)?;
        let back = allocator.allocate_in(&pool, BYTES, &stream)?;
        expect_eq("the next block of the private pool", back.ptr(), address)?;
        context.expect_sequence("the memory that was free in the private pool", back.ptr(), BYTES, 1, &stream)?;

        // A block may outlive its pool.
        let id = pool.id();
        drop(pool);
        context.write_sequence(back.ptr(), BYTES, 4, &stream)?;
        context.expect_sequence("a block of a dropped pool", back.ptr(), BYTES, 4, &stream)?;
        back.free()?;
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("reserved bytes of the dropped pool", reserved_by(id)?, 0)?;
        context.expect_sequence("the block of the default pool", open.ptr(), BYTES, 2, &stream)
    })
}

fn capture_allocates_from_the_graph_pool(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 2 * MIB;
    on_caching(context, |allocator| {
        let (driver, device) = (&context.driver, context.device_id);
        let (stream, pools) = (context.device().lease_stream()?, allocator.pools()?);
        let result = allocator.allocate(BYTES, &stream)?;
        let pool = pools.create_graph_pool(device)?;
        pools.begin_routing(device, pool, Route::Stream(stream.id()))?;
        pools.capture_began(device)?;
        driver.capture_begin(stream.id(), CaptureMode::Global)?;
        expect(matches!(stream.capture_state()?, CaptureState::Active(_)), "the stream captures")?;
        let captured = (|| -> CheckResult<DeviceBlock> {
            let scratch = allocator.allocate(BYTES, &stream)?;
            context.write_sequence(scratch.ptr(), BYTES, 5, &stream)?;
            scratch.free()?;
            // The same address again: the order of the graph protects it.
            let block = allocator.allocate(BYTES, &stream)?;
            context.write_sequence(block.ptr(), BYTES, 6, &stream)?;
            driver.copy(result.ptr().into(), block.ptr().into(), BYTES, stream.id())?;
            Ok(block)
        })();
        let graph = driver.capture_end(stream.id());
        pools.capture_ended(device)?;
        pools.end_routing(device, pool)?;
        let (block, graph) = (captured?, graph?);
        let snapshot_segments = segments(allocator, Some(pool))?;
        let contains_block = |segment: &&SegmentInfo| segment.blocks.iter().any(|each| each.address == block.ptr().0);
        expect_eq(
            "segments of the graph pool that contain its block",
            snapshot_segments.iter().filter(contains_block).count(),
            1,
        )?;

        let exec = driver.graph_instantiate(graph, InstantiateOptions::default())?;
        for value in [100, 200] {
            // Blocks allocated between launches must not overlap the memory of the graph.
            let others = (0..6).map(|_| allocator.allocate(BYTES, &stream)).collect::<warpool::Result<Vec<_>>>()?;
            for other in &others {
                expect(other.ptr() != block.ptr(), "the block is not memory of the graph")?;
                context.write_sequence(other.ptr(), BYTES, value, &stream)?;
            }
            context.write_sequence(result.ptr(), BYTES, value, &stream)?;
            context.launch_graph(exec, stream.id())?;
            context.expect_sequence("the block of the graph", block.ptr(), BYTES, 6, &stream)?;
            context.expect_sequence("the result of the graph", result.ptr(), BYTES, 6, &stream)?;
            for other in &others {
                context.expect_sequence("a block outside the graph", other.ptr(), BYTES, value, &stream)?;
            }
        }
        driver.graph_exec_destroy(exec)?;
        driver.graph_destroy(graph)?;
        block.free()?;
        Ok(pools.release_pool(device, pool)?)
    })
}

fn memory_limit_releases_cached_memory_first(context: &TestContext) -> CheckResult {
    on_caching(context, |allocator| {
        let stream = context.device().lease_stream()?;
        let limit = limit_to(context, allocator, 256 * MIB)?;
        let small = (0..4).map(|_| allocator.allocate(48 * MIB, &stream)).collect::<warpool::Result<Vec<_>>>()?;
        small.into_iter().try_for_each(DeviceBlock::free)?;
        // 192 MiB are cached, in blocks that are too small.
        let large = allocator.allocate(200 * MIB, &stream)?;
        context.write_sequence(large.ptr(), SAMPLE, 1, &stream)?;
        let stats = allocator.stats(context.device_id)?;
        expect(stats.reserved_bytes.all.current <= limit, "reserved bytes are within the limit")?;
        expect_eq("out-of-memory errors so far", stats.num_ooms, 0)?;

        let report = expect_out_of_memory(context, allocator, 100 * MIB, &stream)?;
        expect_eq("the cause of the error", report.cause, OomCause::Limit)?;
        expect_report(&report, 100 * MIB, large.bytes_usable(), Some(limit))?;
        expect_eq("out-of-memory errors", allocator.stats(context.device_id)?.num_ooms, 1)?;

        let fits = allocator.allocate(20 * MIB, &stream)?;
        context.write_sequence(fits.ptr(), SAMPLE, 2, &stream)?;
        context.expect_sequence("the large block", large.ptr(), SAMPLE, 1, &stream)?;
        context.expect_sequence("a block within the limit", fits.ptr(), SAMPLE, 2, &stream)?;
        large.free()?;
        allocator.set_memory_fraction(context.device_id, 1.0)?;
        allocator.allocate(300 * MIB, &stream)?.free()?;
        Ok(())
    })
}

fn oversized_request_is_out_of_memory(context: &TestContext) -> CheckResult {
    let body = |allocator: &SharedAllocator| {
        let stream = context.device().lease_stream()?;
        let cached = allocator.allocate(64 * MIB, &stream)?;
        cached.free()?;
        let total = context.device().properties().bytes_total;
        let report = expect_out_of_memory(context, allocator, 2 * total, &stream)?;
        expect_eq("the cause of the error", report.cause, OomCause::Device)?;
        expect_report(&report, 2 * total, 0, None)?;
        expect_eq("reserved bytes: cached memory was released", report.bytes_reserved, 0)?;
        let block = allocator.allocate(64 * MIB, &stream)?;
        context.write_sequence(block.ptr(), SAMPLE, 3, &stream)?;
        context.expect_sequence("a block after the error", block.ptr(), SAMPLE, 3, &stream)
    };
    on_caching(context, body)?;
    if context.device().properties().async_pools { on_driver_pool(context, body) } else { Ok(()) }
}

fn threads_allocate_concurrently(context: &TestContext) -> CheckResult {
    let body = |allocator: &SharedAllocator| {
        let work = |thread: u32| -> CheckResult {
            let stream = context.device().lease_stream()?;
            for round in 0..40 {
                let bytes = u64::from(1 + (thread * 7 + round * 13) % 40) * 20_000;
                let block = allocator.allocate(bytes, &stream)?;
                let first = (thread << 20) + round;
                context.write_sequence(block.ptr(), bytes, first, &stream)?;
                if round % 8 == 7 {
                    context.expect_sequence("a block of one thread of four", block.ptr(), bytes, first, &stream)?;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().map(join).collect::<CheckResult<Vec<()>>>()
        })?;
        Ok(())
    };
    on_caching(context, body)?;
    if context.device().properties().async_pools { on_driver_pool(context, body) } else { Ok(()) }
}

fn statistics_match_snapshots(context: &TestContext) -> CheckResult {
    let body = |allocator: &SharedAllocator| {
        let streams = [context.device().lease_stream()?, context.device().lease_stream()?];
        let mut live: Vec<Allocation> = Vec::new();
        for step in 0..120_u64 {
            let stream = &streams[(step % 3 == 0) as usize];
            // Sizes of every order of magnitude up to 4 MiB.
            live.push(allocator.allocate_raw(request(context, 1 + ((step * 7919) << (step % 10)), stream))?);
            if step % 5 == 0 {
                allocator.record_use(live[0], streams[1].id())?;
            }
            if step % 2 == 1 {
                allocator.free(live.swap_remove((step * 31) as usize % live.len()))?;
            }
            if step % 20 == 19 {
                expect_agreement(context, allocator, &live)?;
            }
        }
        live.drain(..).try_for_each(|allocation| allocator.free(allocation))?;
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_agreement(context, allocator, &live)?;
        let stats = allocator.stats(context.device_id)?;
        let peak = stats.allocated_bytes.all.peak;
        expect(peak > 0 && stats.reserved_bytes.all.peak >= peak, "peaks include the largest use")?;
        let allocation = stats.allocation.all;
        expect_eq("blocks allocated and freed", (allocation.allocated, allocation.freed), (120, 120))
    };
    on_caching(context, body)?;
    if context.device().properties().async_pools { on_driver_pool(context, body) } else { Ok(()) }
}

fn driver_pool_allocates_in_stream_order(context: &TestContext) -> CheckResult {
    on_driver_pool(context, |allocator| {
        let stream = context.device().lease_stream()?;
        for round in 0..8 {
            let blocks = [4096, 3 * MIB, 14 * MIB].map(|bytes| allocator.allocate(bytes, &stream));
            for block in blocks {
                let block = block?;
                context.write_sequence(block.ptr(), block.bytes(), round, &stream)?;
                if round % 4 == 3 {
                    context.expect_sequence(
                        "a block of the driver's pool",
                        block.ptr(),
                        block.bytes(),
                        round,
                        &stream,
                    )?;
                }
            }
        }
        stream.synchronize()?;
        let reserved = allocator.stats(context.device_id)?.reserved_bytes.all.current;
        expect(reserved >= 14 * MIB, &format!("the pool keeps freed memory; it reserves {reserved} bytes"))?;
        let trimmed = allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("bytes released by a trim", trimmed, reserved)
    })
}

fn driver_pool_waits_for_recorded_streams(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 8 * MIB;
    on_driver_pool(context, |allocator| {
        let (own, other) = (context.device().lease_stream()?, context.device().lease_stream()?);
        let result = allocator.allocate(BYTES, &own)?;
        let block = allocator.allocate(BYTES, &own)?;
        other.wait_stream(&own)?;
        context.keep_stream_busy(&other)?;
        context.write_sequence(block.ptr(), BYTES, 7, &other)?;
        context.driver.copy(result.ptr().into(), block.ptr().into(), BYTES, other.id())?;
        block.record_use(&other)?;
        result.record_use(&other)?;
        block.free()?;
        // The driver must not return memory that the other stream still uses.
        for value in 0..8 {
            let next = allocator.allocate(BYTES, &own)?;
            context.write_sequence(next.ptr(), BYTES, 100 + value, &own)?;
            next.free()?;
        }
        own.wait_stream(&other)?;
        context.expect_sequence("the memory copied by the other stream", result.ptr(), BYTES, 7, &own)
    })
}

fn driver_pool_has_a_memory_limit(context: &TestContext) -> CheckResult {
    on_driver_pool(context, |allocator| {
        let stream = context.device().lease_stream()?;
        let limit = limit_to(context, allocator, 256 * MIB)?;
        let large = allocator.allocate(200 * MIB, &stream)?;
        let report = expect_out_of_memory(context, allocator, 100 * MIB, &stream)?;
        expect_eq("the cause of the error", report.cause, OomCause::Limit)?;
        expect_report(&report, 100 * MIB, large.bytes_usable(), Some(limit))?;
        large.free()?;
        let fits = allocator.allocate(100 * MIB, &stream)?;
        context.write_sequence(fits.ptr(), SAMPLE, 2, &stream)?;
        context.expect_sequence("a block within the limit", fits.ptr(), SAMPLE, 2, &stream)
    })
}

fn driver_pool_blocks_become_graph_nodes(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 2 * MIB;
    on_driver_pool(context, |allocator| {
        let driver = &context.driver;
        let stream = context.device().lease_stream()?;
        let (result, before) = (allocator.allocate(BYTES, &stream)?, allocator.allocate(BYTES, &stream)?);
        stream.synchronize()?;
        driver.capture_begin(stream.id(), CaptureMode::Global)?;
        let captured = (|| -> CheckResult {
            let block = allocator.allocate(BYTES, &stream)?;
            context.write_sequence(block.ptr(), BYTES, 6, &stream)?;
            driver.copy(result.ptr().into(), block.ptr().into(), BYTES, stream.id())?;
            block.free()?;
            // Not allocated in the capture: its free is deferred until the capture ends.
            before.free()?;
            expect_eq("active blocks", allocator.stats(context.device_id)?.active.all.current, 2)
        })();
        let graph = driver.capture_end(stream.id());
        captured?;
        let graph = graph?;
        let kinds: Vec<NodeKind> = driver.graph_topology(graph)?.nodes.iter().map(|node| node.kind).collect();
        let want = vec![NodeKind::MemAlloc, NodeKind::Kernel, NodeKind::Copy, NodeKind::MemFree];
        expect_eq("the kinds of nodes", kinds, want)?;
        let exec = driver.graph_instantiate(graph, InstantiateOptions::default())?;
        for value in [100, 200] {
            context.write_sequence(result.ptr(), BYTES, value, &stream)?;
            context.launch_graph(exec, stream.id())?;
            context.expect_sequence("the result of the graph", result.ptr(), BYTES, 6, &stream)?;
        }
        driver.graph_exec_destroy(exec)?;
        Ok(driver.graph_destroy(graph)?)
    })
}

/// Limits an allocator to about `bytes` and returns the exact limit.
fn limit_to(context: &TestContext, allocator: &SharedAllocator, bytes: u64) -> CheckResult<u64> {
    let total = context.device().properties().bytes_total as f64;
    let fraction = bytes as f64 / total;
    allocator.set_memory_fraction(context.device_id, fraction)?;
    Ok((total * fraction).round() as u64)
}

/// Expects that a request fails as out of memory, and returns the report.
#[track_caller]
fn expect_out_of_memory(
    context: &TestContext,
    allocator: &SharedAllocator,
    bytes: u64,
    stream: &Stream,
) -> CheckResult<Box<OomReport>> {
    match allocator.allocate_raw(request(context, bytes, stream)) {
        Err(Error::OutOfMemory(report)) => Ok(report),
        Err(other) => Err(other.into()),
        Ok(allocation) => {
            Err(CheckError::Failed(format!("expected that {bytes} bytes are out of memory, got {allocation:?}")))
        }
    }
}

#[track_caller]
fn expect_report(report: &OomReport, requested: u64, allocated: u64, limit: Option<u64>) -> CheckResult {
    expect_eq("requested bytes of the report", report.bytes_requested, requested)?;
    expect_eq("allocated bytes of the report", report.bytes_allocated, allocated)?;
    expect_eq("the limit", report.bytes_limit, limit)?;
    expect(report.bytes_free <= report.bytes_total, "free memory is at most total memory")?;
    expect(report.to_string().starts_with("CUDA out of memory. Tried to allocate"), "the message starts as PyTorch's")
}

fn segments(allocator: &SharedAllocator, pool: Option<MemPoolId>) -> warpool::Result<Vec<SegmentInfo>> {
    Ok(allocator.snapshot(SnapshotOptions { pool, traces: false })?.segments)
}

/// Statistics, snapshot and the live allocations must agree.
#[track_caller]
fn expect_agreement(context: &TestContext, allocator: &SharedAllocator, live: &[Allocation]) -> CheckResult {
    let stats = allocator.stats(context.device_id)?;
    let snapshot_segments = segments(allocator, None)?;
    let sum = |field: fn(&SegmentInfo) -> u64| snapshot_segments.iter().map(field).sum::<u64>();
    expect_eq("allocated blocks", stats.allocation.all.current, live.len() as u64)?;
    let bytes: u64 = live.iter().map(|allocation| allocation.bytes).sum();
    expect_eq("allocated bytes", stats.allocated_bytes.all.current, bytes)?;
    expect_eq(
        "allocated bytes of the snapshot",
        sum(|segment| segment.allocated_size),
        stats.allocated_bytes.all.current,
    )?;
    expect_eq("active bytes of the snapshot", sum(|segment| segment.active_size), stats.active_bytes.all.current)?;
    expect_eq(
        "requested bytes of the snapshot",
        sum(|segment| segment.requested_size),
        stats.requested_bytes.all.current,
    )?;
    expect_eq("reserved bytes of the snapshot", sum(|segment| segment.total_size), stats.reserved_bytes.all.current)
}
