//! The sleeping pools of a device, for allocators that implement [`PoolSleep`](super::PoolSleep).
//!
//! An allocator keeps its segments and blocks as they are while a pool sleeps. It serves no request from such a pool,
//! and counts its released memory neither as reserved nor against a limit.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::MemPoolId;
use super::report::{SegmentKind, Stat, StatByKind, Stats};
use crate::{Error, Result};

/// One of the open scopes of a pool.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeId(pub(crate) u64);

/// How much of a pool's memory is released while it sleeps.
#[doc(hidden)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asleep {
    /// The tag of the memory, for messages.
    pub tag: Arc<str>,
    /// Bytes of segments for small requests.
    pub bytes_small: u64,
    /// Bytes of the other segments.
    pub bytes_large: u64,
}

impl Asleep {
    fn bytes(&self, kind: SegmentKind) -> u64 {
        match kind {
            SegmentKind::Small => self.bytes_small,
            SegmentKind::Large => self.bytes_large,
        }
    }
}

/// The sleeping pools of one device.
#[derive(Debug, Default)]
pub(crate) struct SleepingPools {
    by_pool: BTreeMap<MemPoolId, Asleep>,
    bytes: StatByKind,
}

impl SleepingPools {
    /// Fails if the pool is asleep.
    pub(crate) fn expect_awake(&self, pool: MemPoolId) -> Result<()> {
        match self.by_pool.get(&pool) {
            Some(asleep) => Err(Error::TagAsleep { tag: asleep.tag.to_string() }),
            None => Ok(()),
        }
    }

    /// The released bytes of all sleeping pools.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.all.current
    }

    /// How many more bytes of the device are in use after [`set`](Self::set).
    pub(crate) fn bytes_more(&self, pool: MemPoolId, asleep: &Asleep) -> u64 {
        let sum = |asleep: &Asleep| asleep.bytes_small + asleep.bytes_large;
        self.by_pool.get(&pool).map_or(0, sum).saturating_sub(sum(asleep))
    }

    pub(crate) fn set(&mut self, pool: MemPoolId, asleep: Option<Asleep>) {
        let before = match asleep.clone() {
            Some(asleep) => self.by_pool.insert(pool, asleep),
            None => self.by_pool.remove(&pool),
        };
        for kind in [SegmentKind::Small, SegmentKind::Large] {
            let of = |asleep: &Option<Asleep>| asleep.as_ref().map_or(0, |asleep| asleep.bytes(kind));
            let (before, after) = (of(&before), of(&asleep));
            self.bytes.increase(kind, after.saturating_sub(before));
            self.bytes.decrease(kind, before.saturating_sub(after));
        }
    }

    /// Subtracts sleeping memory from the reserved bytes.
    pub(crate) fn write(&self, stats: &mut Stats) {
        let (reserved, asleep) = (&mut stats.reserved_bytes, &self.bytes);
        subtract(&mut reserved.all, asleep.all);
        subtract(&mut reserved.small_pool, asleep.small_pool);
        subtract(&mut reserved.large_pool, asleep.large_pool);
        for (pool, asleep) in &self.by_pool {
            if let Some(reserved) = stats.reserved_bytes_by_private_pools.get_mut(pool) {
                let (small, large) = (asleep.bytes_small, asleep.bytes_large);
                reserved.all.current = reserved.all.current.saturating_sub(small + large);
                reserved.small_pool.current = reserved.small_pool.current.saturating_sub(small);
                reserved.large_pool.current = reserved.large_pool.current.saturating_sub(large);
            }
        }
        stats.asleep_bytes = self.bytes;
    }

    pub(crate) fn reset_peak(&mut self) {
        self.bytes.reset_peak();
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.bytes.reset_accumulated();
    }
}

/// Memory that was put to sleep counts as freed, memory that woke as allocated again.
fn subtract(reserved: &mut Stat, asleep: Stat) {
    reserved.current = reserved.current.saturating_sub(asleep.current);
    reserved.allocated += asleep.freed;
    reserved.freed += asleep.allocated;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asleep(bytes_small: u64, bytes_large: u64) -> Asleep {
        Asleep { tag: "weights".into(), bytes_small, bytes_large }
    }

    #[test]
    fn what_sleeps_is_not_reserved() {
        let (first, second) = (MemPoolId { graph: 0, user: 1 }, MemPoolId { graph: 0, user: 2 });
        let (mut pools, mut counted) = (SleepingPools::default(), Stats::default());
        counted.reserved_bytes.increase(SegmentKind::Small, 2);
        counted.reserved_bytes.increase(SegmentKind::Large, 60);
        counted.reserved_bytes_by_private_pools.entry(first).or_default().increase(SegmentKind::Large, 40);
        let shown = |pools: &SleepingPools| {
            let mut stats = counted.clone();
            pools.write(&mut stats);
            (stats.reserved_bytes.all, stats.reserved_bytes_by_private_pools[&first].all.current)
        };
        let all = |current, allocated, freed| Stat { current, peak: 62, allocated, freed };
        assert_eq!(shown(&pools), (all(62, 62, 0), 40));
        pools.set(first, Some(asleep(0, 40)));
        assert_eq!(shown(&pools), (all(22, 62, 40), 0));
        assert_eq!(pools.expect_awake(first), Err(Error::TagAsleep { tag: "weights".into() }));
        pools.set(second, Some(asleep(2, 20)));
        assert_eq!(shown(&pools), (all(0, 62, 62), 0));
        assert_eq!(pools.bytes_more(second, &asleep(0, 5)), 17);
        pools.set(first, None);
        assert_eq!(shown(&pools), (all(40, 102, 62), 40), "given back and allocated again");
        assert_eq!((pools.expect_awake(first), pools.bytes()), (Ok(()), 22));
    }
}
