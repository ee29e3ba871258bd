//! PyTorch's graph pools: which of our pools each one is, how many graphs use it, and the way back from our pool id to
//! PyTorch's.

use std::collections::BTreeMap;

use warpool::memory::MemPoolId;
use warpool::memory::pools::PrivatePools;
use warpool_driver::DeviceId;

use crate::error::{Error, Result};
use crate::torch_pool::TorchPoolId;

/// At least this many PyTorch ids are kept.
const TORCH_IDS_MIN: usize = 4096;

/// The pools of PyTorch's graphs.
#[derive(Debug, Default)]
pub(super) struct GraphPools {
    in_use: BTreeMap<(DeviceId, TorchPoolId), GraphPool>,
    /// PyTorch's ids of our pools, including released ones: those may still have blocks and history entries.
    torch_ids: BTreeMap<(DeviceId, MemPoolId), TorchPoolId>,
    /// Above this many ids, those of destroyed pools are dropped.
    torch_ids_limit: usize,
}

/// A pool with one use per begin, ended by each release.
#[derive(Debug)]
struct GraphPool {
    /// Created when the first scope is bound.
    pool: Option<MemPoolId>,
    uses: u32,
    /// The tag of its memory: that of the thread that opened the first scope.
    tag: Option<String>,
}

/// The result of ending a use.
pub(super) enum Released {
    StillInUse,
    /// It was the last use; the pool, if it was ever created.
    Last(Option<MemPoolId>),
}

impl GraphPools {
    /// `tag` is used only for a new pool.
    pub(super) fn add_use(&mut self, device: DeviceId, torch_pool: TorchPoolId, tag: Option<String>) {
        let entry = self.in_use.entry((device, torch_pool)).or_insert(GraphPool { pool: None, uses: 0, tag });
        entry.uses += 1;
    }

    pub(super) fn release(&mut self, device: DeviceId, torch_pool: TorchPoolId) -> Result<Released> {
        let Some(entry) = self.in_use.get_mut(&(device, torch_pool)) else {
            return Err(Error::PoolUnknown { pool: torch_pool, device: device.0 });
        };
        entry.uses -= 1;
        if entry.uses > 0 {
            return Ok(Released::StillInUse);
        }
        let pool = entry.pool;
        self.in_use.remove(&(device, torch_pool));
        Ok(Released::Last(pool))
    }

    /// Our pool for PyTorch's; created now, with its tag, if no capture has allocated from it before. An error if it
    /// was released while its capture was under way: nothing would release what is created here.
    pub(super) fn get_or_create(
        &mut self,
        pools: &dyn PrivatePools,
        device: DeviceId,
        torch_pool: TorchPoolId,
        create: impl FnOnce(Option<&str>) -> Result<MemPoolId>,
    ) -> Result<MemPoolId> {
        let entry = self.in_use.get_mut(&(device, torch_pool));
        let entry = entry.ok_or(Error::PoolUnknown { pool: torch_pool, device: device.0 })?;
        if let Some(pool) = entry.pool {
            return Ok(pool);
        }
        let pool = create(entry.tag.as_deref())?;
        entry.pool = Some(pool);
        if self.torch_ids.len() >= self.torch_ids_limit.max(TORCH_IDS_MIN) {
            self.torch_ids.retain(|&(device, pool), _| pools.pool_uses(device, pool).is_ok());
            self.torch_ids_limit = self.torch_ids.len() * 2;
        }
        self.torch_ids.insert((device, pool), torch_pool);
        Ok(pool)
    }

    /// PyTorch's id of our pool, if it has one.
    pub(super) fn torch_id(&self, device: DeviceId, pool: MemPoolId) -> Option<TorchPoolId> {
        self.torch_ids.get(&(device, pool)).copied()
    }
}
