//! The contents of memory, with every allocator: while several streams share it, after its reuse, after sleep and wake,
//! and after a pool is restored. The other suites check calls one by one; here programs run, and every block must hold
//! what its owner wrote, and the statistics what the program counts itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpool::graph::CaptureOptions;
use warpool::memory::pools::PoolOptions;
use warpool::memory::sleep::Keep;
use warpool::memory::{
    Allocate, CachingAllocator, DeviceBlock, DriverPoolAllocator, HostAllocator, MemPool, MemPoolId, PagedAllocator,
    PinnedSettings, Settings, Tags,
};
use warpool::{DeviceVec, PinnedVec, Stream, StreamLease};
use warpool_driver::CaptureMode;

use super::helpers::{PLAIN, SharedAllocator, graph};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, expect_slice_eq, require};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    blocks_keep_their_contents_while_streams_share_memory,
    a_block_used_by_four_streams_waits_for_each,
    all_of_a_large_block_sleeps_and_wakes,
    a_restored_pool_leaves_other_blocks_alone,
    typed_memory_keeps_its_contents,
    captures_begin_and_end_beside_typed_work,
];

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const STREAMS: usize = 4;

/// An allocator with its name for failures, and whether its memory sleeps.
struct Subject {
    name: &'static str,
    allocator: SharedAllocator,
    sleeps: bool,
}

impl Subject {
    /// Without pools it serves no graphs, and restores nothing.
    fn has_pools(&self) -> bool {
        self.name != "driver-pool"
    }
}

/// Every allocator that this device can have.
fn subjects(context: &TestContext) -> CheckResult<Vec<Subject>> {
    let (instance, properties) = (context.instance(), context.device().properties());
    let mut found = Vec::new();
    let mut caching = |name, settings| {
        let allocator = Arc::new(CachingAllocator::new(instance, settings));
        found.push(Subject { name, allocator, sleeps: properties.virtual_memory });
    };
    caching("native", Settings::default());
    if properties.virtual_memory {
        caching("expandable", Settings { expandable_segments: true, ..Settings::default() });
        let allocator = Arc::new(PagedAllocator::new(instance, Settings::default())?);
        found.push(Subject { name: "paged", allocator, sleeps: true });
    }
    if properties.async_pools {
        let allocator = Arc::new(DriverPoolAllocator::new(instance));
        found.push(Subject { name: "driver-pool", allocator, sleeps: false });
    }
    Ok(found)
}

/// Runs `body` on each of the allocators, and then expects that all memory can be returned to the driver.
fn on_each(context: &TestContext, body: impl Fn(&Program<'_>) -> CheckResult) -> CheckResult {
    for subject in subjects(context)? {
        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            streams.push(context.device().lease_stream()?);
        }
        let program = Program { context, subject: &subject, streams };
        let outcome = body(&program);
        // Work of a failed body must not use memory that is freed now. The body's failure is the one to report.
        let synchronized = context.device().synchronize();
        drop(program);
        let outcome = outcome.and_then(|()| {
            synchronized?;
            subject.allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
            let stats = subject.allocator.stats(context.device_id)?;
            let left = (stats.active.all.current, stats.reserved_bytes.all.current);
            expect_eq("active blocks and reserved bytes at the end", left, (0, 0))
        });
        outcome.map_err(|stop| match stop {
            CheckError::Failed(text) => CheckError::Failed(format!("{}: {text}", subject.name)),
            other => other,
        })?;
    }
    Ok(())
}

/// An allocator, some streams, and what the program does with blocks.
struct Program<'a> {
    context: &'a TestContext,
    subject: &'a Subject,
    streams: Vec<StreamLease>,
}

/// A block with the first word of the sequence in it.
struct Written {
    block: DeviceBlock,
    first: u32,
    stream: usize,
}

impl Program<'_> {
    fn write(&self, bytes: u64, first: u32, stream: usize) -> CheckResult<Written> {
        let block = self.subject.allocator.allocate(bytes, &self.streams[stream])?;
        self.context.write_sequence(block.ptr(), bytes, first, &self.streams[stream])?;
        Ok(Written { block, first, stream })
    }

    #[track_caller]
    fn expect(&self, what: &str, written: &Written) -> CheckResult {
        let (ptr, bytes) = (written.block.ptr(), written.block.bytes());
        self.context.expect_sequence(what, ptr, bytes, written.first, &self.streams[written.stream])
    }

    /// Another stream reads the block, late, into a new one.
    fn read_elsewhere(&self, from: &Written, stream: usize) -> CheckResult<Written> {
        let other: &Stream = &self.streams[stream];
        let bytes = from.block.bytes();
        let to = self.subject.allocator.allocate(bytes, other)?;
        other.wait_stream(&self.streams[from.stream])?;
        self.context.delay(other.id())?;
        self.context.add_sequence(to.ptr(), from.block.ptr(), bytes, 3, other)?;
        from.block.record_use(other)?;
        Ok(Written { block: to, first: from.first.wrapping_add(3), stream })
    }

    /// The statistics must be what the program has.
    fn expect_statistics(&self, live: &[Written], peak: u64) -> CheckResult {
        let stats = self.subject.allocator.stats(self.context.device_id)?;
        let bytes: u64 = live.iter().map(|written| written.block.bytes_usable()).sum();
        expect_eq("allocated blocks", stats.allocation.all.current, live.len() as u64)?;
        expect_eq("allocated bytes", stats.allocated_bytes.all.current, bytes)?;
        expect_eq("the peak of allocated bytes", stats.allocated_bytes.all.peak, peak)?;
        expect(stats.reserved_bytes.all.current >= bytes, "what is allocated is reserved")
    }
}

fn blocks_keep_their_contents_while_streams_share_memory(context: &TestContext) -> CheckResult {
    const STEPS: u32 = 160;
    on_each(context, |on| {
        let (mut live, mut peak): (Vec<Written>, u64) = (Vec::new(), 0);
        for step in 1..=STEPS {
            let stream = context.random_below(STREAMS as u64) as usize;
            match context.random_below(5) {
                0 | 1 => {
                    let bytes = match context.random_below(4) {
                        0 => 4 * (1 + context.random_below(2000)),
                        1 | 2 => 4 * KIB * (1 + context.random_below(300)),
                        _ => MIB + 4 * KIB * context.random_below(700),
                    };
                    live.push(on.write(bytes, step << 16, stream)?);
                }
                2 if !live.is_empty() => {
                    let at = context.random_below(live.len() as u64) as usize;
                    if live[at].stream != stream {
                        live.push(on.read_elsewhere(&live[at], stream)?);
                    }
                }
                _ if !live.is_empty() => {
                    let at = context.random_below(live.len() as u64) as usize;
                    let gone = live.swap_remove(at);
                    // Not always: most blocks are freed while work on them is queued.
                    if step % 3 == 0 {
                        on.expect("a block before it is freed", &gone)?;
                    }
                    gone.block.free()?;
                }
                _ => {}
            }
            peak = peak.max(live.iter().map(|written| written.block.bytes_usable()).sum());
            on.expect_statistics(&live, peak)?;
        }
        live.iter().try_for_each(|written| on.expect("a block at the end", written))
    })
}

fn a_block_used_by_four_streams_waits_for_each(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 3 * MIB;
    on_each(context, |on| {
        // Each of them is the last to finish once.
        for slow in 1..STREAMS {
            let block = on.write(BYTES, 7, 0)?;
            let mut readers = Vec::new();
            for stream in 1..STREAMS {
                if stream == slow {
                    context.keep_stream_busy(&on.streams[stream])?;
                }
                readers.push(on.read_elsewhere(&block, stream)?);
            }
            block.block.free()?;
            let mut others = Vec::new();
            for first in 1..4 {
                others.push(on.write(BYTES, first << 20, 0)?);
            }
            for reader in &readers {
                on.expect("what a stream read of the freed block", reader)?;
            }
            for other in &others {
                on.expect("a block that was allocated after it", other)?;
            }
        }
        Ok(())
    })
}

fn all_of_a_large_block_sleeps_and_wakes(context: &TestContext) -> CheckResult {
    require(context.device().properties().virtual_memory, "the device has no virtual memory management")?;
    // Copies are made in parts of 64 MiB: each size ends within one, and the last bytes count.
    let sizes = [64 * MIB + 4, 65 * MIB + 12 * KIB];
    on_each(context, |on| {
        if !on.subject.sleeps {
            return Ok(());
        }
        let host = HostAllocator::new(context.instance(), PinnedSettings::default());
        let tags = Tags::new(&on.subject.allocator, &host)?;
        let mut blocks = Vec::new();
        for (number, bytes) in (1..).zip(sizes) {
            let _scope = tags.tag(context.device(), "weights")?.enter()?;
            blocks.push(on.write(bytes, number << 24, 0)?);
        }
        tags.sleep(&["weights"], Keep::Host)?;
        // A part that is not restored would contain this other data.
        let other = on.write(80 * MIB, 5, 1)?;
        on.expect("another block", &other)?;
        other.block.free()?;
        on.subject.allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        tags.wake(&["weights"])?;
        for block in &blocks {
            on.expect("a large block after waking", block)?;
        }
        drop((blocks, tags));
        Ok(host.close()?)
    })
}

fn a_restored_pool_leaves_other_blocks_alone(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        if !on.subject.has_pools() {
            return Ok(());
        }
        let allocator = &on.subject.allocator;
        let pools = allocator.checkpoints()?;
        let pool = MemPool::new(allocator, context.device(), PoolOptions::default())?;
        let outside = on.write(2 * MIB, 1 << 20, 0)?;
        let inside = |first, bytes| -> CheckResult<Written> {
            let _scope = pool.enter()?;
            on.write(bytes, first, 0)
        };
        let kept = [inside(2 << 20, 2 * MIB)?, inside(3 << 20, 300 * KIB)?];
        context.device().synchronize()?;
        let checkpoint = pools.checkpoint(context.device_id, pool.id())?;
        let later = inside(4 << 20, 5 * MIB)?;
        on.expect("a block of the pool", &later)?;
        let addresses: Vec<_> = kept.iter().map(|written| (written.block.ptr(), written.block.bytes())).collect();
        let restored = pools.restore(&checkpoint)?;
        // Their memory belongs to the checkpoint's blocks again.
        for stale in kept.into_iter().chain([later]) {
            let _ = stale.block.into_raw();
        }
        let mut found: Vec<_> = restored.allocated.iter().map(|it| (it.ptr, it.bytes_requested)).collect();
        found.sort_unstable();
        let mut wanted = addresses.clone();
        wanted.sort_unstable();
        expect_eq("the restored blocks", found, wanted)?;
        let again = [on.write(3 * MIB, 6 << 20, 0)?, on.write(300 * KIB, 7 << 20, 1)?];
        for (ptr, bytes) in addresses {
            context.write_sequence(ptr, bytes, 9 << 20, &on.streams[0])?;
        }
        on.expect("a block of another pool", &outside)?;
        again.iter().try_for_each(|written| on.expect("a block that was allocated after", written))?;
        for allocation in restored.allocated {
            allocator.free(allocation)?;
        }
        Ok(pool.close()?)
    })
}

fn typed_memory_keeps_its_contents(context: &TestContext) -> CheckResult {
    const LEN: usize = 300_000;
    on_each(context, |on| {
        let host = HostAllocator::new(context.instance(), PinnedSettings::default());
        let allocator = &on.subject.allocator;
        let expected = |round: u32| (0..LEN as u32).map(|at| at ^ (round << 24)).collect::<Vec<u32>>();
        let mut results = Vec::new();
        for round in 0..6_u32 {
            let [first, second, third] = [0, 1, 2].map(|at| &on.streams[(round as usize + at) % STREAMS]);
            let pinned = PinnedVec::from_slice(&host, &expected(round))?;
            let (mut one, mut two) =
                (DeviceVec::uninit(allocator, LEN, first)?, DeviceVec::<u32>::uninit(allocator, LEN, second)?);
            context.delay(first.id())?;
            first.copy(&pinned, &mut one)?;
            // Both sources are dropped while the copies are queued, and their memory is used again at once.
            drop(pinned);
            second.copy(&one, &mut two)?;
            drop(one);
            let mut reused = DeviceVec::<u32>::uninit(allocator, LEN, first)?;
            first.fill(&mut reused, 0xDEAD)?;
            let mut back = PinnedVec::<u32>::zeroed(&host, LEN)?;
            third.copy(two.slice(..)?, &mut back)?;
            drop(two);
            results.push((round, back, reused));
        }
        for (round, mut back, reused) in results {
            expect_slice_eq("what came back", back.wait_mut()?, &expected(round))?;
            let reused = reused.to_vec(&on.streams[0])?;
            expect(reused.iter().all(|&word| word == 0xDEAD), "a vector in reused memory holds what was filled in")?;
        }
        context.device().synchronize()?;
        Ok(host.close()?)
    })
}

fn captures_begin_and_end_beside_typed_work(context: &TestContext) -> CheckResult {
    const LEN: usize = 5000;
    on_each(context, |on| {
        let allocator = &on.subject.allocator;
        if !on.subject.has_pools() {
            return Ok(());
        }
        // One thread captures in it, and the other puts work into it: each piece runs, or the graph keeps its memory.
        let shared = context.device().pool_stream()?;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let captures = scope.spawn(|| {
                let outcome = capture_rounds(on, &shared);
                done.store(true, Ordering::Release);
                outcome
            });
            let typed = || -> CheckResult {
                let (own, mut round) = (&on.streams[1], 0);
                while !done.load(Ordering::Acquire) {
                    round += 1;
                    let mut short_lived = DeviceVec::<u32>::uninit(allocator, LEN, &shared)?;
                    // A capture may refuse the call; then nothing was queued.
                    let _ = shared.fill(&mut short_lived, 0xDEAD);
                    drop(short_lived);
                    let mut kept = DeviceVec::<u32>::uninit(allocator, LEN, own)?;
                    own.fill(&mut kept, round)?;
                    let found = kept.to_vec(own)?;
                    expect(found.iter().all(|&word| word == round), "a vector in a stream of its own")?;
                }
                Ok(())
            };
            let typed = typed();
            join(captures).and(typed)
        })
    })
}

/// Captures a fill, replays it, and expects what it wrote, many times.
fn capture_rounds(on: &Program<'_>, shared: &Stream) -> CheckResult {
    let own = &on.streams[0];
    for round in 1..=60_u32 {
        let mut output = DeviceVec::<u32>::zeroed(&on.subject.allocator, 4000, own)?;
        let mut captured = graph(on.context, &on.subject.allocator)?;
        let options = CaptureOptions { mode: CaptureMode::Relaxed, ..PLAIN };
        captured.capture(shared, options, |capture| capture.stream().fill(&mut output, round))?;
        captured.replay(shared)?;
        let found = output.to_vec(own)?;
        expect(found.iter().all(|&word| word == round), "what a replay wrote")?;
    }
    Ok(())
}
