//! External allocators: closures over the driver's memory, alone, as the upstream of a pool, and under decorators.
//! Kernels write and compare the contents of blocks. The external allocator reuses freed memory at once, so that only
//! Warpool's stream fences keep streams apart.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::decorate::{Limited, Traced};
use warpool::memory::external::{ExternalUpstream, FnAllocator, RawStream};
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::Request;
use warpool::memory::report::{HistoryOptions, SnapshotOptions};
use warpool::memory::{
    Allocate, CachingAllocator, DeviceBlock, MemPool, MemPoolId, OomCause, PluggableAllocator, Settings,
};
use warpool::{Error, Result};
use warpool_driver::{DeviceId, DevicePtr, Driver};

use super::helpers::{SharedAllocator, expect_wait_for_recorded_stream};
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

/// Memory of the driver. Freed memory is reused at once for a request of the same size.
struct ReusingMemory {
    driver: Arc<dyn Driver>,
    idle: Mutex<Vec<(DevicePtr, u64)>>,
    live: Mutex<BTreeMap<u64, u64>>,
    bytes_max: AtomicU64,
}

impl ReusingMemory {
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

    fn allocator(self: &Arc<Self>) -> FnAllocator {
        let (allocating, freeing, resetting) = (Arc::clone(self), Arc::clone(self), Arc::clone(self));
        FnAllocator::new(
            move |bytes, device, stream| allocating.allocate(bytes, device, stream),
            move |ptr, bytes, _, _| {
                lock(&freeing.live).remove(&ptr.0);
                lock(&freeing.idle).push((ptr, bytes));
                Ok(())
            },
        )
        .on_reset(move || resetting.release_idle())
    }

    fn allocate(&self, bytes: u64, device: DeviceId, _: RawStream) -> Result<Option<DevicePtr>> {
        if self.bytes_live().saturating_add(bytes) > self.bytes_max.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let idle = {
            let mut idle = lock(&self.idle);
            let at = idle.iter().position(|&(_, size)| size == bytes);
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

    /// Returns all idle memory to the driver.
    fn release_idle(&self) {
        for (ptr, bytes) in std::mem::take(&mut *lock(&self.idle)) {
            if self.driver.mem_free(ptr).is_err() {
                lock(&self.idle).push((ptr, bytes));
            }
        }
    }
}

/// Runs `body` on an external allocator, and then expects that everything was freed.
fn on_external(
    context: &TestContext,
    body: impl FnOnce(&SharedAllocator, &Arc<ReusingMemory>) -> CheckResult,
) -> CheckResult {
    let memory = ReusingMemory::new(context);
    let allocator: SharedAllocator =
        Arc::new(PluggableAllocator::new(context.instance(), Arc::new(memory.allocator()))?);
    let outcome = body(&allocator, &memory);
    allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
    outcome?;
    let stats = allocator.stats(context.device_id)?;
    let left = (stats.active.all.current, stats.reserved_bytes.all.current, memory.bytes_live());
    expect_eq("active blocks, reserved bytes, bytes not returned to the external allocator", left, (0, 0, 0))
}

fn closures_allocate_and_free(context: &TestContext) -> CheckResult {
    on_external(context, |allocator, memory| {
        let stream = context.device().lease_stream()?;
        allocator.record_history(Some(HistoryOptions::default()))?;
        let blocks = [4096, 3 * MIB, 14 * MIB].map(|bytes| allocator.allocate(bytes, &stream));
        let blocks = blocks.into_iter().collect::<Result<Vec<_>>>()?;
        for (block, value) in blocks.iter().zip([1, 2, 3]) {
            context.write_sequence(block.ptr(), block.bytes(), value << 28, &stream)?;
        }
        for (block, value) in blocks.iter().zip([1, 2, 3]) {
            context.expect_sequence("an external block", block.ptr(), block.bytes(), value << 28, &stream)?;
        }
        let bytes: u64 = blocks.iter().map(DeviceBlock::bytes).sum();
        let stats = allocator.stats(context.device_id)?;
        let counted = (stats.allocated_bytes.all.current, stats.reserved_bytes.all.peak, memory.bytes_live());
        expect_eq("allocated bytes", counted, (bytes, bytes, bytes))?;
        let snapshot = allocator.snapshot(SnapshotOptions::default())?;
        let shown: u64 = snapshot.segments.iter().map(|segment| segment.allocated_size).sum();
        let written = snapshot.traces[context.device().index() as usize].len();
        expect_eq("bytes and trace entries of the snapshot", (shown, written), (bytes, 6))?;
        let empty = allocator.allocate(0, &stream)?;
        expect(empty.ptr().is_null(), "an empty block has the null address")?;
        drop(blocks);
        expect_eq("external bytes before the next call", memory.bytes_live(), bytes)
    })
}

fn null_address_is_out_of_memory(context: &TestContext) -> CheckResult {
    on_external(context, |allocator, memory| {
        let stream = context.device().lease_stream()?;
        memory.bytes_max.store(10 * MIB, Ordering::Relaxed);
        let block = allocator.allocate(8 * MIB, &stream)?;
        let Err(Error::OutOfMemory(report)) = allocator.allocate(3 * MIB, &stream) else {
            return expect(false, "the request is out of memory");
        };
        expect_eq("the cause of the error", report.cause, OomCause::External)?;
        let shown = (report.bytes_requested, report.bytes_allocated, report.bytes_total > 0);
        expect_eq("requested bytes, allocated bytes, and whether the total is known", shown, (3 * MIB, 8 * MIB, true))?;
        block.free()?;
        allocator.allocate(9 * MIB, &stream)?.free()?;
        allocator.set_memory_fraction(context.device_id, 0.0)?;
        let rejected = allocator.allocate(1, &stream);
        expect(
            matches!(rejected, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Limit),
            "the memory fraction limits external memory",
        )?;
        Ok(allocator.set_memory_fraction(context.device_id, 1.0)?)
    })
}

fn freed_block_waits_for_recorded_streams(context: &TestContext) -> CheckResult {
    on_external(context, |allocator, _| expect_wait_for_recorded_stream(context, allocator))
}

fn external_allocator_is_the_upstream_of_a_pool(context: &TestContext) -> CheckResult {
    let memory = ReusingMemory::new(context);
    let allocator: SharedAllocator = Arc::new(CachingAllocator::new(context.instance(), Settings::default()));
    let upstream = Arc::new(ExternalUpstream::new(context.instance(), Arc::new(memory.allocator()))?);
    let options = PoolOptions { upstream: Some(upstream), ..PoolOptions::default() };
    let pool = MemPool::new(&allocator, context.device(), options)?;
    let stream = context.device().lease_stream()?;
    let blocks = [4096, 8192].map(|bytes| allocator.allocate_in(&pool, bytes, &stream));
    let [first, second] = blocks;
    let (first, second) = (first?, second?);
    expect_eq("external bytes: one segment for both blocks", memory.bytes_live(), 2 * MIB)?;
    context.write_sequence(first.ptr(), 4096, 1, &stream)?;
    context.write_sequence(second.ptr(), 8192, 2 << 28, &stream)?;
    context.expect_sequence("the first block", first.ptr(), 4096, 1, &stream)?;
    context.expect_sequence("the second block", second.ptr(), 8192, 2 << 28, &stream)?;
    let address = first.ptr();
    first.free()?;
    let again = allocator.allocate_in(&pool, 4096, &stream)?;
    expect_eq("the address of the next block", again.ptr(), address)?;
    drop((again, second));
    pool.close()?;
    expect_eq("bytes not returned to the external allocator", memory.bytes_live(), 0)?;
    memory.release_idle();
    Ok(())
}

fn overlapping_address_is_rejected(context: &TestContext) -> CheckResult {
    let (driver, stream) = (Arc::clone(&context.driver), context.device().lease_stream()?);
    let base = driver.mem_alloc(context.device_id, MIB)?;
    let external = FnAllocator::new(move |_, _, _| Ok(Some(base)), |_, _, _, _| Ok(()));
    let allocator: SharedAllocator = Arc::new(PluggableAllocator::new(context.instance(), Arc::new(external))?);
    let first = allocator.allocate(5000, &stream)?;
    let rejected = Error::ExternalOverlap { ptr: base, bytes: 100, live: base, live_bytes: 5000 };
    expect_eq("a second block at the same address", allocator.allocate(100, &stream).map(drop), Err(rejected))?;
    first.free()?;
    allocator.allocate(100, &stream)?.free()?;
    expect_eq("active blocks", allocator.stats(context.device_id)?.active.all.current, 0)?;
    Ok(driver.mem_free(base)?)
}

fn graph_keeps_its_external_memory(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    on_external(context, |allocator, memory| {
        let stream = context.device().lease_stream()?;
        let outside = allocator.allocate(BYTES, &stream)?;
        let mut graph = Graph::new(allocator, context.device(), GraphOptions::default())?;
        let key = graph.capture(&stream, CaptureOptions::default(), |capture| {
            let key = capture.allocate(BYTES)?;
            // Freed in the capture: the external allocator would return it for the next request.
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
                context.expect_sequence(
                    "the memory written by the graph",
                    graph.buffer(key)?.ptr(),
                    BYTES,
                    round + 2,
                    &stream,
                )?;
                context.expect_sequence("a block outside the graph", other.ptr(), BYTES, 1000, &stream)?;
            }
        }
        outside.free()?;
        expect_eq("external bytes of the graph", memory.bytes_live(), 2 * BYTES)?;
        graph.replay(&stream)?;
        drop(graph);
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("external bytes after the graph was dropped", memory.bytes_live(), 0)
    })
}

fn decorators_cap_and_trace(context: &TestContext) -> CheckResult {
    on_external(context, |external, _| {
        let stream = context.device().lease_stream()?;
        let calls = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&calls);
        let limited = Arc::new(Limited::new(external, 10 * MIB));
        let allocator: SharedAllocator = Arc::new(Traced::new(&limited, move |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let block = allocator.allocate(8 * MIB, &stream)?;
        let request = Request::new(context.device_id, stream.id(), 3 * MIB);
        let Err(Error::OutOfMemory(report)) = allocator.allocate_raw(request) else {
            return expect(false, "the request exceeds the cap");
        };
        expect_eq("the cap", (report.cause, report.bytes_limit), (OomCause::Cap { held: 8 * MIB }, Some(10 * MIB)))?;
        drop(block);
        expect_eq("allocated bytes at the end", limited.bytes_allocated(), 0)?;
        expect_eq("traced calls", calls.load(Ordering::Relaxed), 3)
    })
}
