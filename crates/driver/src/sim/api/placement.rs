//! Addresses on request, for replays. Not part of the contract: a real driver chooses addresses itself.

use crate::sim::driver::SimDriver;
use crate::sim::memory::{ALLOCATION_UNIT, RESERVATION_UNIT};
use crate::sim::refuse::{named_as, refuse};
use crate::{DeviceId, DevicePtr, ErrorCode, Result};

impl SimDriver {
    /// Places the next [`mem_alloc`](crate::Memory::mem_alloc) on `device` at `ptr`. If a part of that range is in use,
    /// the allocation fails with `InvalidValue`, and the error names what is there. Either way the placement is used
    /// up. A call that fails before it needs an address, for instance out of memory, leaves it for the next. A second
    /// placement replaces one that was not used.
    ///
    /// `InvalidDevice` if the device does not exist, `InvalidValue` if `ptr` is null or not a multiple of 512.
    pub fn place_next_alloc(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        let placed =
            check_start(ptr, ALLOCATION_UNIT).and_then(|()| self.lock().memory.place_next_allocation(device, ptr));
        named_as("place_next_alloc", placed)
    }

    /// Places the next [`vm_reserve`](crate::VirtualMemory::vm_reserve) at `ptr`, whatever its hint; as with
    /// [`place_next_alloc`](Self::place_next_alloc). A hint is weaker: one below 2^47, where the process may have
    /// memory of its own, or at addresses in use, is ignored.
    ///
    /// `InvalidValue` if `ptr` is null or not a multiple of 2 MiB.
    pub fn place_next_reserve(&self, ptr: DevicePtr) -> Result<()> {
        named_as("place_next_reserve", check_start(ptr, RESERVATION_UNIT))?;
        self.lock().memory.place_next_reservation(ptr);
        Ok(())
    }

    /// From now on, device addresses that are not placed are drawn from `range` by `seed`, instead of being given out
    /// upwards: the same segments in another order. If a few draws find no room, addresses are given out upwards.
    pub fn scatter_addresses(&self, seed: u64, range: std::ops::Range<DevicePtr>) {
        self.lock().memory.scatter_addresses(seed, range.start.0..range.end.0);
    }

    /// Removes the placements that were not used.
    pub fn clear_placements(&self) {
        self.lock().memory.clear_placements();
    }
}

fn check_start(ptr: DevicePtr, unit: u64) -> Result<()> {
    if !ptr.is_null() && ptr.0.is_multiple_of(unit) {
        return Ok(());
    }
    refuse(ErrorCode::InvalidValue, format!("{ptr} cannot be placed at: it must be a multiple of {unit}, and not 0"))
}
