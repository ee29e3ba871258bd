//! Captures and graphs beside deferred frees and streams of earlier replays.

use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::DeviceAllocator;
use warpool_driver::{CaptureMode, Pattern};

use super::clock::timed;
use super::simulated::Gpu;
use crate::bench::measure::ns_each;
use crate::output::Result;

/// Replays that are timed: fewer than a stream's queue holds.
const REPLAYS: u64 = 200;

/// An unrelated pair, while a capture defers n frees.
pub fn pair_beside_deferred(n: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    let captured = gpu.device.lease_stream()?;
    let mut graph = Graph::new(&gpu.allocator(), &gpu.device, GraphOptions::default())?;
    let options = CaptureOptions { mode: CaptureMode::Relaxed, ..CaptureOptions::default() };
    let blocks =
        (0..n).map(|_| gpu.caching.allocate_raw(gpu.request(gpu.stream))).collect::<warpool::Result<Vec<_>>>()?;
    graph.capture(&captured, options, |capture| {
        let buffer = capture.allocate(512)?;
        capture.fill(buffer, Pattern::U8(1), 512, &captured)?;
        for block in blocks {
            gpu.caching.record_use_raw(block.ptr, captured.id())?;
            gpu.caching.free_raw(block.ptr)?;
        }
        Ok(gpu.pair_ns())
    })?
}

/// A replay on the last of n streams that the graph was replayed on.
pub fn replay_on_last_stream(n: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    let streams = (0..n).map(|_| gpu.device.lease_stream()).collect::<warpool::Result<Vec<_>>>()?;
    let mut graph = Graph::new(&gpu.allocator(), &gpu.device, GraphOptions::default())?;
    let captured = gpu.device.lease_stream()?;
    graph.capture(&captured, CaptureOptions::default(), |capture| {
        let buffer = capture.allocate(512)?;
        capture.fill(buffer, Pattern::U8(1), 512, &captured)
    })?;
    let mut last = &captured;
    for stream in &streams {
        graph.replay(stream)?;
        stream.synchronize()?;
        last = stream;
    }
    let elapsed = timed(REPLAYS, || graph.replay(last))?;
    last.synchronize()?;
    Ok(ns_each(elapsed, REPLAYS))
}
