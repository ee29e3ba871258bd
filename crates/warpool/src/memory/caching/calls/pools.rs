//! What the calls about pools need of this allocator.

use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr};

use crate::Result;
use crate::memory::caching::CachingAllocator;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::caching::source;
use crate::memory::caching::state::BlockPools;
use crate::memory::core::{AllocatorCore, DeviceCore};
use crate::memory::pool_owner::{PoolOwner, SleepingPoolOwner};
use crate::memory::pool_table::PoolTable;
use crate::memory::{Asleep, MemPoolId, PoolOptions, PoolSleep, PoolUser, StackLevel};
use crate::unwind::drop_user_value;

impl PoolOwner for CachingAllocator {
    const NAME: &'static str = "caching";

    type Memory = BlockPools;

    fn shared(&self) -> &Arc<AllocatorCore> {
        &self.shared
    }

    fn device_core(&self, device: DeviceId) -> Result<&DeviceCore> {
        self.device(device).map(|device| &**device)
    }

    fn with_pools<R>(&self, device: DeviceId, step: impl FnOnce(&mut PoolTable<BlockPools>) -> R) -> Result<R> {
        Ok(self.device(device)?.change(|state| step(&mut state.pools)))
    }

    fn add_pool(&self, device: DeviceId, id: MemPoolId, options: PoolOptions) -> Result<()> {
        self.device(device)?.change(|state| state.add_pool(id, options));
        Ok(())
    }

    fn end_use(&self, device: DeviceId, id: MemPoolId, user: PoolUser) -> Result<()> {
        let device = self.device(device)?;
        let removed = device.change(|state| state.release_pool(id, user))?;
        self.pool_was_released(device, id);
        drop_user_value(removed);
        Ok(())
    }

    fn process_pending(&self, device: DeviceId) -> Result<()> {
        let device = self.device(device)?;
        let outcome = PendingFrees::new(device, &device.entry_details(StackLevel::State)).process();
        device.report();
        outcome
    }

    fn allocated_in(&self, device: DeviceId, id: MemPoolId) -> Result<Vec<DevicePtr>> {
        self.device(device)?.read(|state| state.allocated_addresses(id))
    }

    fn sleeper(&self) -> Option<&dyn PoolSleep> {
        Some(self)
    }
}

impl SleepingPoolOwner for CachingAllocator {
    fn release_segments(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let device = self.device(device)?;
        let details = device.timed_details(StackLevel::All);
        let slow = device.lock_slow();
        let released = PendingFrees::new(&slow, &details).wait().and_then(|()| {
            let has_graphs = slow.read(|state| Result::Ok(state.pools.get(pool)?.has_graphs))?;
            if has_graphs { Ok(0) } else { source::release_pool(&slow, pool, &details) }
        });
        drop(slow);
        device.report();
        released
    }

    fn put_asleep(
        &self,
        device: DeviceId,
        pool: MemPoolId,
        asleep: Option<Asleep>,
        within_limit: bool,
    ) -> Result<bool> {
        Ok(self.device(device)?.change(|state| state.put_asleep(pool, asleep, within_limit)))
    }
}
