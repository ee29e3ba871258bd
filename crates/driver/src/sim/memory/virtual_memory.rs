//! Reserved addresses and physical memory mapped into them.

use smallvec::SmallVec;

use super::address_space::Region;
use super::quarantine::{FreedRange, Removal};
use super::reservation::{Mapping, Reservation};
use super::{BackingId, Memory, Physical};
use crate::sim::refuse::refuse;
use crate::sim::table::Missing;
use crate::{DeviceAccess, DeviceId, DevicePtr, ErrorCode, PhysicalId, PhysicalOptions, Result};

/// The unit of reserved addresses.
pub const RESERVATION_UNIT: u64 = 2 << 20;

/// The sizes of mappings; often of one.
type Sizes = SmallVec<[u64; 4]>;

impl Memory {
    /// Reserves addresses.
    pub fn reserve(&mut self, bytes: u64, align: u64, hint: Option<DevicePtr>) -> Result<DevicePtr> {
        let start = self.placements.reservation(&mut self.space, bytes, align.max(RESERVATION_UNIT), hint)?;
        self.space.insert(start, bytes, Region::Reserved(Reservation::default()));
        Ok(DevicePtr(start))
    }

    /// Gives up a whole reservation, by call number `at`.
    pub fn free_reservation(&mut self, ptr: DevicePtr, bytes: u64, at: u64) -> Result<()> {
        match self.space.get(ptr.0) {
            Some((size, Region::Reserved(reservation))) if size == bytes => {
                if reservation.len() > 0 {
                    return refuse(ErrorCode::InvalidValue, "physical memory is still mapped in the range");
                }
                self.space.remove(ptr.0, Removal::Unmapped, at, None);
                Ok(())
            }
            _ => refuse(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not a whole reservation")),
        }
    }

    /// Creates physical memory.
    pub fn create_physical(&mut self, device: DeviceId, bytes: u64, options: PhysicalOptions) -> Result<PhysicalId> {
        self.capacity.take(device, bytes)?;
        let backing = self.backings.add_device(bytes, device);
        Ok(self.physical.add(backing, options))
    }

    /// Physical memory by id.
    pub fn physical(&self, physical: PhysicalId) -> Option<Physical> {
        self.physical.get(physical)
    }

    pub fn why_physical_missing(&self, physical: PhysicalId) -> Missing {
        self.physical.why_missing(physical)
    }

    /// The size of physical memory, and its device.
    pub fn physical_size(&self, Physical { backing, .. }: Physical) -> (u64, DeviceId) {
        let state = self.backings.get(backing);
        (state.bytes, state.device.expect("device memory"))
    }

    /// Gives up an id of physical memory.
    pub fn release_physical(&mut self, physical: PhysicalId) {
        let backing = self.physical.get(physical).expect("an id that was looked up").backing;
        if self.physical.remove(physical) {
            self.free_physical(backing);
        }
    }

    /// Maps all of `physical` at `ptr`.
    pub fn map(&mut self, ptr: DevicePtr, physical: Physical) -> Result<()> {
        let Physical { backing, .. } = physical;
        let bytes = self.backings.get(backing).bytes;
        let unmapped_at = self.space.last_unmap(ptr.0, bytes);
        let number = self.backings.get(backing).mapping_history.next_number();
        let mapping = Mapping { bytes, backing, access: SmallVec::new(), unmapped_at, number };
        self.reservation(ptr, bytes)?.map(ptr.0, mapping)?;
        self.physical.add_mapping(backing);
        self.remaps.mapped(&mut self.backings.get_mut(backing).mapping_history, bytes);
        Ok(())
    }

    /// Unmaps all that is mapped in a range, by call number `at`. Returns the sizes of the mappings.
    pub fn unmap(&mut self, ptr: DevicePtr, bytes: u64, at: u64) -> Result<Sizes> {
        let unmapped = self.reservation(ptr, bytes)?.unmap(ptr.0, ptr.0 + bytes)?;
        for (start, mapping) in &unmapped {
            let (start, bytes, removal) = (*start, mapping.bytes, Removal::Unmapped);
            self.space.quarantine(FreedRange { start, bytes, removal, freed_at: at, pinned_by: None });
            let history = &mut self.backings.get_mut(mapping.backing).mapping_history;
            self.remaps.unmapped(history, mapping.number, bytes);
            if self.physical.remove_reference(mapping.backing) {
                self.free_physical(mapping.backing);
            }
        }
        Ok(unmapped.into_iter().map(|(_, mapping)| mapping.bytes).collect())
    }

    /// Sets the access rights of whole mappings. `reaches` says whether a device can reach another's memory. Returns
    /// the sizes of the mappings.
    pub fn set_access(
        &mut self,
        ptr: DevicePtr,
        bytes: u64,
        access: &[DeviceAccess],
        reaches: impl Fn(&DeviceAccess, DeviceId) -> bool,
    ) -> Result<Sizes> {
        let end = ptr.0.wrapping_add(bytes);
        let Some(reservation) = self.space.reservation(ptr, bytes) else { return not_reserved(ptr, bytes) };
        let mut count = 0;
        for mapping in reservation.whole_mappings(ptr.0, end)? {
            count += 1;
            let owner = self.backings.get(mapping.backing).device.expect("device memory");
            if let Some(rights) = access.iter().find(|rights| !reaches(rights, owner)) {
                let why = format!("{} cannot reach memory of {owner}", rights.device);
                return refuse(ErrorCode::InvalidDevice, why);
            }
        }
        let mut sizes = Sizes::with_capacity(count);
        reservation.set_access(ptr.0, end, access, |mapping| {
            sizes.push(mapping.bytes);
            self.remaps.access_set(mapping.number, mapping.bytes);
        });
        Ok(sizes)
    }

    /// Gives physical memory of `bytes` bytes another id.
    pub fn import_physical(&mut self, backing: BackingId, bytes: u64, options: PhysicalOptions) -> Result<PhysicalId> {
        if self.physical.exists(backing) {
            let actual = self.backings.get(backing).bytes;
            if actual != bytes {
                let why = format!("the memory has {actual} bytes, not {bytes}");
                return refuse(ErrorCode::InvalidValue, why);
            }
        }
        match self.physical.import(backing, options) {
            Some(physical) => Ok(physical),
            None => refuse(ErrorCode::InvalidValue, "the memory of the handle no longer exists"),
        }
    }

    fn reservation(&mut self, ptr: DevicePtr, bytes: u64) -> Result<&mut Reservation> {
        match self.space.reservation(ptr, bytes) {
            Some(reservation) => Ok(reservation),
            None => not_reserved(ptr, bytes),
        }
    }

    fn free_physical(&mut self, backing: BackingId) {
        let state = self.backings.get(backing);
        let (device, bytes) = (state.device.expect("device memory"), state.bytes);
        self.backings.remove(backing);
        self.capacity.give_back(device, bytes);
    }
}

fn not_reserved<T>(ptr: DevicePtr, bytes: u64) -> Result<T> {
    refuse(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not reserved"))
}
