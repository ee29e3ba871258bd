//! What the calls about pools need of this allocator.

use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr};

use super::PagedAllocator;
use super::address_space::Location;
use super::device::PagedDevice;
use super::heap::State;
use super::pending::PendingFrees;
use super::pools::{PoolHeaps, Pools};
use super::segments;
use crate::memory::core::{AllocatorCore, DeviceCore};
use crate::memory::pool_owner::{PoolOwner, SleepingPoolOwner};
use crate::memory::report::EntryDetails;
use crate::memory::{Asleep, MemPoolId, PoolOptions, PoolSleep, PoolUser, SegmentKind, StackLevel};
use crate::unwind::drop_user_value;
use crate::{Error, Result, lock};

impl PagedDevice {
    /// Returns the free segments of pools in use whose upstreams take them: those of tags. Without any lock.
    pub(super) fn release_tagged(&self, details: &EntryDetails) -> Result<u64> {
        let pools = lock(&self.pools).with_upstream();
        let mut released = 0;
        for (pool, _) in pools.into_iter().filter(|(_, upstream)| upstream.takes_free_segments()) {
            match self.release_free_segments(pool, details) {
                Ok(bytes) => released += bytes,
                // Another thread released it meanwhile.
                Err(Error::UnknownPool { .. } | Error::PoolReleased { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(released)
    }

    /// Returns the free segments of a pool in use to its upstream, unless captures allocated from it.
    fn release_free_segments(&self, pool: MemPoolId, details: &EntryDetails) -> Result<u64> {
        PendingFrees::new(self, details).wait()?;
        let (heaps, users) = {
            let pools = lock(&self.pools);
            if pools.is_fixed(pool) {
                return Ok(0);
            }
            (pools.heaps(pool)?, pools.used_by(pool))
        };
        let mut released = 0;
        for number in heaps {
            let stream = self.heaps.get(number).lock().stream;
            for kind in [SegmentKind::Small, SegmentKind::Large] {
                let free = self.heaps.get(number).lock().free_segments(kind);
                for range in free {
                    let at = Location { heap: number, kind, range };
                    released += segments::release_segment(self, at, (stream, &users), details)?;
                }
            }
        }
        self.drop_removed();
        Ok(released)
    }
}

impl PoolOwner for PagedAllocator {
    const NAME: &'static str = "paged";

    type Memory = PoolHeaps;

    fn shared(&self) -> &Arc<AllocatorCore> {
        &self.shared
    }

    fn device_core(&self, device: DeviceId) -> Result<&DeviceCore> {
        self.device(device).map(|device| &**device)
    }

    fn with_pools<R>(&self, device: DeviceId, step: impl FnOnce(&mut Pools) -> R) -> Result<R> {
        Ok(step(&mut lock(&self.device(device)?.pools)))
    }

    fn add_pool(&self, device: DeviceId, id: MemPoolId, options: PoolOptions) -> Result<()> {
        self.with_pools(device, |pools| pools.add(id, options, PoolHeaps::default()))
    }

    fn end_use(&self, device: DeviceId, id: MemPoolId, user: PoolUser) -> Result<()> {
        let removed = self.with_pools(device, |pools| pools.end_use(id, user))??;
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
        let device = self.device(device)?;
        let heaps = lock(&device.pools).heaps(id)?;
        let mut found = Vec::new();
        for number in heaps {
            let heap = device.heaps.get(number).lock();
            let allocated = heap.all_blocks().filter(|(_, block)| block.state() == State::Allocated);
            found.extend(allocated.map(|(_, block)| DevicePtr(block.addr())));
        }
        Ok(found)
    }

    fn sleeper(&self) -> Option<&dyn PoolSleep> {
        Some(self)
    }
}

impl SleepingPoolOwner for PagedAllocator {
    fn release_segments(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let device = self.device(device)?;
        let details = device.timed_details(StackLevel::All);
        let released = device.release_free_segments(pool, &details);
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
        let device = self.device(device)?;
        let (mut table, mut pools) = (lock(&device.pages), lock(&device.pools));
        let more = asleep.as_ref().map_or(0, |asleep| pools.sleeping.bytes_more(pool, asleep));
        if more > 0 && within_limit && device.admit(&table, more).is_err() {
            return Ok(false);
        }
        pools.sleeping.set(pool, asleep);
        table.bytes_asleep = pools.sleeping.bytes();
        drop(pools);
        device.will_hold(table.bytes_held());
        Ok(true)
    }
}
