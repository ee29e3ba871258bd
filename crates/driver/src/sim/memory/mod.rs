//! Simulated memory: addresses, contents, capacity, and every access to them.
//!
//! `AddressSpace` says what an address refers to, `Backing` has contents and access history, `Capacity` and `Pools`
//! count what devices and pools have left. `Memory` keeps them consistent: a region's backing memory exists as long as
//! the region or one of its mappings, and its bytes are counted exactly once.

mod access;
mod address_space;
mod allocations;
mod backing;
mod blocks;
mod bytes;
mod capacity;
mod physical;
mod pinned;
mod placement;
mod pools;
mod quarantine;
mod registrations;
mod remaps;
mod reservation;
mod shadow;
mod virtual_memory;

pub use access::{AccessContext, IllegalAccess, report_fault};
pub use address_space::AccessFault;
pub use backing::BackingId;
pub use bytes::HostBytes;
pub use capacity::ALLOCATION_UNIT;
pub use physical::Physical;
pub use pinned::PinnedRange;
pub use pools::Pool;
pub use remaps::RemapCounts;
pub use virtual_memory::RESERVATION_UNIT;

use crate::sim::config::SimConfig;
use crate::sim::object_counts::ObjectCounts;
use crate::sim::table::Missing;
use crate::{DeviceId, DevicePtr, PoolId, Result};
use address_space::{AddressSpace, Region};
use backing::Backings;
use blocks::Blocks;
use capacity::Capacity;
use physical::PhysicalMemory;
use placement::Placements;
use pools::Pools;
use registrations::Registrations;
use remaps::Remaps;

/// All memory of the simulated devices, and the host memory pinned for them.
#[derive(Debug)]
pub struct Memory {
    space: AddressSpace,
    backings: Backings,
    blocks: Blocks,
    capacity: Capacity,
    pools: Pools,
    physical: PhysicalMemory,
    placements: Placements,
    remaps: Remaps,
    registrations: Registrations,
    /// For each device, the peers whose allocations its kernels may access.
    peers: Vec<Vec<DeviceId>>,
    check_uninitialized: bool,
    /// A buffer for copies and fills, kept between them.
    scratch: Vec<u8>,
}

impl Memory {
    pub fn new(config: &SimConfig) -> Self {
        let devices = config.devices.len();
        Self {
            space: AddressSpace::default(),
            backings: Backings::new(config.fresh_byte),
            blocks: Blocks::default(),
            capacity: Capacity::new(&config.devices),
            pools: Pools::new(devices as u32),
            physical: PhysicalMemory::default(),
            placements: Placements::new(devices),
            remaps: Remaps::new(&config.latencies),
            registrations: Registrations::default(),
            peers: vec![Vec::new(); devices],
            check_uninitialized: config.check_uninitialized,
            scratch: Vec::new(),
        }
    }

    /// Memory of `device` that is not in use.
    pub fn bytes_free(&self, device: DeviceId) -> u64 {
        self.capacity.free(device)
    }

    /// Lets kernels of `device` access allocations of `peer`. Returns `false` if they could already.
    pub fn enable_peer(&mut self, device: DeviceId, peer: DeviceId) -> bool {
        let peers = &mut self.peers[device.0 as usize];
        let is_new = !peers.contains(&peer);
        if is_new {
            peers.push(peer);
        }
        is_new
    }

    /// Undoes [`enable_peer`](Self::enable_peer). Returns `false` if that was not done.
    pub fn disable_peer(&mut self, device: DeviceId, peer: DeviceId) -> bool {
        let peers = &mut self.peers[device.0 as usize];
        let index = peers.iter().position(|&other| other == peer);
        index.map(|index| peers.swap_remove(index)).is_some()
    }

    /// The device whose memory `ptr` refers to; `None` for host memory and unused addresses.
    pub fn device_at(&self, ptr: DevicePtr) -> Option<DeviceId> {
        self.backings.get(self.space.locate(ptr)?.backing).device
    }

    /// Places the next allocation on `device` at `ptr`.
    pub fn place_next_allocation(&mut self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        self.placements.set_allocation(device, ptr)
    }

    /// Places the next reservation at `ptr`.
    pub fn place_next_reservation(&mut self, ptr: DevicePtr) {
        self.placements.set_reservation(ptr);
    }

    /// Draws addresses that are not placed from `range`.
    pub fn scatter_addresses(&mut self, seed: u64, range: std::ops::Range<u64>) {
        self.space.scatter(seed, range);
    }

    pub fn clear_placements(&mut self) {
        self.placements.clear();
    }

    pub fn remap_counts(&self) -> RemapCounts {
        self.remaps.counts()
    }

    pub fn restart_remap_counts(&mut self) {
        self.remaps.restart();
    }

    pub fn default_pool(&self, device: DeviceId) -> PoolId {
        self.pools.default_of(device)
    }

    pub fn create_pool(&mut self, device: DeviceId) -> PoolId {
        self.pools.create(device)
    }

    /// The pool of that id, which may have been destroyed while its memory is in use.
    pub fn pool(&self, pool: PoolId) -> Option<&Pool> {
        self.pools.get(pool)
    }

    pub fn pool_mut(&mut self, pool: PoolId) -> Option<&mut Pool> {
        self.pools.get_mut(pool)
    }

    pub fn why_pool_missing(&self, pool: PoolId) -> Missing {
        self.pools.why_missing(pool)
    }

    /// Destroys a pool. It exists until its memory has been freed.
    pub fn destroy_pool(&mut self, pool: PoolId) {
        self.pools.destroy(pool, &mut self.capacity);
    }

    /// Takes `bytes` of a pool without an address.
    pub fn take_from_pool(&mut self, pool: PoolId, bytes: u64) -> Result<()> {
        self.pools.take(pool, bytes, &mut self.capacity)
    }

    /// Returns what was taken.
    pub fn give_back_to_pool(&mut self, pool: PoolId, bytes: u64) {
        self.pools.give_back(pool, bytes, &mut self.capacity);
    }

    /// Releases unused memory of a pool until at most `keep` bytes are reserved.
    pub fn trim_pool(&mut self, pool: PoolId, keep: u64) {
        self.pools.trim(pool, keep, &mut self.capacity);
    }

    /// The host waited for work of `device`: its pools release what is above their thresholds.
    pub fn trim_pools(&mut self, device: DeviceId) {
        self.pools.trim_to_thresholds(device, &mut self.capacity);
    }

    /// Adds the objects of this memory to `counts`.
    pub fn count(&self, counts: &mut ObjectCounts) {
        counts.physical = self.physical.len();
        counts.registrations = self.registrations();
        counts.pools = self.pools.created();
        counts.bytes_used = self.capacity.total_used() - self.pools.bytes_idle();
        for (bytes, region) in self.space.regions() {
            match region {
                Region::Allocation { .. } => counts.allocations += 1,
                Region::PoolAllocation { freed, .. } => counts.allocations += usize::from(!freed),
                Region::GraphMemory { backing, .. } => counts.allocations += usize::from(backing.is_some()),
                Region::Pinned { .. } => {
                    counts.pinned += 1;
                    counts.bytes_pinned += bytes;
                }
                Region::Reserved(reservation) => {
                    counts.reservations += 1;
                    counts.mappings += reservation.len();
                }
            }
        }
    }
}
