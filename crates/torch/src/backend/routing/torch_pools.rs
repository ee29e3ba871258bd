//! PyTorch's pools by their ids: how many uses each has, and which of our pools it is. Ours is created when it is first
//! needed, since PyTorch sets the options of a pool only after creating it. No call here makes a driver call.

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool::memory::MemPoolId;
use warpool::memory::pools::{PoolOptions, PrivatePools, Upstream};
use warpool_driver::DeviceId;

use crate::error::{Error, Result};
use crate::torch_pool::TorchPoolId;

/// At least this many ids of released pools are kept.
const IDS_MIN: usize = 4096;

/// The pools of all devices.
#[derive(Debug, Default)]
pub(super) struct TorchPools {
    in_use: BTreeMap<(DeviceId, TorchPoolId), TorchPool>,
    /// PyTorch's ids of our pools, including released ones: those may still have blocks and history entries.
    ids: BTreeMap<(DeviceId, MemPoolId), TorchPoolId>,
    /// Above this many ids, those of destroyed pools are dropped.
    ids_limit: usize,
}

#[derive(Debug, Default)]
struct TorchPool {
    uses: u32,
    options: PoolOptions,
    pool: Option<MemPoolId>,
}

impl TorchPools {
    /// Creates a pool with one use, or adds a use.
    pub(super) fn create(
        &mut self,
        device: DeviceId,
        id: TorchPoolId,
        upstream: Option<Arc<dyn Upstream>>,
    ) -> Result<()> {
        let entry = self.in_use.entry((device, id)).or_default();
        if entry.uses > 0 && upstream.is_some() {
            return Err(Error::PoolExists { pool: id });
        }
        entry.options.upstream = upstream.or(entry.options.upstream.take());
        entry.uses += 1;
        Ok(())
    }

    pub(super) fn add_use(&mut self, device: DeviceId, id: TorchPoolId) {
        self.in_use.entry((device, id)).or_default().uses += 1;
    }

    /// Ends a use. Returns our pool if it was the last and there is one.
    pub(super) fn release(&mut self, device: DeviceId, id: TorchPoolId) -> Result<Option<MemPoolId>> {
        let entry = self.entry(device, id)?;
        entry.uses -= 1;
        if entry.uses > 0 {
            return Ok(None);
        }
        Ok(self.in_use.remove(&(device, id)).and_then(|entry| entry.pool))
    }

    pub(super) fn uses(&self, device: DeviceId, id: TorchPoolId) -> u32 {
        self.in_use.get(&(device, id)).map_or(0, |entry| entry.uses)
    }

    /// Our pool, if it was created.
    pub(super) fn get(&self, device: DeviceId, id: TorchPoolId) -> Result<Option<MemPoolId>> {
        let entry = self.in_use.get(&(device, id)).ok_or(Error::PoolUnknown { pool: id, device: device.0 })?;
        Ok(entry.pool)
    }

    /// Our pool; created now by `create` if it does not exist yet.
    pub(super) fn get_or_create(
        &mut self,
        pools: &dyn PrivatePools,
        device: DeviceId,
        id: TorchPoolId,
        create: impl FnOnce(PoolOptions) -> Result<MemPoolId>,
    ) -> Result<MemPoolId> {
        let entry = self.entry(device, id)?;
        if let Some(pool) = entry.pool {
            return Ok(pool);
        }
        let options = std::mem::take(&mut entry.options);
        let pool = create(options)?;
        entry.pool = Some(pool);
        if self.ids.len() >= self.ids_limit.max(IDS_MIN) {
            self.ids.retain(|&(device, pool), _| pools.pool_uses(device, pool).is_ok());
            self.ids_limit = self.ids.len() * 2;
        }
        self.ids.insert((device, pool), id);
        Ok(pool)
    }

    /// Stores the option; returns our pool if it is created already. A destroyed pool is not used on OOM anyway.
    pub(super) fn set_use_on_oom(&mut self, device: DeviceId, id: TorchPoolId, on: bool) -> Result<Option<MemPoolId>> {
        match self.in_use.get_mut(&(device, id)) {
            Some(entry) => {
                entry.options.use_on_oom = on;
                Ok(entry.pool)
            }
            None if !on => Ok(None),
            None => Err(Error::PoolUnknown { pool: id, device: device.0 }),
        }
    }

    pub(super) fn set_no_split(&mut self, device: DeviceId, id: TorchPoolId) -> Result<()> {
        let entry = self.entry(device, id)?;
        if entry.pool.is_some() {
            return Err(Error::OptionTooLate { pool: id, option: "no_split" });
        }
        entry.options.no_split = true;
        Ok(())
    }

    pub(super) fn set_stable(&mut self, device: DeviceId, id: TorchPoolId) -> Result<()> {
        let entry = self.entry(device, id)?;
        if entry.pool.is_some() {
            return Err(Error::OptionTooLate { pool: id, option: "stable" });
        }
        if entry.options.upstream.is_some() {
            return Err(Error::StableWithAllocator { pool: id });
        }
        entry.options.stable = true;
        Ok(())
    }

    pub(super) fn all(&self, id: TorchPoolId) -> Vec<(DeviceId, MemPoolId)> {
        self.ids.iter().filter(|(_, torch)| **torch == id).map(|(&key, _)| key).collect()
    }

    pub(super) fn torch_id(&self, device: DeviceId, pool: MemPoolId) -> Option<TorchPoolId> {
        self.ids.get(&(device, pool)).copied()
    }

    fn entry(&mut self, device: DeviceId, id: TorchPoolId) -> Result<&mut TorchPool> {
        self.in_use.get_mut(&(device, id)).ok_or(Error::PoolUnknown { pool: id, device: device.0 })
    }
}
