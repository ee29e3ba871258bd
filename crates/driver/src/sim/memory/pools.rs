//! Stream-ordered pools: how much memory each reserves from its device and how much of that is in use.
//!
//! A pool reserves memory in units of 32 MiB and releases what is unused when the host waits. Which addresses a real
//! pool reuses is up to the driver; here every allocation gets fresh ones.

use super::capacity::{ALLOCATION_UNIT, Capacity};
use crate::sim::refuse::refuse;
use crate::sim::table::{Missing, Table};
use crate::{Access, DeviceId, ErrorCode, PoolAttribute as Attribute, PoolId, Result};

/// A pool reserves multiples of this, as measured on an H200.
const GROWTH_UNIT: u64 = 32 << 20;

#[derive(Clone, Debug)]
pub struct Pool {
    pub device: DeviceId,
    pub is_default: bool,
    /// Destroyed; kept until its memory has been freed.
    pub destroyed: bool,
    attributes: [u64; 8],
    /// The access rights of other devices.
    access: Vec<(DeviceId, Access)>,
}

impl Pool {
    fn new(device: DeviceId, is_default: bool) -> Self {
        let mut pool = Self { device, is_default, attributes: [0; 8], destroyed: false, access: Vec::new() };
        for reuse in [Attribute::ReuseFollowEvents, Attribute::ReuseOpportunistic, Attribute::ReuseInternalDependencies]
        {
            pool.set(reuse, 1);
        }
        pool
    }

    pub fn get(&self, attribute: Attribute) -> u64 {
        self.attributes[attribute as usize]
    }

    fn set(&mut self, attribute: Attribute, value: u64) {
        self.attributes[attribute as usize] = value;
    }

    /// Sets an attribute that a program may set. Returns `false` if it may not set it to that value.
    pub fn set_attribute(&mut self, attribute: Attribute, value: u64) -> bool {
        let value = match (attribute, value) {
            (Attribute::ReservedHigh, 0) => self.get(Attribute::ReservedCurrent),
            (Attribute::UsedHigh, 0) => self.get(Attribute::UsedCurrent),
            (Attribute::ReleaseThreshold, _) => value,
            (Attribute::ReuseFollowEvents, 0 | 1)
            | (Attribute::ReuseOpportunistic, 0 | 1)
            | (Attribute::ReuseInternalDependencies, 0 | 1) => value,
            _ => return false,
        };
        self.set(attribute, value);
        true
    }

    /// Whether another device may read, or write, the pool's memory.
    pub fn allows(&self, device: DeviceId, write: bool) -> bool {
        self.access.iter().any(|&(other, access)| other == device && (access == Access::ReadWrite || !write))
    }

    pub fn set_access(&mut self, device: DeviceId, access: Access) {
        self.access.retain(|&(other, _)| other != device);
        if access != Access::None {
            self.access.push((device, access));
        }
    }

    fn idle(&self) -> u64 {
        self.get(Attribute::ReservedCurrent) - self.get(Attribute::UsedCurrent)
    }
}

/// All pools. Reserved memory is taken from a [`Capacity`].
#[derive(Debug)]
pub struct Pools {
    table: Table<Pool>,
    defaults: Vec<PoolId>,
}

impl Pools {
    /// The default pool of each device.
    pub fn new(devices: u32) -> Self {
        let mut table = Table::default();
        let defaults = (0..devices).map(|device| PoolId(table.insert(Pool::new(DeviceId(device), true)))).collect();
        Self { table, defaults }
    }

    pub fn default_of(&self, device: DeviceId) -> PoolId {
        self.defaults[device.0 as usize]
    }

    pub fn create(&mut self, device: DeviceId) -> PoolId {
        PoolId(self.table.insert(Pool::new(device, false)))
    }

    pub fn get(&self, pool: PoolId) -> Option<&Pool> {
        self.table.get(pool.0)
    }

    pub fn get_mut(&mut self, pool: PoolId) -> Option<&mut Pool> {
        self.table.get_mut(pool.0)
    }

    pub fn why_missing(&self, pool: PoolId) -> Missing {
        self.table.why_missing(pool.0)
    }

    /// The number of pools that a program created.
    pub fn created(&self) -> usize {
        self.table.len() - self.defaults.len()
    }

    /// Destroys a pool. It is removed once none of its memory is in use.
    pub fn destroy(&mut self, pool: PoolId, capacity: &mut Capacity) {
        if let Some(state) = self.table.get_mut(pool.0) {
            state.destroyed = true;
        }
        self.remove_if_unused(pool, capacity);
    }

    /// Takes `bytes` of a pool, which grows if it must.
    pub fn take(&mut self, pool: PoolId, bytes: u64, capacity: &mut Capacity) -> Result<()> {
        let bytes = bytes.next_multiple_of(ALLOCATION_UNIT);
        let Some(state) = self.table.get_mut(pool.0) else {
            return refuse(ErrorCode::InvalidHandle, format!("{pool} does not exist"));
        };
        let used = state.get(Attribute::UsedCurrent).saturating_add(bytes);
        let missing = used.saturating_sub(state.get(Attribute::ReservedCurrent));
        if missing > 0 {
            let growth = missing.checked_next_multiple_of(GROWTH_UNIT).unwrap_or(u64::MAX);
            capacity.take(state.device, growth)?;
            let reserved = state.get(Attribute::ReservedCurrent) + growth;
            state.set(Attribute::ReservedCurrent, reserved);
            state.set(Attribute::ReservedHigh, reserved.max(state.get(Attribute::ReservedHigh)));
        }
        state.set(Attribute::UsedCurrent, used);
        state.set(Attribute::UsedHigh, used.max(state.get(Attribute::UsedHigh)));
        Ok(())
    }

    /// Returns what was taken.
    pub fn give_back(&mut self, pool: PoolId, bytes: u64, capacity: &mut Capacity) {
        let bytes = bytes.next_multiple_of(ALLOCATION_UNIT);
        if let Some(state) = self.table.get_mut(pool.0) {
            state.set(Attribute::UsedCurrent, state.get(Attribute::UsedCurrent) - bytes);
            self.remove_if_unused(pool, capacity);
        }
    }

    fn remove_if_unused(&mut self, pool: PoolId, capacity: &mut Capacity) {
        let is_unused = |state: &Pool| state.destroyed && state.get(Attribute::UsedCurrent) == 0;
        if self.table.get(pool.0).is_some_and(is_unused) {
            self.trim(pool, 0, capacity);
            self.table.remove(pool.0);
        }
    }

    /// Releases unused memory until at most `keep` bytes are reserved.
    pub fn trim(&mut self, pool: PoolId, keep: u64, capacity: &mut Capacity) {
        let Some(state) = self.table.get_mut(pool.0) else { return };
        let reserved = state.get(Attribute::ReservedCurrent);
        let needed = state.get(Attribute::UsedCurrent).max(keep.min(reserved)).next_multiple_of(GROWTH_UNIT);
        if needed < reserved {
            state.set(Attribute::ReservedCurrent, needed);
            capacity.give_back(state.device, reserved - needed);
        }
    }

    /// The host waited for work of `device`: its pools release what is above their thresholds.
    pub fn trim_to_thresholds(&mut self, device: DeviceId, capacity: &mut Capacity) {
        for id in self.table.ids() {
            let state = self.table.get(id).expect("a live id");
            if state.device == device && state.idle() > 0 {
                let keep = state.get(Attribute::ReleaseThreshold);
                self.trim(PoolId(id), keep, capacity);
            }
        }
    }

    /// Bytes that pools have reserved and do not use.
    pub fn bytes_idle(&self) -> u64 {
        self.table.ids().into_iter().filter_map(|id| self.table.get(id)).map(Pool::idle).sum()
    }
}
