//! Addresses on request, for replays: the next allocation or reservation lies where a recording says.
//!
//! Not part of the contract: a real driver chooses its addresses itself. A placed range may lie anywhere below 2^56,
//! also where the process has memory of its own, beside other ranges without a gap, and at once where another was
//! freed. Only what is live is in its way. What was remembered of freed memory there is forgotten, since live memory
//! wins: a stale pointer into it is no longer told from a good one. A replay cannot have both.

use crate::sim::SimDriver;
use crate::sim::api::{GRAIN, PAGE};
use crate::sim::memory::Region;
use crate::sim::world::World;
use crate::{DeviceId, DevicePtr, DriverError, ErrorCode, Result};

/// Where the next ranges go; `None` where nobody cares.
#[derive(Debug, Default)]
pub struct Placements {
    /// For each device, the next plain allocation.
    alloc: Vec<Option<DevicePtr>>,
    reserve: Option<DevicePtr>,
}

impl Placements {
    pub fn new(devices: usize) -> Self {
        Self { alloc: vec![None; devices], reserve: None }
    }
}

impl SimDriver {
    /// The next [`mem_alloc`](crate::Memory::mem_alloc) on `device` that finds room lies at `ptr`. If some of that
    /// range is live, it fails with `InvalidValue` and says what is in the way. Either way the placement is used up. A
    /// call that fails before it needs an address, out of memory say, leaves it for the next. A second placement
    /// replaces one that was not used.
    ///
    /// `InvalidDevice` if there is no such device, `InvalidValue` if `ptr` is null or no multiple of 512.
    pub fn place_next_alloc(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        const NAME: &str = "place_next_alloc";
        check_start(NAME, ptr, GRAIN)?;
        match self.lock().placed.alloc.get_mut(device.0 as usize) {
            Some(next) => {
                *next = Some(ptr);
                Ok(())
            }
            None => {
                Err(DriverError::new(NAME, ErrorCode::InvalidDevice).with_detail(format!("{device} is out of range")))
            }
        }
    }

    /// The next [`vm_reserve`](crate::VirtualMemory::vm_reserve) lies at `ptr`, whatever its hint; as with
    /// [`place_next_alloc`](Self::place_next_alloc). A hint does less: one below 2^47, where the process may have
    /// memory of its own, or where something is live, is passed over in silence.
    ///
    /// `InvalidValue` if `ptr` is null or no multiple of 2 MiB.
    pub fn place_next_reserve(&self, ptr: DevicePtr) -> Result<()> {
        check_start("place_next_reserve", ptr, PAGE)?;
        self.lock().placed.reserve = Some(ptr);
        Ok(())
    }

    /// Takes back the placements that were not used: the next ranges lie where the machine likes.
    pub fn clear_placements(&self) {
        let mut world = self.lock();
        world.placed = Placements::new(world.devices.len());
    }
}

fn check_start(name: &'static str, ptr: DevicePtr, unit: u64) -> Result<()> {
    if !ptr.is_null() && ptr.0.is_multiple_of(unit) {
        return Ok(());
    }
    Err(DriverError::new(name, ErrorCode::InvalidValue)
        .with_detail(format!("{ptr} cannot start a range: it must be a multiple of {unit}, and not 0")))
}

impl World {
    /// Addresses for a plain allocation: where it was placed, or else where the machine likes.
    pub fn address_for_alloc(&mut self, device: DeviceId, bytes: u64, align: u64) -> Result<u64> {
        if let Some(ptr) = self.placed.alloc[device.0 as usize].take() {
            return self.check_placed(ptr, bytes);
        }
        match self.memory.space.find(bytes, align) {
            Some(start) => Ok(start),
            None => self.fail(ErrorCode::OutOfMemory, "the address space is used up"),
        }
    }

    /// Addresses for a reservation: where it was placed, at the hint, or else where the machine likes.
    pub fn address_for_reserve(&mut self, bytes: u64, align: u64, hint: Option<DevicePtr>) -> Result<u64> {
        if let Some(ptr) = self.placed.reserve.take() {
            if !ptr.0.is_multiple_of(align) {
                return self.fail(ErrorCode::InvalidValue, format!("placed at {ptr}, which is not aligned to {align}"));
            }
            return self.check_placed(ptr, bytes);
        }
        let space = &mut self.memory.space;
        let hinted = hint.filter(|hint| hint.0.is_multiple_of(align) && space.may_give(hint.0, bytes));
        match hinted.map(|hint| hint.0).or_else(|| space.find(bytes, align)) {
            Some(start) => Ok(start),
            None => self.fail(ErrorCode::OutOfMemory, "no stretch of free addresses is that long"),
        }
    }

    fn check_placed(&self, ptr: DevicePtr, bytes: u64) -> Result<u64> {
        if self.memory.space.is_free(ptr.0, bytes) {
            return Ok(ptr.0);
        }
        let why = match self.memory.space.in_the_way(ptr.0, bytes) {
            Some((start, size, region)) => {
                let what = match region {
                    Region::Plain { .. } => "an allocation",
                    Region::Pooled { .. } => "an allocation of a pool",
                    Region::OfGraph { .. } => "memory of a graph",
                    Region::Pinned { .. } => "pinned host memory",
                    Region::Reserved { .. } => "a reservation",
                };
                format!("{what} of {size} bytes at {} is live", DevicePtr(start))
            }
            None => "the range ends beyond the address space".to_owned(),
        };
        self.fail(ErrorCode::InvalidValue, format!("placed at {ptr} with {bytes} bytes, but {why}"))
    }
}
