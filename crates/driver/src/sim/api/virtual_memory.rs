//! Virtual memory.

use crate::platform::{contents, descriptor_of};
use crate::sim::driver::SimDriver;
use crate::sim::memory::{BackingId, Physical, RESERVATION_UNIT};
use crate::sim::refuse::refuse;
use crate::sim::state::SimState;
use crate::{
    Access, Call, DeviceAccess, DeviceId, DevicePtr, ErrorCode, Granularity, PhysicalId, PhysicalOptions, Result,
    ShareKind, SharedMemory, VirtualMemory,
};

/// The first bytes of the name of shared memory; the ids of the driver and of the memory follow.
const SHARE_MAGIC: &[u8; 8] = b"wpsimmem";

impl VirtualMemory for SimDriver {
    fn vm_granularity(&self, device: DeviceId, _which: Granularity) -> Result<u64> {
        self.call(Call::VmGranularity, |state| {
            state.check_device(device)?;
            check_virtual_memory(state, device)?;
            Ok(state.config.devices[device.0 as usize].properties.granularity)
        })
    }

    fn vm_reserve(&self, bytes: u64, align: u64, hint: Option<DevicePtr>) -> Result<DevicePtr> {
        self.call(Call::VmReserve, |state| {
            if bytes == 0 || !bytes.is_multiple_of(RESERVATION_UNIT) || (align != 0 && !align.is_power_of_two()) {
                let why = "reserve a multiple of 2 MiB, aligned to a power of two";
                return refuse(ErrorCode::InvalidValue, why);
            }
            state.spend(bytes);
            state.memory.reserve(bytes, align, hint)
        })
    }

    unsafe fn vm_free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        Self::vm_free_range(self, ptr, bytes)
    }

    fn vm_create(&self, device: DeviceId, bytes: u64, options: PhysicalOptions) -> Result<PhysicalId> {
        self.call(Call::VmCreate, |state| {
            state.use_device(device)?;
            check_virtual_memory(state, device)?;
            let properties = &state.config.devices[device.0 as usize].properties;
            if bytes == 0 || !bytes.is_multiple_of(properties.granularity) {
                let why = format!("{bytes} bytes are not a multiple of the granularity");
                return refuse(ErrorCode::InvalidValue, why);
            }
            let missing = match options.share {
                Some(ShareKind::Fabric) if !properties.share_fabric => Some("is not connected to a fabric"),
                Some(ShareKind::PosixFd) if !properties.share_posix_fd => {
                    Some("cannot share memory as file descriptors")
                }
                _ if options.rdma && !properties.rdma => Some("does not support GPUDirect RDMA"),
                _ => None,
            };
            if let Some(missing) = missing {
                return refuse(ErrorCode::NotSupported, format!("{device} {missing}"));
            }
            state.spend(bytes);
            state.memory.create_physical(device, bytes, options)
        })
    }

    fn vm_release(&self, physical: PhysicalId) -> Result<()> {
        self.call(Call::VmRelease, |state| {
            let (_, bytes, _) = use_physical(state, physical)?;
            state.spend(bytes);
            state.memory.release_physical(physical);
            Ok(())
        })
    }

    fn vm_map(&self, ptr: DevicePtr, physical: PhysicalId) -> Result<()> {
        self.call(Call::VmMap, |state| {
            let (memory, bytes, owner) = use_physical(state, physical)?;
            if !ptr.0.is_multiple_of(state.config.devices[owner.0 as usize].properties.granularity) {
                return refuse(ErrorCode::InvalidValue, format!("{ptr} is not aligned to the granularity"));
            }
            state.memory.map(ptr, memory)?;
            state.spend(bytes);
            Ok(())
        })
    }

    fn vm_unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call(Call::VmUnmap, |state| {
            let at = state.call_number();
            // Time passes afterwards: work that ends meanwhile finds the memory unmapped.
            for bytes in state.memory.unmap(ptr, bytes, at)? {
                state.spend(bytes);
            }
            Ok(())
        })
    }

    fn vm_set_access(&self, ptr: DevicePtr, bytes: u64, access: &[DeviceAccess]) -> Result<()> {
        self.call(Call::VmSetAccess, |state| {
            let devices = &state.config.devices;
            if let Some(unknown) = access.iter().find(|rights| rights.device.0 as usize >= devices.len()) {
                return refuse(ErrorCode::InvalidValue, format!("{} does not exist", unknown.device));
            }
            let reaches = |rights: &DeviceAccess, owner: DeviceId| {
                let peers = &devices[rights.device.0 as usize].properties.peers;
                rights.access == Access::None || rights.device == owner || peers.contains(&owner)
            };
            for bytes in state.memory.set_access(ptr, bytes, access, reaches)? {
                state.spend(bytes);
            }
            Ok(())
        })
    }

    fn vm_export(&self, physical: PhysicalId, kind: ShareKind) -> Result<SharedMemory> {
        self.call(Call::VmExport, |state| {
            let (Physical { backing, options }, ..) = use_physical(state, physical)?;
            if options.share != Some(kind) {
                let why = format!("{physical} was not created to be shared that way");
                return refuse(ErrorCode::InvalidValue, why);
            }
            let name = share_name(state.driver_id, backing);
            match kind {
                ShareKind::Fabric => Ok(SharedMemory::Fabric(name)),
                ShareKind::PosixFd => match descriptor_of(&name) {
                    Ok(fd) => Ok(SharedMemory::PosixFd(fd)),
                    Err(error) => refuse(ErrorCode::OperatingSystem, error.to_string()),
                },
            }
        })
    }

    fn vm_import(&self, device: DeviceId, shared: &SharedMemory, bytes: u64) -> Result<PhysicalId> {
        self.call(Call::VmImport, |state| {
            state.use_device(device)?;
            let (kind, name) = match shared {
                SharedMemory::PosixFd(fd) => (ShareKind::PosixFd, contents(fd)),
                SharedMemory::Fabric(name) => (ShareKind::Fabric, Some(*name)),
            };
            let backing = match name.as_ref().and_then(read_share_name) {
                Some((driver_id, backing)) if driver_id == state.driver_id => backing,
                _ => return refuse(ErrorCode::InvalidValue, "the handle names no memory of this driver"),
            };
            let options = PhysicalOptions { share: Some(kind), rdma: false };
            state.memory.import_physical(backing, bytes, options)
        })
    }
}

impl SimDriver {
    /// [`VirtualMemory::vm_free_range`], which is safe on the simulated device: a device address is only looked up
    /// there, never dereferenced.
    pub fn vm_free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call(Call::VmFreeRange, |state| {
            let at = state.call_number();
            state.memory.free_reservation(ptr, bytes, at)
        })
    }
}

fn check_virtual_memory(state: &SimState, device: DeviceId) -> Result<()> {
    if state.config.devices[device.0 as usize].properties.virtual_memory {
        return Ok(());
    }
    refuse(ErrorCode::NotSupported, format!("{device} has no virtual memory"))
}

/// Physical memory whose device works, with its size and its device.
fn use_physical(state: &mut SimState, physical: PhysicalId) -> Result<(Physical, u64, DeviceId)> {
    let Some(memory) = state.memory.physical(physical) else {
        let why = state.memory.why_physical_missing(physical);
        return Err(state.missing(why, physical));
    };
    let (bytes, device) = state.memory.physical_size(memory);
    state.use_device(device)?;
    Ok((memory, bytes, device))
}

/// The name of memory for other processes.
fn share_name(driver_id: u64, backing: BackingId) -> [u8; 64] {
    let mut name = [0; 64];
    name[..8].copy_from_slice(SHARE_MAGIC);
    name[8..16].copy_from_slice(&driver_id.to_le_bytes());
    name[16..24].copy_from_slice(&backing.0.to_le_bytes());
    name
}

fn read_share_name(name: &[u8; 64]) -> Option<(u64, BackingId)> {
    let word = |at: usize| u64::from_le_bytes(name[at..at + 8].try_into().expect("8 bytes"));
    (name[..8] == *SHARE_MAGIC).then(|| (word(8), BackingId(word(16))))
}
