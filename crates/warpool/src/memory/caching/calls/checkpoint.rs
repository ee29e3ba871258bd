//! Checkpoints of private pools.

use warpool_driver::DeviceId;

use crate::Result;
use crate::memory::caching::device::CachingDevice;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::caching::{CachingAllocator, PoolCheckpoint, Restored};
use crate::memory::{MemPoolId, StackLevel};

impl CachingAllocator {
    /// Records the allocated blocks of a pool. Fails if one of its blocks waits for streams, or if the pool is
    /// released.
    pub fn checkpoint(&self, device: DeviceId, pool: MemPoolId) -> Result<PoolCheckpoint> {
        self.device_without_pending(device)?.read(|state| state.checkpoint(pool))
    }

    /// Frees what is allocated in the pool, and allocates again what the checkpoint recorded. Fails, and changes
    /// nothing, if some of that memory was released since.
    pub fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        let device = self.device_without_pending(checkpoint.device())?;
        let details = device.entry_details(StackLevel::State);
        let restored = device.with(
            |state| state.restore(checkpoint, &details),
            |state, restored| {
                let allocated = restored.map(|restored| restored.allocated).unwrap_or_default();
                allocated.iter().for_each(|allocation| state.abandon(allocation, &details));
            },
        )?;
        for &allocation in &restored.allocated {
            device.report_allocated(allocation);
        }
        Ok(restored)
    }

    /// The device, after pending frees have been processed.
    fn device_without_pending(&self, device: DeviceId) -> Result<&CachingDevice> {
        let device = self.device(device)?;
        let processed = PendingFrees::new(device, &device.entry_details(StackLevel::All)).process_all();
        device.report();
        processed?;
        Ok(device)
    }
}
