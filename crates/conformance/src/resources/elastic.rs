//! Elastic memory: blocks at fixed addresses that get and lose pages of the device's stock, while work on them is still
//! queued. Kernels write and compare contents. At most 130 MiB of the device are used.

use std::ops::Range;
use std::sync::Arc;

use warpool::graph::CaptureOptions;
use warpool::memory::elastic::{ElasticLayout, ElasticMemory, headroom};
use warpool::memory::{Allocate, DeviceAllocator, DeviceBlock, MemPoolId, OomCause, PagedAllocator, Settings};
use warpool::{Error, Stream, StreamLease};

use super::helpers::{SharedAllocator, graph};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    blocks_keep_contents_and_addresses,
    what_was_there_is_committed_again_without_driver_calls,
    pages_of_decommitted_blocks_are_used_after_queued_work,
    commits_get_pages_after_the_work_of_their_last_stream,
    other_streams_may_commit_and_decommit,
    a_place_is_committed_again_while_its_page_is_elsewhere,
    captured_graph_uses_blocks_that_come_and_go,
    rows_of_a_tensor_share_pages,
    a_commit_that_does_not_fit_changes_nothing,
];

const MIB: u64 = 1 << 20;

struct Elastic<'a> {
    context: &'a TestContext,
    paged: Arc<PagedAllocator>,
    allocator: SharedAllocator,
}

/// Runs `body` on a paged allocator, and then expects that all memory can be returned to the driver. Skips the check
/// where there is no virtual memory.
fn on_paged(context: &TestContext, body: impl FnOnce(&Elastic<'_>) -> CheckResult) -> CheckResult {
    require(context.device().properties().virtual_memory, "the device has no virtual memory management")?;
    let paged = Arc::new(PagedAllocator::new(context.instance(), Settings::default())?);
    // Pages of 2 MiB, so that it is known where each is.
    paged.set_page_sizes(u64::MAX, u64::MAX);
    let subject = Elastic { context, allocator: paged.clone(), paged };
    let outcome = body(&subject);
    // Work of a failed body must not use memory that is freed now. The body's failure is the one to report.
    let synchronized = context.device().synchronize();
    outcome?;
    synchronized?;
    subject.paged.trim(context.device_id, MemPoolId::DEFAULT)?;
    subject.paged.check();
    let left = subject.paged.page_stats(context.device_id)?;
    expect_eq("active and reserved bytes at the end", (left.active_bytes, left.reserved_bytes), (0, 0))
}

impl Elastic<'_> {
    fn stream(&self) -> CheckResult<StreamLease> {
        Ok(self.context.device().lease_stream()?)
    }

    fn reserve(&self, rows: u64, blocks: u64, block_bytes: u64, stream: &Stream) -> CheckResult<ElasticMemory> {
        Ok(ElasticMemory::new(&self.paged, ElasticLayout { rows, blocks, block_bytes }, stream)?)
    }

    fn block(&self, bytes: u64, stream: &Stream) -> CheckResult<DeviceBlock> {
        Ok(self.allocator.allocate(bytes, stream)?)
    }

    /// Writes contents into all rows of some blocks.
    fn write(&self, memory: &ElasticMemory, blocks: Range<u64>, first: u32, stream: &Stream) -> CheckResult {
        self.each(memory, blocks, |ptr, bytes| self.context.write_sequence(ptr, bytes, first, stream))
    }

    #[track_caller]
    fn expect(
        &self,
        what: &str,
        memory: &ElasticMemory,
        blocks: Range<u64>,
        first: u32,
        stream: &Stream,
    ) -> CheckResult {
        self.each(memory, blocks, |ptr, bytes| self.context.expect_sequence(what, ptr, bytes, first, stream))
    }

    fn each(
        &self,
        memory: &ElasticMemory,
        blocks: Range<u64>,
        act: impl Fn(warpool_driver::DevicePtr, u64) -> CheckResult,
    ) -> CheckResult {
        let layout = memory.layout();
        for row in 0..layout.rows {
            for block in blocks.clone() {
                act(memory.ptr().offset((row * layout.blocks + block) * layout.block_bytes), layout.block_bytes)?;
            }
        }
        Ok(())
    }

    #[track_caller]
    fn expect_reserved(&self, what: &str, want: u64) -> CheckResult {
        let reserved = self.paged.page_stats(self.context.device_id)?.reserved_bytes;
        expect_eq(&format!("reserved bytes, {what}"), reserved, want)
    }

    /// Driver calls about pages so far.
    fn remaps(&self) -> CheckResult<[u64; 4]> {
        let totals = self.paged.page_stats(self.context.device_id)?.totals;
        Ok([totals.created, totals.released, totals.mapped, totals.unmapped])
    }
}

fn blocks_keep_contents_and_addresses(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let stream = on.stream()?;
        let memory = on.reserve(1, 10_000, 4 * MIB, &stream)?;
        on.expect_reserved("for addresses", 0)?;
        let address = memory.ptr();
        for (first, blocks) in (1..).zip([0..4, 9_990..10_000, 100..101]) {
            memory.commit(blocks.clone(), &stream)?;
            on.write(&memory, blocks, first, &stream)?;
        }
        memory.decommit(9_992..9_998, &stream)?;
        memory.commit(3..6, &stream)?;
        expect_eq("committed blocks", memory.committed(), 11)?;
        for (first, blocks) in (1..).zip([0..4, 9_990..9_992, 100..101]) {
            on.expect("a committed block", &memory, blocks, first, &stream)?;
        }
        on.expect("the last blocks", &memory, 9_998..10_000, 2, &stream)?;
        expect_eq("its address", memory.ptr(), address)
    })
}

fn what_was_there_is_committed_again_without_driver_calls(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let stream = on.stream()?;
        let memory = on.reserve(1, 64, 2 * MIB, &stream)?;
        memory.commit(0..64, &stream)?;
        on.write(&memory, 0..1, 3, &stream)?;
        let before = on.remaps()?;
        for round in 0..64 {
            memory.decommit(round..64, &stream)?;
            memory.commit(0..64, &stream)?;
        }
        expect_eq("pages created, released, mapped, unmapped", on.remaps()?, before)?;
        on.expect("a block that was there all the time", &memory, 0..1, 3, &stream)
    })
}

fn pages_of_decommitted_blocks_are_used_after_queued_work(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (giving, taking) = (on.stream()?, on.stream()?);
        let memory = on.reserve(1, 16, 2 * MIB, &giving)?;
        memory.commit(0..16, &giving)?;
        let result = on.block(2 * MIB, &giving)?;
        context.keep_stream_busy(&giving)?;
        // After the long kernel: without the right order it would run after the other stream's work.
        on.write(&memory, 0..16, 1, &giving)?;
        let last = memory.ptr().offset(15 * 2 * MIB);
        context.driver.copy(result.ptr().into(), last.into(), 2 * MIB, giving.id())?;
        memory.decommit(4..16, &giving)?;
        let taken = on.block(24 * MIB, &taking)?;
        context.write_sequence(taken.ptr(), taken.bytes(), 2, &taking)?;
        on.expect_reserved("with the pages that left", 34 * MIB)?;
        context.expect_busy("the giving stream: the host did not wait", giving.id())?;
        context.expect_sequence("the block that took them", taken.ptr(), taken.bytes(), 2, &taking)?;
        context.expect_sequence("what was copied before", result.ptr(), result.bytes(), 1, &giving)?;
        on.expect("a block that stayed", &memory, 0..4, 1, &giving)
    })
}

fn commits_get_pages_after_the_work_of_their_last_stream(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (giving, taking) = (on.stream()?, on.stream()?);
        let result = on.block(24 * MIB, &giving)?;
        let activations = on.block(24 * MIB, &giving)?;
        context.keep_stream_busy(&giving)?;
        context.write_sequence(activations.ptr(), activations.bytes(), 1, &giving)?;
        context.driver.copy(result.ptr().into(), activations.ptr().into(), result.bytes(), giving.id())?;
        activations.free()?;
        let memory = on.reserve(1, 12, 2 * MIB, &taking)?;
        memory.commit(0..12, &taking)?;
        on.write(&memory, 0..12, 2, &taking)?;
        on.expect_reserved("with the pages of what was freed", 48 * MIB)?;
        context.expect_busy("the giving stream: the host did not wait", giving.id())?;
        on.expect("a block", &memory, 0..12, 2, &taking)?;
        context.expect_sequence("what was copied before", result.ptr(), result.bytes(), 1, &giving)
    })
}

fn other_streams_may_commit_and_decommit(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (home, worker, taking) = (on.stream()?, on.stream()?, on.stream()?);
        let memory = on.reserve(1, 8, 2 * MIB, &home)?;
        for round in 0..4 {
            memory.commit(0..8, &worker)?;
            context.delay(worker.id())?;
            on.write(&memory, 0..8, 10 * round, &worker)?;
            // The copy runs late, and the pages serve another stream meanwhile.
            let result = on.block(2 * MIB, &worker)?;
            context.delay(worker.id())?;
            context.driver.copy(result.ptr().into(), memory.ptr().into(), 2 * MIB, worker.id())?;
            memory.decommit(0..8, &worker)?;
            let taken = on.block(16 * MIB, &taking)?;
            context.write_sequence(taken.ptr(), taken.bytes(), 5, &taking)?;
            context.expect_sequence("what was copied", result.ptr(), result.bytes(), 10 * round, &worker)?;
            context.expect_sequence("the other block", taken.ptr(), taken.bytes(), 5, &taking)?;
        }
        Ok(())
    })
}

fn a_place_is_committed_again_while_its_page_is_elsewhere(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (stream, taking) = (on.stream()?, on.stream()?);
        let memory = on.reserve(1, 16, 2 * MIB, &stream)?;
        memory.commit(0..16, &stream)?;
        context.delay(stream.id())?;
        on.write(&memory, 0..16, 1, &stream)?;
        memory.decommit(4..12, &stream)?;
        let taken = on.block(16 * MIB, &taking)?;
        context.write_sequence(taken.ptr(), taken.bytes(), 2, &taking)?;
        memory.commit(4..12, &stream)?;
        on.write(&memory, 4..12, 3, &stream)?;
        on.expect("blocks that were committed again", &memory, 4..12, 3, &stream)?;
        on.expect("blocks before", &memory, 0..4, 1, &stream)?;
        on.expect("blocks after", &memory, 12..16, 1, &stream)?;
        context.expect_sequence("the block with the pages", taken.ptr(), taken.bytes(), 2, &taking)
    })
}

fn captured_graph_uses_blocks_that_come_and_go(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (stream, other) = (on.stream()?, on.stream()?);
        let memory = on.reserve(1, 64, 2 * MIB, &stream)?;
        let mut graph = graph(context, &on.allocator)?;
        // Nothing is committed yet.
        let refused = graph.capture(&stream, CaptureOptions::default(), |_| {
            for block in 20..24 {
                let ptr = memory.ptr().offset(block * 2 * MIB);
                context.write_sequence(ptr, 2 * MIB, 7, &stream).map_err(|_| Error::EmptyElastic)?;
            }
            Ok(memory.commit(0..1, &stream))
        })?;
        expect_eq("a commit in a capture", refused, Err(Error::ElasticInCapture { stream: stream.id() }))?;
        for _ in 0..3 {
            let activations = on.block(32 * MIB, &other)?;
            context.write_sequence(activations.ptr(), activations.bytes(), 1, &other)?;
            activations.free()?;
            memory.commit(16..32, &stream)?;
            graph.replay(&stream)?;
            on.expect("what the graph wrote", &memory, 20..24, 7, &stream)?;
            memory.decommit(0..64, &stream)?;
            on.expect_reserved("for both", 32 * MIB)?;
        }
        Ok(())
    })
}

fn rows_of_a_tensor_share_pages(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let stream = on.stream()?;
        // (layers, 2, blocks, …): four blocks to a page, and the rows begin with pages.
        let memory = on.reserve(8, 32, MIB / 2, &stream)?;
        expect_eq("blocks to a page", memory.layout().blocks_per_page(2 * MIB), Some(4))?;
        for block in 0..8 {
            memory.commit(block..block + 1, &stream)?;
            on.write(&memory, block..block + 1, block as u32, &stream)?;
            on.expect_reserved("in whole pages", 8 * (block / 4 + 1) * 2 * MIB)?;
        }
        memory.decommit(1..4, &stream)?;
        for block in [0, 4, 5, 6, 7] {
            on.expect("a block", &memory, block..block + 1, block as u32, &stream)?;
        }
        let before = on.remaps()?;
        let activations = on.block(16 * MIB, &stream)?;
        expect(on.remaps()?[0] > before[0], "the pages of block 0 are in use")?;
        drop(activations);
        Ok(())
    })
}

fn a_commit_that_does_not_fit_changes_nothing(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (stream, device) = (on.stream()?, context.device_id);
        let memory = on.reserve(1, 1000, 2 * MIB, &stream)?;
        on.paged.set_memory_cap(device, Some(128 * MIB))?;
        memory.commit(0..32, &stream)?;
        on.write(&memory, 28..32, 4, &stream)?;
        expect_eq("headroom", headroom(&on.paged, context.device())?, 64 * MIB)?;
        match memory.commit(16..65, &stream) {
            Err(Error::OutOfMemory(report)) => expect_eq("the cause", report.cause, OomCause::Limit)?,
            other => expect(false, &format!("beyond the cap: {other:?}"))?,
        }
        expect_eq("committed blocks", memory.committed(), 32)?;
        memory.commit(16..64, &stream)?;
        expect_eq("headroom when all is in use", headroom(&on.paged, context.device())?, 0)?;
        on.paged.set_memory_cap(device, None)?;
        on.expect("a block from before", &memory, 28..32, 4, &stream)
    })
}
