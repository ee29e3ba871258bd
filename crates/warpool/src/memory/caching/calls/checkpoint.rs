//! Checkpoints of private pools.

use warpool_driver::DeviceId;

use crate::Result;
use crate::memory::caching::CachingAllocator;
use crate::memory::caching::device::CachingDevice;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::caching::state::DeviceState;
use crate::memory::checkpoint::restore_ordered;
use crate::memory::{Checkpoints, MemPoolId, PoolCheckpoint, Restored, StackLevel};

impl Checkpoints for CachingAllocator {
    fn checkpoint(&self, device: DeviceId, pool: MemPoolId) -> Result<PoolCheckpoint> {
        self.device_without_pending(device)?.read(|state| state.checkpoint(self.shared.key, pool))
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        checkpoint.expect_of(self.shared.key)?;
        let device = self.device_without_pending(checkpoint.device())?;
        let details = device.entry_details(StackLevel::State);
        let undo = |state: &mut DeviceState, restored: Result<Option<Restored>>| {
            let allocated = restored.ok().flatten().map(|restored| restored.allocated).unwrap_or_default();
            allocated.iter().for_each(|allocation| state.abandon(allocation, &details));
        };
        let restored = restore_ordered(
            &self.shared.instance,
            checkpoint.pool(),
            || device.read(|state| state.order_for(checkpoint)),
            |ordered| device.with(|state| state.restore(checkpoint, ordered, &details), undo),
        )?;
        if let Err(error) = PendingFrees::new(device, &details).process_all() {
            tracing::warn!(%error, "no fence could be recorded for a freed block; it is retried");
        }
        Ok(restored)
    }
}

impl CachingAllocator {
    /// The device, after pending frees have been processed.
    fn device_without_pending(&self, device: DeviceId) -> Result<&CachingDevice> {
        let device = self.device(device)?;
        let processed = PendingFrees::new(device, &device.entry_details(StackLevel::All)).process_all();
        device.report();
        processed?;
        Ok(device)
    }
}
