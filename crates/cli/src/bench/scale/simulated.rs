//! The simulated GPU itself, and the setup that the cases share.

use std::sync::Arc;

use warpool::memory::raw::Request;
use warpool::memory::{CachingAllocator, DeviceAllocator, Settings};
use warpool::{Device, Instance};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{DeviceId, Memory as _, StreamId, StreamOptions, Streams as _};

use super::clock::timed;
use crate::bench::measure::ns_each;
use crate::output::Result;

/// The device of all cases.
pub const DEVICE: DeviceId = DeviceId(0);

/// Operations that are timed at once.
pub const OPS: u64 = 2_000;

/// One simulated GPU with memory for anything.
pub struct Gpu {
    pub sim: Arc<SimDriver>,
    pub device: Device,
    pub caching: Arc<CachingAllocator>,
    /// The stream of the measured operations.
    pub stream: StreamId,
}

impl Gpu {
    pub fn new() -> Result<Self> {
        let config = SimConfig::default().with_devices(1).with_capacity(1 << 44).without_suballocation_tracking();
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(Arc::clone(&sim) as _)?;
        let device = instance.device(DEVICE.0)?;
        let caching = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let stream = device.pool_stream()?.id();
        Ok(Self { sim, device, caching, stream })
    }

    /// The allocator by its trait, as pools and graphs take it.
    pub fn allocator(&self) -> Arc<dyn DeviceAllocator> {
        Arc::clone(&self.caching) as _
    }

    pub fn streams(&self, count: u64) -> Result<Vec<StreamId>> {
        let options = StreamOptions { non_blocking: true, priority: 0 };
        let streams = (0..count).map(|_| self.sim.stream_create(DEVICE, options));
        Ok(streams.collect::<std::result::Result<_, _>>()?)
    }

    pub fn request(&self, stream: StreamId) -> Request {
        Request::new(DEVICE, stream, 512)
    }

    /// Nanoseconds of an allocate-free pair of this thread's stream.
    pub fn pair_ns(&self) -> Result<f64> {
        let request = self.request(self.stream);
        // The first one allocates the segment.
        let pair = || self.caching.allocate_raw(request).and_then(|block| self.caching.free_raw(block.ptr));
        pair()?;
        Ok(ns_each(timed(OPS, pair)?, OPS))
    }
}

/// Writes to much memory of this process and frees it, except for the last block, which is returned. Later host
/// allocations then get memory that the system has already mapped; otherwise the first case that grows pays for the
/// page faults.
pub fn touched_memory() -> Option<Vec<u8>> {
    const BLOCKS: usize = 4096;
    let mut blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| vec![1; 4096]).collect();
    blocks.pop()
}

/// A simulated `mem_free` beside n streams.
pub fn mem_free(n: u64) -> Result<f64> {
    let gpu = Gpu::new()?;
    let _streams = gpu.streams(n)?;
    let memory = (0..OPS).map(|_| gpu.sim.mem_alloc(DEVICE, 1 << 20)).collect::<std::result::Result<Vec<_>, _>>()?;
    let mut memory = memory.into_iter();
    let elapsed = timed(OPS, || memory.next().map_or(Ok(()), |ptr| gpu.sim.mem_free(ptr)))?;
    Ok(ns_each(elapsed, OPS))
}
