//! The paged allocator: free pages are unmapped where they are and mapped where they are needed, while work on them is
//! still queued. Kernels write and compare contents over all of a block, so that one wrong page shows. At most 1 GiB of
//! the device is used.

use std::sync::Arc;

use warpool::memory::pools::PoolOptions;
use warpool::memory::report::PageStats;
use warpool::memory::{Allocate, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, OomCause, PagedAllocator, Settings};
use warpool::{Error, Stream, StreamLease};

use super::helpers::{PLAIN, SharedAllocator, capture_sum, expect_wait_for_recorded_stream, graph};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, require};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    pages_move_to_another_address_behind_queued_work,
    page_has_one_content_at_old_and_new_address,
    pages_of_another_stream_are_used_after_its_work,
    pages_go_back_and_forth_between_streams,
    freed_block_waits_for_recorded_streams,
    pages_of_a_pending_free_are_not_taken,
    pages_of_a_captured_graph_stay,
    pages_of_a_released_pool_serve_others,
    churn_of_sizes_reserves_little_more_than_is_allocated,
    trim_returns_pages_to_the_driver,
    out_of_memory_is_reported_and_passes,
    sixteen_threads_take_pages_from_each_other,
];

const MIB: u64 = 1 << 20;

/// A paged allocator and the context of the check.
struct Paged<'a> {
    context: &'a TestContext,
    paged: Arc<PagedAllocator>,
    allocator: SharedAllocator,
}

/// Runs `body` on a paged allocator, and then expects that its state is consistent and that all memory can be returned
/// to the driver. Skips the check where there is no virtual memory.
fn on_paged(context: &TestContext, body: impl FnOnce(&Paged<'_>) -> CheckResult) -> CheckResult {
    require(context.device().properties().virtual_memory, "the device has no virtual memory management")?;
    let paged = Arc::new(PagedAllocator::new(context.instance(), Settings::default())?);
    let subject = Paged { context, allocator: paged.clone(), paged };
    let outcome = body(&subject);
    // Work of a failed body must not use memory that is freed now. The body's failure is the one to report.
    let synchronized = context.device().synchronize();
    outcome?;
    synchronized?;
    subject.paged.check();
    subject.paged.trim(context.device_id, MemPoolId::DEFAULT)?;
    subject.paged.check();
    let left = subject.pages()?;
    expect_eq("active and reserved bytes at the end", (left.active_bytes, left.reserved_bytes), (0, 0))
}

impl Paged<'_> {
    fn stream(&self) -> CheckResult<StreamLease> {
        Ok(self.context.device().lease_stream()?)
    }

    fn block(&self, bytes: u64, stream: &Stream) -> CheckResult<DeviceBlock> {
        Ok(self.allocator.allocate(bytes, stream)?)
    }

    fn write(&self, block: &DeviceBlock, first: u32, stream: &Stream) -> CheckResult {
        self.context.write_sequence(block.ptr(), block.bytes(), first, stream)
    }

    #[track_caller]
    fn expect(&self, what: &str, block: &DeviceBlock, first: u32, stream: &Stream) -> CheckResult {
        self.context.expect_sequence(what, block.ptr(), block.bytes(), first, stream)
    }

    fn copy(&self, to: &DeviceBlock, from: &DeviceBlock, stream: &Stream) -> CheckResult {
        let bytes = from.bytes().min(to.bytes());
        Ok(self.context.driver.copy(to.ptr().into(), from.ptr().into(), bytes, stream.id())?)
    }

    fn pages(&self) -> CheckResult<PageStats> {
        Ok(self.paged.page_stats(self.context.device_id)?)
    }

    /// Reserved memory must be `want`.
    #[track_caller]
    fn expect_reserved(&self, what: &str, want: u64) -> CheckResult {
        let reserved = self.pages()?.reserved_bytes;
        expect_eq(&format!("reserved bytes, {what}"), reserved, want)
    }

    fn limit_to(&self, bytes: Option<u64>) -> CheckResult {
        Ok(self.paged.set_memory_cap(self.context.device_id, bytes)?)
    }
}

fn pages_move_to_another_address_behind_queued_work(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let stream = on.stream()?;
        let result = on.block(16 * MIB, &stream)?;
        let first = on.block(16 * MIB, &stream)?;
        let between = on.block(2 * MIB, &stream)?;
        on.write(&between, 5, &stream)?;
        context.keep_stream_busy(&stream)?;
        on.write(&first, 1, &stream)?;
        on.copy(&result, &first, &stream)?;
        let address = first.ptr();
        first.free()?;
        // It does not fit where the first was, and takes its pages.
        let second = on.block(24 * MIB, &stream)?;
        expect(second.ptr() != address, "the larger block is at another address")?;
        on.write(&second, 2, &stream)?;
        context.expect_busy("the stream: nothing waited for it", stream.id())?;
        let pages = on.pages()?;
        expect(pages.reserved_bytes <= (42 + 4) * MIB, "at most a page more is reserved")?;
        expect_eq("bytes that are still mapped where they were", pages.bytes_mapped_twice, 16 * MIB)?;
        on.expect("the copy of the first block", &result, 1, &stream)?;
        on.expect("the second block", &second, 2, &stream)?;
        on.expect("the block between", &between, 5, &stream)
    })
}

fn page_has_one_content_at_old_and_new_address(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let stream = on.stream()?;
        let mut small = on.block(8 * MIB, &stream)?;
        let between = on.block(2 * MIB, &stream)?;
        on.write(&between, 77, &stream)?;
        // The same pages, at one address and at the other in turns, without a wait.
        for round in 0..40_u32 {
            on.write(&small, 1000 * round, &stream)?;
            small.free()?;
            let large = on.block(12 * MIB, &stream)?;
            on.write(&large, 1000 * round + 1, &stream)?;
            if round % 8 == 7 {
                on.expect("the larger block", &large, 1000 * round + 1, &stream)?;
            }
            large.free()?;
            small = on.block(8 * MIB, &stream)?;
            on.write(&small, 1000 * round + 2, &stream)?;
            if round % 8 == 7 {
                on.expect("the smaller block", &small, 1000 * round + 2, &stream)?;
            }
        }
        on.expect("the block between", &between, 77, &stream)?;
        let pages = on.pages()?;
        expect(pages.reserved_bytes <= 16 * MIB, "the blocks share their pages")?;
        expect(pages.totals.mapped <= 40, &format!("rounds map nothing new: {} mappings", pages.totals.mapped))
    })
}

fn pages_of_another_stream_are_used_after_its_work(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (giving, taking) = (on.stream()?, on.stream()?);
        let result = on.block(32 * MIB, &giving)?;
        let first = on.block(32 * MIB, &giving)?;
        context.keep_stream_busy(&giving)?;
        // After the long kernel: without the right order it would run after the other stream's work.
        on.write(&first, 1, &giving)?;
        on.copy(&result, &first, &giving)?;
        first.free()?;
        let second = on.block(32 * MIB, &taking)?;
        on.write(&second, 2, &taking)?;
        on.expect_reserved("with the pages of the other stream", 64 * MIB)?;
        context.expect_busy("the giving stream: the host did not wait", giving.id())?;
        on.expect("the block of the taking stream", &second, 2, &taking)?;
        on.expect("the copy in the giving stream", &result, 1, &giving)?;
        on.expect("the block of the taking stream afterwards", &second, 2, &taking)
    })
}

fn pages_go_back_and_forth_between_streams(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let streams = [on.stream()?, on.stream()?, on.stream()?];
        let results = [0, 1, 2].map(|index: usize| on.block(24 * MIB, &streams[index]));
        let [first, second, third] = results;
        let results = [first?, second?, third?];
        for round in 0..24_u32 {
            let at = (round * round) as usize % 3;
            let bytes = u64::from(8 + round % 5 * 4) * MIB;
            let block = on.block(bytes, &streams[at])?;
            if round % 3 == 0 {
                context.delay(streams[at].id())?;
            }
            on.write(&block, 100 * round, &streams[at])?;
            on.copy(&results[at], &block, &streams[at])?;
            block.free()?;
            let copied = bytes.min(results[at].bytes());
            if round % 4 == 3 {
                let ptr = results[at].ptr();
                context.expect_sequence("a block that moved", ptr, copied, 100 * round, &streams[at])?;
            }
        }
        on.expect_reserved("the largest block beside the results", (72 + 24) * MIB)
    })
}

fn freed_block_waits_for_recorded_streams(context: &TestContext) -> CheckResult {
    on_paged(context, |on| expect_wait_for_recorded_stream(context, &on.allocator))
}

fn pages_of_a_pending_free_are_not_taken(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (own, user, taking) = (on.stream()?, on.stream()?, on.stream()?);
        let (block, result) = (on.block(16 * MIB, &own)?, on.block(16 * MIB, &user)?);
        user.wait_stream(&own)?;
        context.keep_stream_busy(&user)?;
        on.write(&block, 7, &user)?;
        on.copy(&result, &block, &user)?;
        block.record_use(&user)?;
        block.free()?;
        let (same, other) = (on.block(20 * MIB, &own)?, on.block(20 * MIB, &taking)?);
        on.write(&same, 8, &own)?;
        on.write(&other, 9, &taking)?;
        on.expect_reserved("beside the pending free", 72 * MIB)?;
        own.synchronize()?;
        taking.synchronize()?;
        context.expect_busy("the stream that uses the block", user.id())?;
        on.expect("the copy of the block", &result, 7, &user)?;
        on.expect("the block of the same stream", &same, 8, &own)?;
        on.expect("the block of another stream", &other, 9, &taking)?;
        // Now it is free.
        let next = on.block(16 * MIB, &taking)?;
        on.write(&next, 10, &taking)?;
        on.expect_reserved("with the pages of the completed free", 72 * MIB)?;
        on.expect("the block with its pages", &next, 10, &taking)
    })
}

fn pages_of_a_captured_graph_stay(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 6 * MIB;
    on_paged(context, |on| {
        let (stream, other) = (on.stream()?, on.stream()?);
        let input = Arc::new(on.block(BYTES, &stream)?);
        let mut graph = graph(context, &on.allocator)?;
        let key = graph.capture(&stream, PLAIN, |capture| {
            capture.share(Arc::clone(&input))?;
            capture_sum(context, capture, input.ptr(), BYTES, 9)
        })?;
        let output = graph.buffer(key)?.ptr();
        // A limit near what is reserved, so that free pages are reused.
        let reserved = on.pages()?.reserved_bytes;
        on.limit_to(Some(reserved + 48 * MIB))?;
        for round in 0..12_u32 {
            let user = if round % 2 == 0 { &stream } else { &other };
            let mut blocks = Vec::new();
            for (mib, first) in [(5, 1), (9, 2), (3, 3), (13, 4)] {
                blocks.push((on.block((mib + u64::from(round % 2)) * MIB, user)?, first));
            }
            blocks.iter().try_for_each(|(block, first)| on.write(block, *first, user))?;
            let too_large = on.allocator.allocate(64 * MIB, user);
            expect(matches!(too_large, Err(Error::OutOfMemory(_))), "the limit is reached")?;
            context.write_sequence(input.ptr(), BYTES, 1000 * round, &stream)?;
            graph.replay(&stream)?;
            context.expect_sequence("the output of the graph", output, BYTES, 1000 * round + 9, &stream)?;
            for (block, first) in &blocks {
                on.expect("a block outside the graph", block, *first, user)?;
            }
            if round % 4 == 3 {
                drop(blocks);
                on.paged.trim(context.device_id, MemPoolId::DEFAULT)?;
            }
        }
        on.limit_to(None)?;
        Ok(graph.reset()?)
    })
}

fn pages_of_a_released_pool_serve_others(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (stream, other) = (on.stream()?, on.stream()?);
        let pool = MemPool::new(&on.allocator, context.device(), PoolOptions::default())?;
        let result = on.block(24 * MIB, &stream)?;
        let private = on.allocator.allocate_in(&pool, 24 * MIB, &stream)?;
        on.write(&private, 1, &stream)?;
        private.free()?;
        let open = on.block(8 * MIB, &stream)?;
        on.write(&open, 2, &stream)?;
        on.expect_reserved("the pool keeps its pages", 56 * MIB)?;
        let private = on.allocator.allocate_in(&pool, 24 * MIB, &stream)?;
        context.keep_stream_busy(&stream)?;
        on.write(&private, 3, &stream)?;
        on.copy(&result, &private, &stream)?;
        private.free()?;
        pool.close()?;
        let taken = on.block(24 * MIB, &other)?;
        on.write(&taken, 4, &other)?;
        on.expect_reserved("with the pages of the released pool", 56 * MIB)?;
        on.expect("the block with the pool's pages", &taken, 4, &other)?;
        on.expect("the copy of the pool's block", &result, 3, &stream)?;
        on.expect("the block outside the pool", &open, 2, &stream)?;
        on.expect("the block with the pool's pages, afterwards", &taken, 4, &other)
    })
}

fn churn_of_sizes_reserves_little_more_than_is_allocated(context: &TestContext) -> CheckResult {
    const LIVE_MAX: u64 = 128 * MIB;
    const PAGE: u64 = 2 * MIB;
    on_paged(context, |on| {
        let streams = [on.stream()?, on.stream()?];
        let mut live: Vec<(DeviceBlock, u32, usize)> = Vec::new();
        let (mut bytes_live, mut peak_live, mut most_blocks) = (0, 0, 0);
        for round in 0..200_u32 {
            let bytes = match context.random_below(4) {
                0 => 1 + context.random_below(MIB),
                1 => 1 + context.random_below(4 * MIB),
                _ => 1 + context.random_below(12 * MIB),
            };
            while bytes_live + bytes > LIVE_MAX {
                let (block, first, at) = live.swap_remove(context.random_below(live.len() as u64) as usize);
                if round % 8 == 0 {
                    on.expect("a block among many", &block, first, &streams[at])?;
                }
                bytes_live -= block.bytes_usable();
                block.free()?;
            }
            let at = context.random_below(2) as usize;
            let block = on.block(bytes, &streams[at])?;
            on.write(&block, 10_000 * round, &streams[at])?;
            bytes_live += block.bytes_usable();
            peak_live = peak_live.max(bytes_live);
            live.push((block, 10_000 * round, at));
            most_blocks = most_blocks.max(live.len() as u64);
        }
        for (block, first, at) in &live {
            on.expect("a block at the end", block, *first, &streams[*at])?;
        }
        let stats = on.allocator.stats(context.device_id)?;
        expect_eq("peak of allocated bytes", stats.allocated_bytes.all.peak, peak_live)?;
        let peak = stats.reserved_bytes.all.peak;
        // Unused memory is less than a page per block: only the rest of the pages that blocks are in.
        let most = peak_live + most_blocks * PAGE;
        expect(peak <= most, &format!("{peak} bytes are reserved for {peak_live} in {most_blocks} blocks"))
    })
}

fn trim_returns_pages_to_the_driver(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let free = || Ok::<_, CheckError>(context.driver.mem_info(context.device_id)?.bytes_free);
        let stream = on.stream()?;
        let kept = on.block(32 * MIB, &stream)?;
        on.write(&kept, 1, &stream)?;
        let before = free()?;
        let large = on.block(256 * MIB, &stream)?;
        on.write(&large, 2, &stream)?;
        expect(free()? + 256 * MIB <= before, "the driver has so much less")?;
        large.free()?;
        expect_eq("bytes trimmed, down to more than is reserved", on.paged.trim_to(context.device_id, 512 * MIB)?, 0)?;
        expect_eq("bytes trimmed", on.paged.trim(context.device_id, MemPoolId::DEFAULT)?, 256 * MIB)?;
        expect(free()? >= before, "the driver has all of it again")?;
        on.expect("the block that was kept", &kept, 1, &stream)
    })
}

fn out_of_memory_is_reported_and_passes(context: &TestContext) -> CheckResult {
    on_paged(context, |on| {
        let (stream, other) = (on.stream()?, on.stream()?);
        on.limit_to(Some(128 * MIB))?;
        let blocks = [(40, &stream), (40, &other), (40, &stream)].map(|(mib, stream)| on.block(mib * MIB, stream));
        let [first, second, third] = blocks;
        let (first, second, third) = (first?, second?, third?);
        on.write(&second, 2, &other)?;
        let report = expect_out_of_memory(on, 16 * MIB, &stream)?;
        expect_eq("the cause of the error", report.0, OomCause::Limit)?;
        expect_eq("allocated bytes of the report", report.1, 120 * MIB)?;
        first.free()?;
        third.free()?;
        // All pages of both streams, after queued work, and the rest of the limit.
        let large = on.block(88 * MIB, &other)?;
        on.write(&large, 3, &other)?;
        on.expect_reserved("at the limit", 128 * MIB)?;
        on.expect("a block from before the error", &second, 2, &other)?;
        on.expect("a block after the error", &large, 3, &other)?;
        on.limit_to(None)?;
        let total = context.device().properties().bytes_total;
        let report = expect_out_of_memory(on, 2 * total, &stream)?;
        expect_eq("the cause of the error", report.0, OomCause::Device)?;
        expect_eq("out-of-memory errors", on.allocator.stats(context.device_id)?.num_ooms, 2)
    })
}

/// Expects that a request fails as out of memory. Returns the cause, and the allocated bytes of the report.
#[track_caller]
fn expect_out_of_memory(on: &Paged<'_>, bytes: u64, stream: &Stream) -> CheckResult<(OomCause, u64)> {
    match on.allocator.allocate(bytes, stream) {
        Err(Error::OutOfMemory(report)) => {
            expect_eq("requested bytes of the report", report.bytes_requested, bytes)?;
            Ok((report.cause, report.bytes_allocated))
        }
        Err(other) => Err(other.into()),
        Ok(block) => Err(CheckError::Failed(format!("expected that {bytes} bytes are out of memory, got {block:?}"))),
    }
}

fn sixteen_threads_take_pages_from_each_other(context: &TestContext) -> CheckResult {
    const THREADS: u32 = 16;
    on_paged(context, |on| {
        // Less than all threads could hold at once. Requests do not wait, but take each other's pages.
        on.limit_to(Some(80 * MIB))?;
        let work = |thread: u32| -> CheckResult {
            let stream = on.stream()?;
            let mut held: Vec<(DeviceBlock, u32)> = Vec::new();
            for round in 0..20 {
                let bytes = u64::from(1 + (thread * 7 + round * 13) % 16) * 300_000;
                match on.allocator.allocate(bytes, &stream) {
                    Ok(block) => {
                        let first = (thread << 24) + (round << 16);
                        on.write(&block, first, &stream)?;
                        held.push((block, first));
                    }
                    Err(Error::OutOfMemory(_)) => held.clear(),
                    Err(other) => return Err(other.into()),
                }
                if held.len() > 2 {
                    let (block, first) = held.swap_remove(0);
                    if round % 4 == 3 {
                        on.expect("a block of one thread of sixteen", &block, first, &stream)?;
                    }
                    block.free()?;
                }
            }
            held.iter().try_for_each(|(block, first)| on.expect("a block at the end", block, *first, &stream))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().map(join).collect::<CheckResult<Vec<()>>>()
        })?;
        let peak = on.allocator.stats(context.device_id)?.reserved_bytes.all.peak;
        expect(peak <= 80 * MIB, "reserved memory is within the limit")?;
        on.limit_to(None)
    })
}
