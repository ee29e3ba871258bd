//! The paged allocator beside streams that are destroyed or idle, requests of many scattered pages, and threads that
//! share a stream.

use std::panic::resume_unwind;
use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use warpool::memory::raw::Request;
use warpool::memory::{DeviceAllocator, PagedAllocator, Settings};
use warpool_driver::{StreamId, Streams as _};

use super::clock::{ThreadTime, timed};
use super::simulated::{DEVICE, Gpu};
use crate::bench::measure::{self, ns_each};
use crate::output::Result;

/// Allocations that are timed, each of which takes pages from another stream.
const TAKES: u64 = 2_000;

/// Allocations before those: destroyed streams are retired by requests that need pages.
const TAKES_BEFORE: u64 = 2_000;

/// Pairs of each thread.
const PAIRS: u64 = 200_000;

const MIB: u64 = 1 << 20;

/// One simulated GPU with a paged allocator.
struct Paged {
    gpu: Gpu,
    paged: PagedAllocator,
}

impl Paged {
    fn new() -> Result<Self> {
        let gpu = Gpu::new()?;
        let paged = PagedAllocator::new(gpu.device.instance(), Settings::default())?;
        Ok(Self { gpu, paged })
    }

    fn pair(&self, stream: StreamId, bytes: u64) -> warpool::Result<()> {
        let block = self.paged.allocate_raw(Request::new(DEVICE, stream, bytes))?;
        self.paged.free_raw(block.ptr)
    }

    /// Nanoseconds of a pair whose pages another stream had before.
    fn take_ns(&self) -> Result<f64> {
        self.turns_ns(&[self.gpu.device.pool_stream()?.id(), self.gpu.device.pool_stream()?.id()])
    }

    /// Nanoseconds of a pair of streams that take the same pages in turns.
    fn turns_ns(&self, streams: &[StreamId]) -> Result<f64> {
        let mut turns = streams.iter().cycle();
        let mut take = || turns.next().map_or(Ok(()), |&stream| self.pair(stream, 16 * MIB));
        timed(TAKES_BEFORE, &mut take)?;
        Ok(ns_each(timed(TAKES, take)?, TAKES))
    }
}

/// Taking pages from another stream, after n streams had memory at the same time and were destroyed.
pub fn take_beside_gone(n: u64) -> Result<f64> {
    let paged = Paged::new()?;
    let streams = paged.gpu.streams(n)?;
    let allocate = |&stream| paged.paged.allocate_raw(Request::new(DEVICE, stream, 512));
    let blocks = streams.iter().map(allocate).collect::<warpool::Result<Vec<_>>>()?;
    for (stream, block) in streams.into_iter().zip(blocks) {
        paged.paged.free_raw(block.ptr)?;
        paged.gpu.sim.stream_destroy(stream)?;
    }
    paged.take_ns()
}

/// Taking pages from another stream, while n others have memory and do nothing.
pub fn take_beside_idle(n: u64) -> Result<f64> {
    let paged = Paged::new()?;
    for stream in paged.gpu.streams(n)? {
        paged.paged.allocate_raw(Request::new(DEVICE, stream, 512))?;
    }
    paged.take_ns()
}

/// Taking pages from another stream, where n streams do so in turns. Each waits for those that did so last, of which
/// there is a maximum.
pub fn take_in_turns(n: u64) -> Result<f64> {
    let paged = Paged::new()?;
    paged.turns_ns(&paged.gpu.streams(n)?)
}

/// Per page, a request for n pages of which every second one of the same heap is free.
pub fn scattered_pages(n: u64) -> Result<f64> {
    let paged = Paged::new()?;
    let stream = paged.gpu.stream;
    // Pages of one size, so that both sizes of the case map the same number of pages per byte.
    paged.paged.set_page_sizes(u64::MAX, u64::MAX);
    let allocate = |_| paged.paged.allocate_raw(Request::new(DEVICE, stream, 2 * MIB));
    let blocks = (0..2 * n).map(allocate).collect::<warpool::Result<Vec<_>>>()?;
    for block in blocks.iter().step_by(2) {
        paged.paged.free_raw(block.ptr)?;
    }
    let start = ThreadTime::now();
    paged.paged.allocate_raw(Request::new(DEVICE, stream, n * 2 * MIB))?;
    Ok(ns_each(start.elapsed(), n))
}

/// Per page, a trim of n free pages.
pub fn trim(n: u64) -> Result<f64> {
    let paged = Paged::new()?;
    paged.paged.set_page_sizes(u64::MAX, u64::MAX);
    paged.pair(paged.gpu.stream, n * 2 * MIB)?;
    let start = ThreadTime::now();
    paged.paged.trim_to(DEVICE, 0)?;
    Ok(ns_each(start.elapsed(), n))
}

/// A pair of n threads that share a stream, one after the other: the elapsed time divided by the number of all pairs.
pub fn pair_of_threads(n: u64) -> Result<f64> {
    let paged = Paged::new()?;
    threads_ns(n, || paged.pair(paged.gpu.stream, 512))
}

/// The same with PyTorch's placement.
pub fn caching_pair_of_threads(n: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    threads_ns(n, || {
        gpu.caching.allocate_raw(gpu.request(gpu.stream)).and_then(|block| gpu.caching.free_raw(block.ptr))
    })
}

fn threads_ns(threads: u64, pair: impl Fn() -> warpool::Result<()> + Sync) -> Result<f64> {
    let barrier = Barrier::new(usize::try_from(threads).unwrap_or(usize::MAX));
    let clock = Instant::now();
    let spans = thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads)
            .map(|_| {
                let (pair, barrier) = (&pair, &barrier);
                scope.spawn(move || {
                    let warmed = pair();
                    barrier.wait();
                    let start = clock.elapsed();
                    warmed.and_then(|()| measure::timed(PAIRS, pair)).map(|_| start..clock.elapsed())
                })
            })
            .collect();
        let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        spawned.into_iter().map(join).collect::<warpool::Result<Vec<std::ops::Range<Duration>>>>()
    })?;
    let start = spans.iter().map(|span| span.start).min().unwrap_or_default();
    let end = spans.iter().map(|span| span.end).max().unwrap_or_default();
    Ok(ns_each(end.saturating_sub(start), PAIRS * threads))
}
