//! Pinned memory from several threads at once.

use std::panic::resume_unwind;
use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use warpool::memory::{HostAllocator, PinnedSettings};

use super::simulated::Gpu;
use crate::bench::measure::ns_each;
use crate::output::Result;

/// Blocks of each thread.
const SLOTS: usize = 64;

/// Calls of each thread that are timed: many more than a thread runs before the next one gets its core.
const CALLS: u64 = 100_000;

/// A random call (an allocation of 4 KiB to 16 MiB, or a free) of n threads at once: its part of the elapsed time of
/// all cores, so that it does not depend on their number.
pub fn random_sizes(threads: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    let allocator = HostAllocator::new(gpu.device.instance(), PinnedSettings::default());
    let barrier = Barrier::new(usize::try_from(threads).unwrap_or(usize::MAX));
    // Each thread reads the clock itself: on few cores, another one would see the start late.
    let clock = Instant::now();
    let spans = thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads)
            .map(|seed| {
                let (allocator, barrier) = (&allocator, &barrier);
                scope.spawn(move || {
                    // The first pass pins the memory that the second one finds cached.
                    let warmed = program(allocator, seed);
                    barrier.wait();
                    let start = clock.elapsed();
                    warmed.and_then(|()| program(allocator, seed)).map(|()| start..clock.elapsed())
                })
            })
            .collect();
        let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        spawned.into_iter().map(join).collect::<warpool::Result<Vec<_>>>()
    })?;
    allocator.close()?;
    let start = spans.iter().map(|span| span.start).min().unwrap_or_default();
    let elapsed = spans.iter().map(|span| span.end).max().unwrap_or_default().saturating_sub(start);
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64).min(threads);
    Ok(ns_each(elapsed, CALLS * threads) * cores as f64)
}

fn program(allocator: &HostAllocator, seed: u64) -> warpool::Result<()> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut slots: Vec<_> = (0..SLOTS).map(|_| None).collect();
    for _ in 0..CALLS {
        let slot = &mut slots[rng.usize(..SLOTS)];
        *slot = match slot.take() {
            Some(block) => {
                drop(block);
                None
            }
            None => Some(allocator.allocate(4096 << rng.u32(..13))?),
        };
    }
    Ok(())
}
