//! Checkpoints of private pools.

use std::collections::BTreeSet;

use warpool_driver::DeviceId;

use crate::capture::CaptureStatus;
use crate::memory::caching::CachingAllocator;
use crate::memory::caching::device::CachingDevice;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::caching::state::StreamOrder;
use crate::memory::checkpoint::{PoolCheckpoint, Restored};
use crate::memory::stream_fence;
use crate::memory::{MemPoolId, StackLevel};
use crate::{Error, Result};

impl CachingAllocator {
    /// Records the allocated blocks of a pool. Fails if the free of one of its blocks is pending, or if the pool is
    /// released.
    pub fn checkpoint(&self, device: DeviceId, pool: MemPoolId) -> Result<PoolCheckpoint> {
        self.device_without_pending(device)?.read(|state| state.checkpoint(self.key, pool))
    }

    /// Frees all allocated blocks of the pool, and allocates the recorded blocks again. Fails without any change if
    /// some of that memory was released since. Owners of blocks from before the call free nothing when they are
    /// dropped. Memory that other streams use waits for them, as after any free. The stream of a restored block waits
    /// for the streams that use its memory; these must not be capturing.
    pub fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        checkpoint.expect_of(self.key)?;
        let device = self.device_without_pending(checkpoint.device())?;
        let details = device.entry_details(StackLevel::State);
        let mut ordered = BTreeSet::new();
        let restored = loop {
            let orders = device.read(|state| state.order_for(checkpoint))?;
            for order in orders.difference(&ordered) {
                self.order_streams(checkpoint.pool(), order)?;
            }
            ordered.extend(orders);
            let restored = device.with(
                |state| state.restore(checkpoint, &ordered, &details),
                |state, restored| {
                    let allocated = restored.ok().flatten().map(|restored| restored.allocated).unwrap_or_default();
                    allocated.iter().for_each(|allocation| state.abandon(allocation, &details));
                },
            )?;
            // `None` if another thread has recorded a use meanwhile.
            if let Some(restored) = restored {
                break restored;
            }
        };
        if let Err(error) = PendingFrees::new(device, &details).process_all() {
            tracing::warn!(%error, "no fence could be recorded for a freed block; it is retried");
        }
        Ok(restored)
    }

    /// Makes the stream of a block to be restored wait for a stream that uses its memory.
    fn order_streams(&self, pool: MemPoolId, order: &StreamOrder) -> Result<()> {
        let is_ordered = if order.in_capture {
            // Uses in a capture were joined when the capture ended.
            let refuses = |stream| Result::Ok(CaptureStatus::of(self.driver(), stream)?.refuses_work());
            !refuses(order.user)? && !refuses(order.own)?
        } else {
            stream_fence::order_outside_captures(self.shared.instance(), order.user, order.own)?
        };
        if is_ordered {
            return Ok(());
        }
        let why =
            format!("{} uses memory of a block to be restored, and a capture is under way; end it first", order.user);
        Err(Error::Checkpoint { pool, why })
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
