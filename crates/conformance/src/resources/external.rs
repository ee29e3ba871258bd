//! Plugged allocators: closures over the driver's plain memory, alone, as the source of a pool, and under layers.
//! Contents are written and counted by kernels. One of the plugs gives out at once what it got back, so that nothing
//! but the allocator's own care keeps streams apart.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{
    Allocate, CachingAllocator, DeviceAllocator, DeviceBlock, ExternalUpstream, FnAllocator, HistoryOptions, Limited,
    MemPool, MemPoolId, OomCause, PluggableAllocator, PoolOptions, RawStream, Request, Settings, SnapshotOptions,
    Traced,
};
use warpool::{Error, Result};
use warpool_driver::{DeviceId, DevicePtr, Driver};

use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq};
use crate::sync::lock;

pub(crate) const CHECKS: &[Check] = crate::checks![
    closures_allocate_and_free,
    null_address_is_out_of_memory,
    freed_block_waits_for_recorded_streams,
    external_allocator_is_the_upstream_of_a_pool,
    overlapping_address_is_rejected,
    graph_keeps_its_external_memory,
    decorators_cap_and_trace,
];

const MIB: u64 = 1 << 20;

type Shared = Arc<dyn DeviceAllocator>;

/// Plain memory of the driver's; what comes back is given out again at once, if the size is the same.
struct Shelf {
    driver: Arc<dyn Driver>,
    idle: Mutex<Vec<(DevicePtr, u64)>>,
    live: Mutex<BTreeMap<u64, u64>>,
    bytes_max: AtomicU64,
}

impl Shelf {
    fn new(context: &TestContext) -> Arc<Self> {
        Arc::new(Self {
            driver: Arc::clone(&context.driver),
            idle: Mutex::default(),
            live: Mutex::default(),
            bytes_max: AtomicU64::new(u64::MAX),
        })
    }

    fn bytes_live(&self) -> u64 {
        lock(&self.live).values().sum()
    }

    fn plug(self: &Arc<Self>) -> FnAllocator {
        let (gives, takes, resets) = (Arc::clone(self), Arc::clone(self), Arc::clone(self));
        FnAllocator::new(
            move |bytes, device, stream| gives.give(bytes, device, stream),
            move |ptr, bytes, _, _| {
                lock(&takes.live).remove(&ptr.0);
                lock(&takes.idle).push((ptr, bytes));
                Ok(())
            },
        )
        .on_reset(move || resets.clear())
    }

    fn give(&self, bytes: u64, device: DeviceId, _: RawStream) -> Result<Option<DevicePtr>> {
        if self.bytes_live().saturating_add(bytes) > self.bytes_max.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let idle = {
            let mut idle = lock(&self.idle);
            let at = idle.iter().position(|&(_, there)| there == bytes);
            at.map(|at| idle.swap_remove(at).0)
        };
        let ptr = match idle {
            Some(ptr) => ptr,
            None => match self.driver.mem_alloc(device, bytes) {
                Ok(ptr) => ptr,
                Err(error) if error.is_out_of_memory() => return Ok(None),
                Err(error) => return Err(error.into()),
            },
        };
        lock(&self.live).insert(ptr.0, bytes);
        Ok(Some(ptr))
    }

    /// Gives everything idle back to the driver.
    fn clear(&self) {
        for (ptr, bytes) in std::mem::take(&mut *lock(&self.idle)) {
            if self.driver.mem_free(ptr).is_err() {
                lock(&self.idle).push((ptr, bytes));
            }
        }
    }
}

/// Runs `body` on a plugged allocator, and then expects everything to go back.
fn on_plug(context: &TestContext, body: impl FnOnce(&Shared, &Arc<Shelf>) -> CheckResult) -> CheckResult {
    let shelf = Shelf::new(context);
    let allocator: Shared = Arc::new(PluggableAllocator::new(context.instance(), Arc::new(shelf.plug()))?);
    let outcome = body(&allocator, &shelf);
    allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
    outcome?;
    let stats = allocator.stats(context.device_id)?;
    let left = (stats.active.all.current, stats.reserved_bytes.all.current, shelf.bytes_live());
    expect_eq("active blocks, bytes held, bytes that the plug misses", left, (0, 0, 0))
}

fn closures_allocate_and_free(context: &TestContext) -> CheckResult {
    on_plug(context, |allocator, shelf| {
        let stream = context.device().lease_stream()?;
        allocator.record_history(Some(HistoryOptions::default()))?;
        let blocks = [4096, 3 * MIB, 14 * MIB].map(|bytes| allocator.allocate(bytes, &stream));
        let blocks = blocks.into_iter().collect::<Result<Vec<_>>>()?;
        for (block, value) in blocks.iter().zip([1, 2, 3]) {
            context.write_sequence(block.ptr(), block.bytes(), value << 28, &stream)?;
        }
        for (block, value) in blocks.iter().zip([1, 2, 3]) {
            context.expect_sequence("a plugged block", block.ptr(), block.bytes(), value << 28, &stream)?;
        }
        let bytes: u64 = blocks.iter().map(DeviceBlock::bytes).sum();
        let stats = allocator.stats(context.device_id)?;
        let counted = (stats.allocated_bytes.all.current, stats.reserved_bytes.all.peak, shelf.bytes_live());
        expect_eq("bytes given out", counted, (bytes, bytes, bytes))?;
        let snapshot = allocator.snapshot(SnapshotOptions::default())?;
        let shown: u64 = snapshot.segments.iter().map(|segment| segment.allocated_size).sum();
        let written = snapshot.traces[context.device().index() as usize].len();
        expect_eq("a snapshot's bytes and entries", (shown, written), (bytes, 6))?;
        let empty = allocator.allocate(0, &stream)?;
        expect(empty.ptr().is_null(), "nothing to be the null address")?;
        drop(blocks);
        expect_eq("bytes of the plug, before the next call", shelf.bytes_live(), bytes)
    })
}

fn null_address_is_out_of_memory(context: &TestContext) -> CheckResult {
    on_plug(context, |allocator, shelf| {
        let stream = context.device().lease_stream()?;
        shelf.bytes_max.store(10 * MIB, Ordering::Relaxed);
        let held = allocator.allocate(8 * MIB, &stream)?;
        let Err(Error::OutOfMemory(report)) = allocator.allocate(3 * MIB, &stream) else {
            return expect(false, "no memory");
        };
        expect_eq("why it failed", report.cause, OomCause::Upstream)?;
        let shown = (report.bytes_requested, report.bytes_allocated, report.bytes_total > 0);
        expect_eq("what the report says", shown, (3 * MIB, 8 * MIB, true))?;
        held.free()?;
        allocator.allocate(9 * MIB, &stream)?.free()?;
        allocator.set_memory_fraction(context.device_id, 0.0)?;
        let refused = allocator.allocate(1, &stream);
        expect(
            matches!(refused, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Limit),
            "the books to keep the fraction",
        )?;
        Ok(allocator.set_memory_fraction(context.device_id, 1.0)?)
    })
}

fn freed_block_waits_for_recorded_streams(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 8 * MIB;
    on_plug(context, |allocator, _| {
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
        other.synchronize()?;
        context.expect_sequence("what the other stream wrote", result.ptr(), BYTES, 7, &other)?;
        let third = allocator.allocate(BYTES, &own)?;
        expect_eq("the place once the other stream is done", third.ptr(), place)?;
        context.expect_sequence("the second block, untouched", second.ptr(), BYTES, 9, &own)
    })
}

fn external_allocator_is_the_upstream_of_a_pool(context: &TestContext) -> CheckResult {
    let shelf = Shelf::new(context);
    let allocator: Shared = Arc::new(CachingAllocator::new(context.instance(), Settings::default()));
    let upstream = Arc::new(ExternalUpstream::new(context.instance(), Arc::new(shelf.plug()))?);
    let options = PoolOptions { upstream: Some(upstream), ..PoolOptions::default() };
    let pool = MemPool::new(&allocator, context.device(), options)?;
    let stream = context.device().lease_stream()?;
    let blocks = [4096, 8192].map(|bytes| allocator.allocate_in(pool.id(), bytes, &stream));
    let [first, second] = blocks;
    let (first, second) = (first?, second?);
    expect_eq("bytes of the plug: one segment for both", shelf.bytes_live(), 2 * MIB)?;
    context.write_sequence(first.ptr(), 4096, 1, &stream)?;
    context.write_sequence(second.ptr(), 8192, 2 << 28, &stream)?;
    context.expect_sequence("the first block", first.ptr(), 4096, 1, &stream)?;
    context.expect_sequence("the second block", second.ptr(), 8192, 2 << 28, &stream)?;
    let place = first.ptr();
    first.free()?;
    let again = allocator.allocate_in(pool.id(), 4096, &stream)?;
    expect_eq("the place of the next block", again.ptr(), place)?;
    drop((again, second));
    pool.close()?;
    expect_eq("bytes that the plug misses", shelf.bytes_live(), 0)?;
    shelf.clear();
    Ok(())
}

fn overlapping_address_is_rejected(context: &TestContext) -> CheckResult {
    let (driver, stream) = (Arc::clone(&context.driver), context.device().lease_stream()?);
    let base = driver.mem_alloc(context.device_id, MIB)?;
    let external = FnAllocator::new(move |_, _, _| Ok(Some(base)), |_, _, _, _| Ok(()));
    let allocator: Shared = Arc::new(PluggableAllocator::new(context.instance(), Arc::new(external))?);
    let first = allocator.allocate(5000, &stream)?;
    let refused = Error::ExternalOverlap { ptr: base, bytes: 100, live: base, live_bytes: 5000 };
    expect_eq("a second block at the same address", allocator.allocate(100, &stream).map(drop), Err(refused))?;
    first.free()?;
    allocator.allocate(100, &stream)?.free()?;
    expect_eq("active blocks", allocator.stats(context.device_id)?.active.all.current, 0)?;
    Ok(driver.mem_free(base)?)
}

fn graph_keeps_its_external_memory(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    on_plug(context, |allocator, shelf| {
        let stream = context.device().lease_stream()?;
        let outside = allocator.allocate(BYTES, &stream)?;
        let mut graph = Graph::new(allocator, context.device(), GraphOptions::default())?;
        let key = graph.capture(&stream, CaptureOptions::default(), |capture| {
            let key = capture.allocate(BYTES)?;
            // Freed in the capture: the plug would give it to the next who asks.
            let scratch = allocator.allocate(BYTES, capture.stream())?;
            context.add_sequence(scratch.ptr(), outside.ptr(), BYTES, 1, capture.stream())?;
            context.add_sequence(capture.buffer(key)?.ptr(), scratch.ptr(), BYTES, 1, capture.stream())?;
            Ok(key)
        })?;
        for round in 0..50 {
            let other = allocator.allocate(BYTES, &stream)?;
            context.write_sequence(other.ptr(), BYTES, 1000, &stream)?;
            context.write_sequence(outside.ptr(), BYTES, round, &stream)?;
            graph.replay(&stream)?;
            if round % 10 == 9 {
                context.expect_sequence("what the graph wrote", graph.buffer(key)?.ptr(), BYTES, round + 2, &stream)?;
                context.expect_sequence("a block beside it", other.ptr(), BYTES, 1000, &stream)?;
            }
        }
        outside.free()?;
        expect_eq("bytes of the plug: those of the graph", shelf.bytes_live(), 2 * BYTES)?;
        graph.replay(&stream)?;
        drop(graph);
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("bytes of the plug after the graph", shelf.bytes_live(), 0)
    })
}

fn decorators_cap_and_trace(context: &TestContext) -> CheckResult {
    on_plug(context, |plugged, _| {
        let stream = context.device().lease_stream()?;
        let calls = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&calls);
        let limited = Arc::new(Limited::new(Arc::clone(plugged), 10 * MIB));
        let allocator: Shared = Arc::new(Traced::new(limited.clone(), move |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let block = allocator.allocate(8 * MIB, &stream)?;
        let request = Request::new(context.device_id, stream.id(), 3 * MIB);
        let Err(Error::OutOfMemory(report)) = allocator.allocate_raw(request) else {
            return expect(false, "no more than the cap");
        };
        expect_eq("the cap", (report.cause, report.bytes_limit), (OomCause::Cap { held: 8 * MIB }, Some(10 * MIB)))?;
        drop(block);
        expect_eq("bytes allocated in the end", limited.bytes_allocated(), 0)?;
        expect_eq("traced calls", calls.load(Ordering::Relaxed), 3)
    })
}
