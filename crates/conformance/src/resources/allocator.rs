//! Allocators of device memory: reuse, waiting, growth, pools, captures, limits. Contents are written and counted by
//! kernels. Where it makes sense a check runs on the caching allocator in both of its forms. No more than 2 GiB of a
//! device are used.

use std::sync::Arc;

use warpool::memory::{
    Allocate, Allocation, CachingAllocator, DeviceAllocator, DeviceBlock, DriverPoolAllocator, MemPool, MemPoolId,
    OomCause, OomReport, PoolOptions, Request, Route, SegmentInfo, Settings, SnapshotOptions,
};
use warpool::{Error, Stream};
use warpool_driver::{CaptureMode, CaptureState, InstantiateOptions, NodeKind};

use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, require};

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

/// How much of a block is looked at where its size is what matters.
const SAMPLE: u64 = 4 * MIB;

type Shared = Arc<dyn DeviceAllocator>;

/// Runs `body` on the caching allocator in both of its forms.
fn on_caching(context: &TestContext, body: impl Fn(&Shared) -> CheckResult) -> CheckResult {
    on(context, "native", Arc::new(CachingAllocator::new(context.instance(), Settings::default())), &body)?;
    if context.device().properties().virtual_memory {
        on(context, "expandable", expandable(context), &body)?;
    }
    Ok(())
}

/// Runs `body` on the driver's pools, or skips.
fn on_driver_pool(context: &TestContext, body: impl Fn(&Shared) -> CheckResult) -> CheckResult {
    require(context.device().properties().async_pools, "the device has no stream-ordered pools")?;
    on(context, "driver-pool", Arc::new(DriverPoolAllocator::new(context.instance())), body)
}

fn expandable(context: &TestContext) -> Shared {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    Arc::new(CachingAllocator::new(context.instance(), settings))
}

/// Runs `body`, and then expects everything to go back to the driver.
fn on(context: &TestContext, name: &str, allocator: Shared, body: impl Fn(&Shared) -> CheckResult) -> CheckResult {
    let outcome = body(&allocator).and_then(|()| {
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        let stats = allocator.stats(context.device_id)?;
        let left = (stats.active.all.current, stats.reserved_bytes.all.current);
        expect_eq("active blocks and bytes held in the end", left, (0, 0))
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
            let mut places = Vec::new();
            for round in 0..4 {
                let block = allocator.allocate(bytes, &stream)?;
                context.write_sequence(block.ptr(), bytes, 1000 * round, &stream)?;
                if round == 3 {
                    context.expect_sequence("the last of four owners", block.ptr(), bytes, 1000 * round, &stream)?;
                }
                places.push(block.ptr());
                block.free()?;
            }
            places.dedup();
            expect_eq("different places of four blocks in turn", places.len(), 1)?;
        }
        Ok(())
    })
}

fn freed_block_waits_for_recorded_streams(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 8 * MIB;
    on_caching(context, |allocator| {
        let (own, other) = (context.device().lease_stream()?, context.device().lease_stream()?);
        let (first, result) = (allocator.allocate(BYTES, &own)?, allocator.allocate(BYTES, &other)?);
        other.wait_stream(&own)?;
        context.keep_stream_busy(&other)?;
        context.write_sequence(first.ptr(), BYTES, 7, &other)?;
        context.driver.copy(result.ptr().into(), first.ptr().into(), BYTES, other.id())?;
        first.record_use(&other)?;
        let place = first.ptr();
        first.free()?;

        let second = allocator.allocate(BYTES, &own)?;
        expect(second.ptr() != place, "another place while the other stream works")?;
        context.write_sequence(second.ptr(), BYTES, 9, &own)?;
        context.expect_sequence("the second block", second.ptr(), BYTES, 9, &own)?;
        expect(!other.query()?, "the other stream still at work")?;

        other.synchronize()?;
        context.expect_sequence("what the other stream wrote", result.ptr(), BYTES, 7, &other)?;
        let third = allocator.allocate(BYTES, &own)?;
        expect_eq("the place once the other stream is done", third.ptr(), place)?;
        context.write_sequence(third.ptr(), BYTES, 11, &own)?;
        context.expect_sequence("the third block", third.ptr(), BYTES, 11, &own)?;
        context.expect_sequence("the second block, untouched", second.ptr(), BYTES, 9, &own)
    })
}

fn expandable_segment_grows_and_shrinks(context: &TestContext) -> CheckResult {
    require(context.device().properties().virtual_memory, "the device has no virtual memory")?;
    on(context, "expandable", expandable(context), |allocator| {
        let stream = context.device().lease_stream()?;
        let held = || Ok::<_, Error>(allocator.stats(context.device_id)?.reserved_bytes.all.current);
        // Each stands right behind the one before, across the borders of what was mapped at once.
        let blocks = [21, 42, 6].map(|mib| allocator.allocate(mib * MIB, &stream));
        let [first, middle, last] = blocks.map(|block| block.map_err(CheckError::from));
        let (first, middle, last) = (first?, middle?, last?);
        expect_eq("where the second block is", middle.ptr(), first.ptr().offset(first.bytes_usable()))?;
        expect_eq("where the third block is", last.ptr(), middle.ptr().offset(middle.bytes_usable()))?;
        for (value, block) in [(1, &first), (2, &middle), (3, &last)] {
            context.write_sequence(block.ptr(), block.bytes(), value << 28, &stream)?;
        }
        for (value, block) in [(1, &first), (2, &middle), (3, &last)] {
            context.expect_sequence("a block that grew", block.ptr(), block.bytes(), value << 28, &stream)?;
        }

        let before = held()?;
        middle.free()?;
        let trimmed = allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect(trimmed >= 20 * MIB, &format!("some of 42 MiB to be given back, got {trimmed}"))?;
        expect_eq("what is held", held()?, before - trimmed)?;
        context.expect_sequence("what is before the hole", first.ptr(), first.bytes(), 1 << 28, &stream)?;
        context.expect_sequence("what is behind the hole", last.ptr(), last.bytes(), 3 << 28, &stream)?;

        let again = allocator.allocate(42 * MIB, &stream)?;
        context.write_sequence(again.ptr(), again.bytes(), 4 << 28, &stream)?;
        for (value, block) in [(1, &first), (4, &again), (3, &last)] {
            context.expect_sequence(
                "a block after the hole was filled",
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
        let held_by = |pool| Ok::<_, Error>(segments(allocator, Some(pool))?.iter().map(|it| it.total_size).sum());
        let pool = MemPool::new(allocator, context.device(), PoolOptions::default())?;
        let routed = {
            let _scope = pool.enter()?;
            allocator.allocate(BYTES, &stream)?
        };
        let open = allocator.allocate(BYTES, &stream)?;
        expect(held_by(pool.id())? >= BYTES && held_by(MemPoolId::DEFAULT)? >= BYTES, "memory in both pools")?;
        context.write_sequence(routed.ptr(), BYTES, 1, &stream)?;
        context.write_sequence(open.ptr(), BYTES, 2, &stream)?;

        let place = routed.ptr();
        routed.free()?;
        let other = allocator.allocate(BYTES, &stream)?;
        expect(other.ptr() != place, "the default pool not to use the private one's memory")?;
        context.write_sequence(other.ptr(), BYTES, 3, &stream)?;
        let back = allocator.allocate_in(pool.id(), BYTES, &stream)?;
        expect_eq("the private pool's next block", back.ptr(), place)?;
        context.expect_sequence("what lay free in the private pool", back.ptr(), BYTES, 1, &stream)?;

        // Its block outlives the pool, and keeps working.
        let id = pool.id();
        drop(pool);
        context.write_sequence(back.ptr(), BYTES, 4, &stream)?;
        context.expect_sequence("a block of a pool that is gone", back.ptr(), BYTES, 4, &stream)?;
        back.free()?;
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("what the pool that is gone holds", held_by(id)?, 0)?;
        context.expect_sequence("the default pool's block", open.ptr(), BYTES, 2, &stream)
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
        expect(matches!(stream.capture_state()?, CaptureState::Active(_)), "a stream that captures")?;
        let captured = (|| -> CheckResult<DeviceBlock> {
            let scratch = allocator.allocate(BYTES, &stream)?;
            context.write_sequence(scratch.ptr(), BYTES, 5, &stream)?;
            scratch.free()?;
            // The same place again: the graph's order protects it.
            let block = allocator.allocate(BYTES, &stream)?;
            context.write_sequence(block.ptr(), BYTES, 6, &stream)?;
            driver.copy(result.ptr().into(), block.ptr().into(), BYTES, stream.id())?;
            Ok(block)
        })();
        let graph = driver.capture_end(stream.id());
        pools.capture_ended(device)?;
        pools.end_routing(device, pool)?;
        let (block, graph) = (captured?, graph?);
        let shown = segments(allocator, Some(pool))?;
        let of_block = |segment: &&SegmentInfo| segment.blocks.iter().any(|it| it.address == block.ptr().0);
        expect_eq("segments of the graph's pool with its block", shown.iter().filter(of_block).count(), 1)?;

        let exec = driver.graph_instantiate(graph, InstantiateOptions::default())?;
        for value in [100, 200] {
            // Others come and go meanwhile, and must not meet the graph's memory.
            let others = (0..6).map(|_| allocator.allocate(BYTES, &stream)).collect::<warpool::Result<Vec<_>>>()?;
            for other in &others {
                expect(other.ptr() != block.ptr(), "memory that is not the graph's")?;
                context.write_sequence(other.ptr(), BYTES, value, &stream)?;
            }
            context.write_sequence(result.ptr(), BYTES, value, &stream)?;
            context.launch_graph(exec, stream.id())?;
            context.expect_sequence("the graph's block", block.ptr(), BYTES, 6, &stream)?;
            context.expect_sequence("the graph's result", result.ptr(), BYTES, 6, &stream)?;
            for other in &others {
                context.expect_sequence("a block beside the graph", other.ptr(), BYTES, value, &stream)?;
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
        // 192 MiB are cached, in pieces that are too small or in the way.
        let large = allocator.allocate(200 * MIB, &stream)?;
        context.write_sequence(large.ptr(), SAMPLE, 1, &stream)?;
        let stats = allocator.stats(context.device_id)?;
        expect(stats.reserved_bytes.all.current <= limit, "no more held than the limit")?;
        expect_eq("failures so far", stats.num_ooms, 0)?;

        let report = refused(context, allocator, 100 * MIB, &stream)?;
        expect_eq("why it failed", report.cause, OomCause::Limit)?;
        expect_report(&report, 100 * MIB, large.bytes_usable(), Some(limit))?;
        expect_eq("failures counted", allocator.stats(context.device_id)?.num_ooms, 1)?;

        let fits = allocator.allocate(20 * MIB, &stream)?;
        context.write_sequence(fits.ptr(), SAMPLE, 2, &stream)?;
        context.expect_sequence("the large block", large.ptr(), SAMPLE, 1, &stream)?;
        context.expect_sequence("a block that fits under the limit", fits.ptr(), SAMPLE, 2, &stream)?;
        large.free()?;
        allocator.set_memory_fraction(context.device_id, 1.0)?;
        allocator.allocate(300 * MIB, &stream)?.free()?;
        Ok(())
    })
}

fn oversized_request_is_out_of_memory(context: &TestContext) -> CheckResult {
    let body = |allocator: &Shared| {
        let stream = context.device().lease_stream()?;
        let cached = allocator.allocate(64 * MIB, &stream)?;
        cached.free()?;
        let total = context.device().properties().bytes_total;
        let report = refused(context, allocator, 2 * total, &stream)?;
        expect_eq("why it failed", report.cause, OomCause::Device)?;
        expect_report(&report, 2 * total, 0, None)?;
        expect_eq("what was cached was given back", report.bytes_reserved, 0)?;
        let block = allocator.allocate(64 * MIB, &stream)?;
        context.write_sequence(block.ptr(), SAMPLE, 3, &stream)?;
        context.expect_sequence("a block after the failure", block.ptr(), SAMPLE, 3, &stream)
    };
    on_caching(context, body)?;
    if context.device().properties().async_pools { on_driver_pool(context, body) } else { Ok(()) }
}

fn threads_allocate_concurrently(context: &TestContext) -> CheckResult {
    let body = |allocator: &Shared| {
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
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect::<CheckResult<Vec<()>>>()
        })?;
        Ok(())
    };
    on_caching(context, body)?;
    if context.device().properties().async_pools { on_driver_pool(context, body) } else { Ok(()) }
}

fn statistics_match_snapshots(context: &TestContext) -> CheckResult {
    let body = |allocator: &Shared| {
        let streams = [context.device().lease_stream()?, context.device().lease_stream()?];
        let mut live: Vec<Allocation> = Vec::new();
        for step in 0..120_u64 {
            let stream = &streams[(step % 3 == 0) as usize];
            // Sizes of every magnitude up to 4 MiB.
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
        live.drain(..).try_for_each(|given| allocator.free(given))?;
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_agreement(context, allocator, &live)?;
        let stats = allocator.stats(context.device_id)?;
        let peak = stats.allocated_bytes.all.peak;
        expect(peak > 0 && stats.reserved_bytes.all.peak >= peak, "peaks that remember")?;
        let given = stats.allocation.all;
        expect_eq("blocks given out and taken back", (given.allocated, given.freed), (120, 120))
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
                    context.expect_sequence("a block of the driver's", block.ptr(), block.bytes(), round, &stream)?;
                }
            }
        }
        stream.synchronize()?;
        let held = allocator.stats(context.device_id)?.reserved_bytes.all.current;
        expect(held >= 14 * MIB, &format!("the pool to keep what was freed; it holds {held} bytes"))?;
        let trimmed = allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("what a trim gives back", trimmed, held)
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
        // Whatever the driver gives now must not be what the other stream still works on.
        for value in 0..8 {
            let next = allocator.allocate(BYTES, &own)?;
            context.write_sequence(next.ptr(), BYTES, 100 + value, &own)?;
            next.free()?;
        }
        own.wait_stream(&other)?;
        context.expect_sequence("what the other stream copied at last", result.ptr(), BYTES, 7, &own)
    })
}

fn driver_pool_has_a_memory_limit(context: &TestContext) -> CheckResult {
    on_driver_pool(context, |allocator| {
        let stream = context.device().lease_stream()?;
        let limit = limit_to(context, allocator, 256 * MIB)?;
        let large = allocator.allocate(200 * MIB, &stream)?;
        let report = refused(context, allocator, 100 * MIB, &stream)?;
        expect_eq("why it failed", report.cause, OomCause::Limit)?;
        expect_report(&report, 100 * MIB, large.bytes_usable(), Some(limit))?;
        large.free()?;
        let fits = allocator.allocate(100 * MIB, &stream)?;
        context.write_sequence(fits.ptr(), SAMPLE, 2, &stream)?;
        context.expect_sequence("a block that fits under the limit", fits.ptr(), SAMPLE, 2, &stream)
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
            // Not the graph's: it waits until the capture is over.
            before.free()?;
            expect_eq("blocks that wait", allocator.stats(context.device_id)?.active.all.current, 2)
        })();
        let graph = driver.capture_end(stream.id());
        captured?;
        let graph = graph?;
        let kinds: Vec<NodeKind> = driver.graph_topology(graph)?.nodes.iter().map(|node| node.kind).collect();
        let want = vec![NodeKind::MemAlloc, NodeKind::Kernel, NodeKind::Copy, NodeKind::MemFree];
        expect_eq("the graph's nodes", kinds, want)?;
        let exec = driver.graph_instantiate(graph, InstantiateOptions::default())?;
        for value in [100, 200] {
            context.write_sequence(result.ptr(), BYTES, value, &stream)?;
            context.launch_graph(exec, stream.id())?;
            context.expect_sequence("the graph's result", result.ptr(), BYTES, 6, &stream)?;
        }
        driver.graph_exec_destroy(exec)?;
        Ok(driver.graph_destroy(graph)?)
    })
}

/// Limits an allocator to about `bytes`; what the limit is exactly.
fn limit_to(context: &TestContext, allocator: &Shared, bytes: u64) -> CheckResult<u64> {
    let total = context.device().properties().bytes_total as f64;
    let fraction = bytes as f64 / total;
    allocator.set_memory_fraction(context.device_id, fraction)?;
    Ok((total * fraction).round() as u64)
}

/// Asks for memory that is not to be had.
#[track_caller]
fn refused(context: &TestContext, allocator: &Shared, bytes: u64, stream: &Stream) -> CheckResult<Box<OomReport>> {
    match allocator.allocate_raw(request(context, bytes, stream)) {
        Err(Error::OutOfMemory(report)) => Ok(report),
        Err(other) => Err(other.into()),
        Ok(given) => Err(CheckError::Failed(format!("expected {bytes} bytes to be too many, but got {given:?}"))),
    }
}

#[track_caller]
fn expect_report(report: &OomReport, requested: u64, allocated: u64, limit: Option<u64>) -> CheckResult {
    expect_eq("what was asked for", report.bytes_requested, requested)?;
    expect_eq("what callers have", report.bytes_allocated, allocated)?;
    expect_eq("the limit", report.bytes_limit, limit)?;
    expect(report.bytes_free <= report.bytes_total, "no more free than there is")?;
    expect(report.to_string().starts_with("CUDA out of memory. Tried to allocate"), "a message that programs know")
}

fn segments(allocator: &Shared, pool: Option<MemPoolId>) -> warpool::Result<Vec<SegmentInfo>> {
    Ok(allocator.snapshot(SnapshotOptions { pool, traces: false })?.segments)
}

/// Counters, snapshot and what is known to be live must say the same.
#[track_caller]
fn expect_agreement(context: &TestContext, allocator: &Shared, live: &[Allocation]) -> CheckResult {
    let stats = allocator.stats(context.device_id)?;
    let shown = segments(allocator, None)?;
    let sum = |field: fn(&SegmentInfo) -> u64| shown.iter().map(field).sum::<u64>();
    expect_eq("blocks that callers have", stats.allocation.all.current, live.len() as u64)?;
    let bytes: u64 = live.iter().map(|given| given.bytes).sum();
    expect_eq("bytes that callers have", stats.allocated_bytes.all.current, bytes)?;
    expect_eq("allocated bytes of the snapshot", sum(|it| it.allocated_size), stats.allocated_bytes.all.current)?;
    expect_eq("active bytes of the snapshot", sum(|it| it.active_size), stats.active_bytes.all.current)?;
    expect_eq("requested bytes of the snapshot", sum(|it| it.requested_size), stats.requested_bytes.all.current)?;
    expect_eq("all bytes of the snapshot", sum(|it| it.total_size), stats.reserved_bytes.all.current)
}
