//! Addresses on request, for replays: the next allocation or reservation is placed where a recording had it.
//!
//! A placed range may lie anywhere below 2^56: at addresses of the process itself, next to other ranges without a gap,
//! or where another range was just freed. Only live ranges are in its way. The quarantine of its addresses ends, so a
//! stale pointer to them is no longer detected.

use super::address_space::{AddressSpace, Region};
use crate::sim::refuse::refuse;
use crate::{DeviceId, DevicePtr, ErrorCode, Result};

/// Where the next ranges are placed; `None` to let the address space choose.
#[derive(Debug)]
pub struct Placements {
    /// For each device, its next plain allocation.
    allocations: Vec<Option<DevicePtr>>,
    reservation: Option<DevicePtr>,
}

impl Placements {
    pub fn new(devices: usize) -> Self {
        Self { allocations: vec![None; devices], reservation: None }
    }

    /// Places the next allocation on `device`, if there is such a device.
    pub fn set_allocation(&mut self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        let Some(next) = self.allocations.get_mut(device.0 as usize) else {
            return refuse(ErrorCode::InvalidDevice, format!("{device} is out of range"));
        };
        *next = Some(ptr);
        Ok(())
    }

    pub fn set_reservation(&mut self, ptr: DevicePtr) {
        self.reservation = Some(ptr);
    }

    pub fn clear(&mut self) {
        *self = Self::new(self.allocations.len());
    }

    /// Addresses for an allocation. Uses up the placement.
    pub fn allocation(&mut self, space: &mut AddressSpace, device: DeviceId, bytes: u64, align: u64) -> Result<u64> {
        if let Some(ptr) = self.allocations[device.0 as usize].take() {
            return check(space, ptr, bytes);
        }
        match space.find(bytes, align) {
            Some(start) => Ok(start),
            None => refuse(ErrorCode::OutOfMemory, "the address space is used up"),
        }
    }

    /// Addresses for a reservation: where it was placed, or at the hint if these are free. Uses up the placement.
    pub fn reservation(
        &mut self,
        space: &mut AddressSpace,
        bytes: u64,
        align: u64,
        hint: Option<DevicePtr>,
    ) -> Result<u64> {
        if let Some(ptr) = self.reservation.take() {
            if !ptr.0.is_multiple_of(align) {
                return refuse(ErrorCode::InvalidValue, format!("placed at {ptr}, which is not aligned to {align}"));
            }
            return check(space, ptr, bytes);
        }
        let hinted = hint.filter(|hint| hint.0.is_multiple_of(align) && space.is_free_of_host(hint.0, bytes));
        match hinted.map(|hint| hint.0).or_else(|| space.find(bytes, align)) {
            Some(start) => Ok(start),
            None => refuse(ErrorCode::OutOfMemory, "no range of unused addresses is that long"),
        }
    }
}

fn check(space: &AddressSpace, ptr: DevicePtr, bytes: u64) -> Result<u64> {
    if space.is_free(ptr.0, bytes) {
        return Ok(ptr.0);
    }
    let why = match space.overlapping(ptr.0, bytes) {
        Some((start, size, region)) => {
            let what = match region {
                Region::Allocation { .. } => "an allocation",
                Region::PoolAllocation { .. } => "an allocation of a pool",
                Region::GraphMemory { .. } => "memory of a graph",
                Region::Pinned { .. } => "pinned host memory",
                Region::Reserved(_) => "a reservation",
            };
            format!("{what} of {size} bytes at {} is live", DevicePtr(start))
        }
        None => "the range ends beyond the address space".to_owned(),
    };
    refuse(ErrorCode::InvalidValue, format!("placed at {ptr} with {bytes} bytes, but {why}"))
}
