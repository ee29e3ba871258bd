//! Device memory beside idle streams, pending frees, scopes and blocks.

use warpool::memory::pools::{Checkpoints as _, PoolOptions, Route};
use warpool::memory::raw::Request;
use warpool::memory::{DeviceAllocator, MemPool};

use super::clock::timed;
use super::simulated::{DEVICE, Gpu, touched_memory};
use crate::bench::measure::ns_each;
use crate::output::Result;

/// New streams that are timed.
const NEW_STREAMS: u64 = 500;

/// Checkpoints that are timed.
const CHECKPOINTS: u64 = 200;

/// The first allocation on a stream, where n others have memory.
pub fn first_allocation(n: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    for stream in gpu.streams(n)? {
        gpu.caching.allocate_raw(gpu.request(stream))?;
    }
    let mut streams = gpu.streams(NEW_STREAMS)?.into_iter();
    let _touched = touched_memory();
    let elapsed = timed(NEW_STREAMS, || {
        streams.next().map_or(Ok(()), |stream| gpu.caching.allocate_raw(gpu.request(stream)).map(drop))
    })?;
    Ok(ns_each(elapsed, NEW_STREAMS))
}

/// An unrelated pair, while n streams have yet to pass the fence of a freed block.
pub fn pair_beside_pending(n: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    for stream in gpu.streams(n)? {
        gpu.sim.pause_stream(stream)?;
        let block = gpu.caching.allocate_raw(gpu.request(gpu.stream))?;
        gpu.caching.record_use_raw(block.ptr, stream)?;
        gpu.caching.free_raw(block.ptr)?;
    }
    gpu.pair_ns()
}

/// A pair for the default pool, while n scopes route other streams' requests to their pools.
pub fn pair_beside_scopes(n: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    let mut open = Vec::new();
    for stream in gpu.streams(n)? {
        let pool = MemPool::new(&gpu.allocator(), &gpu.device, PoolOptions::default())?;
        open.push((pool.route(Route::Stream(stream))?, pool));
    }
    gpu.pair_ns()
}

/// A checkpoint of a pool with one block, beside n blocks of the default pool.
pub fn checkpoint(n: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    for _ in 0..n {
        gpu.caching.allocate_raw(gpu.request(gpu.stream))?;
    }
    let pool = MemPool::new(&gpu.allocator(), &gpu.device, PoolOptions::default())?;
    gpu.caching.allocate_raw(Request { pool: Some(pool.id()), ..gpu.request(gpu.stream) })?;
    let elapsed = timed(CHECKPOINTS, || gpu.caching.checkpoint(DEVICE, pool.id()).map(drop))?;
    Ok(ns_each(elapsed, CHECKPOINTS))
}
