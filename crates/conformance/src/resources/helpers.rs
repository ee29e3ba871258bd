//! Helpers shared by several suites.

use std::sync::Arc;

use warpool::Stream;
use warpool::generator::philox;
use warpool::graph::{BufferKey, Capture, CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, Settings};
use warpool_driver::{CaptureMode, DevicePtr};

use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq};

/// Any device allocator.
pub(super) type SharedAllocator = Arc<dyn DeviceAllocator>;

pub(super) const PLAIN: CaptureOptions<'_> =
    CaptureOptions { pool: None, mode: CaptureMode::Global, poller_timeout: None };

/// Runs `body` with an allocator and a stream to capture on, and then expects that all memory can be returned to the
/// driver.
pub(super) fn with_allocator(
    context: &TestContext,
    body: impl FnOnce(&SharedAllocator, &Stream) -> CheckResult,
) -> CheckResult {
    let allocator: SharedAllocator = Arc::new(CachingAllocator::new(context.instance(), Settings::default()));
    let stream = context.device().lease_stream()?;
    let outcome = body(&allocator, &stream);
    if outcome.is_err() {
        // Work of the failed body must not use memory that is freed now. The body's failure is the one to report.
        let _ = context.device().synchronize();
        return outcome;
    }
    context.device().synchronize()?;
    allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
    expect_eq("reserved bytes at the end", reserved_bytes(context, &allocator)?, 0)
}

pub(super) fn reserved_bytes(context: &TestContext, allocator: &SharedAllocator) -> CheckResult<u64> {
    Ok(allocator.stats(context.device_id)?.reserved_bytes.all.current)
}

pub(super) fn graph(context: &TestContext, allocator: &SharedAllocator) -> warpool::Result<Graph> {
    Graph::new(allocator, context.device(), GraphOptions::default())
}

/// Captures `output = input + by`, with a temporary.
pub(super) fn capture_sum(
    context: &TestContext,
    capture: &mut Capture<'_>,
    from: DevicePtr,
    bytes: u64,
    by: u32,
) -> warpool::Result<BufferKey> {
    let stream = capture.stream().clone();
    let between = capture.allocator().allocate(bytes, &stream)?;
    context.add_sequence(between.ptr(), from, bytes, by - 1, &stream)?;
    let output = capture.allocate(bytes)?;
    context.add_sequence(capture.buffer(output)?.ptr(), between.ptr(), bytes, 1, &stream)?;
    Ok(output)
}

/// Expects that a freed block is not reused before the work of another stream that used it is done.
pub(super) fn expect_wait_for_recorded_stream(context: &TestContext, allocator: &SharedAllocator) -> CheckResult {
    const BYTES: u64 = 8 << 20;
    let (own, other) = (context.device().lease_stream()?, context.device().lease_stream()?);
    let (first, result) = (allocator.allocate(BYTES, &own)?, allocator.allocate(BYTES, &other)?);
    other.wait_stream(&own)?;
    context.keep_stream_busy(&other)?;
    context.write_sequence(first.ptr(), BYTES, 7, &other)?;
    context.driver.copy(result.ptr().into(), first.ptr().into(), BYTES, other.id())?;
    first.record_use(&other)?;
    let address = first.ptr();
    first.free()?;

    let second = allocator.allocate(BYTES, &own)?;
    expect(second.ptr() != address, "another address while the other stream uses the block")?;
    context.write_sequence(second.ptr(), BYTES, 9, &own)?;
    context.expect_sequence("the second block", second.ptr(), BYTES, 9, &own)?;
    expect(!other.query()?, "the other stream still has work")?;

    other.synchronize()?;
    context.expect_sequence("the memory written by the other stream", result.ptr(), BYTES, 7, &other)?;
    let third = allocator.allocate(BYTES, &own)?;
    expect_eq("the address once the other stream has finished", third.ptr(), address)?;
    context.write_sequence(third.ptr(), BYTES, 11, &own)?;
    context.expect_sequence("the third block", third.ptr(), BYTES, 11, &own)?;
    context.expect_sequence("the second block afterwards", second.ptr(), BYTES, 9, &own)
}

/// The contents of a block.
pub(super) fn read_block_words(context: &TestContext, block: &DeviceBlock) -> CheckResult<Vec<u32>> {
    context.read_words(block.ptr(), (block.bytes() / 4) as usize)
}

/// The words that a generator fills into memory of `count` words.
pub(super) fn philox_words(seed: u64, offset: u64, count: usize) -> Vec<u32> {
    (0..).flat_map(|subsequence| philox::block(seed, subsequence, offset)).take(count).collect()
}
