//! Virtual memory of the simulated machine.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sim::SimDriver;
use crate::sim::memory::{Bytes, Gone, Mapping, PieceId, Region};
use crate::sim::world::{Physical, World};
use crate::{
    Access, Call, DeviceAccess, DeviceId, DevicePtr, ErrorCode, Granularity, PhysicalId, PhysicalOptions, Result,
    ShareKind, SharedMemory, VirtualMemory,
};

/// The unit of reserved addresses.
pub const PAGE: u64 = 2 << 20;
/// What the name of a shared piece begins with; the machine and the piece follow.
const SHARE_MAGIC: &[u8; 8] = b"wpsimmem";

impl VirtualMemory for SimDriver {
    fn vm_granularity(&self, device: DeviceId, _which: Granularity) -> Result<u64> {
        self.call(Call::VmGranularity, |world| {
            world.device_any(device)?;
            world.check_virtual_memory(device)?;
            Ok(world.config.devices[device.0 as usize].properties.granularity)
        })
    }

    fn vm_reserve(&self, bytes: u64, align: u64, hint: Option<DevicePtr>) -> Result<DevicePtr> {
        self.call(Call::VmReserve, |world| {
            if bytes == 0 || !bytes.is_multiple_of(PAGE) || (align != 0 && !align.is_power_of_two()) {
                return world.fail(ErrorCode::InvalidValue, "reserve whole units of 2 MiB, aligned to a power of two");
            }
            world.spend(bytes);
            let start = world.address_for_reserve(bytes, align.max(PAGE), hint)?;
            world.memory.space.insert(start, bytes, Region::Reserved { mappings: BTreeMap::new() });
            Ok(DevicePtr(start))
        })
    }

    unsafe fn vm_free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        Self::vm_free_range(self, ptr, bytes)
    }

    fn vm_create(&self, device: DeviceId, bytes: u64, options: PhysicalOptions) -> Result<PhysicalId> {
        self.call(Call::VmCreate, |world| {
            world.device(device)?;
            world.check_virtual_memory(device)?;
            let properties = &world.config.devices[device.0 as usize].properties;
            if bytes == 0 || !bytes.is_multiple_of(properties.granularity) {
                return world
                    .fail(ErrorCode::InvalidValue, format!("{bytes} bytes are no multiple of the granularity"));
            }
            let lacking = match options.share {
                Some(ShareKind::Fabric) if !properties.share_fabric => Some("is in no fabric"),
                Some(ShareKind::PosixFd) if !properties.share_posix_fd => Some("shares no memory as file descriptors"),
                _ if options.rdma && !properties.rdma => Some("lets no other hardware reach its memory"),
                _ => None,
            };
            if let Some(lacking) = lacking {
                return world.fail(ErrorCode::NotSupported, format!("{device} {lacking}"));
            }
            world.spend(bytes);
            world.take_bytes(device, bytes)?;
            let piece = world.memory.add_piece(bytes, Some(device), Bytes::device());
            world.holds.insert(piece, 1);
            Ok(PhysicalId(world.physical.insert(Physical { piece, options })))
        })
    }

    fn vm_release(&self, physical: PhysicalId) -> Result<()> {
        self.call(Call::VmRelease, |world| {
            let Physical { piece, .. } = world.physical(physical)?;
            world.spend(world.memory.piece(piece).bytes);
            world.physical.remove(physical.0);
            world.let_go(piece);
            Ok(())
        })
    }

    fn vm_map(&self, ptr: DevicePtr, physical: PhysicalId) -> Result<()> {
        self.call(Call::VmMap, |world| {
            let Physical { piece, .. } = world.physical(physical)?;
            let bytes = world.memory.piece(piece).bytes;
            let owner = world.memory.piece(piece).device.expect("device memory");
            if !ptr.0.is_multiple_of(world.config.devices[owner.0 as usize].properties.granularity) {
                return world.fail(ErrorCode::InvalidValue, format!("{ptr} is not aligned to the granularity"));
            }
            let unmapped_at = world.memory.space.last_unmap(ptr.0, bytes);
            let Some((_, mappings)) = world.reservation(ptr, bytes) else {
                return world.fail(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not reserved"));
            };
            let taken = mappings.range(..ptr.0 + bytes).next_back().is_some_and(|(at, old)| at + old.bytes > ptr.0);
            if taken {
                return world.fail(ErrorCode::InvalidValue, "something is mapped there already");
            }
            mappings.insert(ptr.0, Mapping { bytes, piece, access: Vec::new(), unmapped_at });
            *world.holds.entry(piece).or_default() += 1;
            world.spend(bytes);
            Ok(())
        })
    }

    fn vm_unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call(Call::VmUnmap, |world| {
            let Some((_, mappings)) = world.reservation(ptr, bytes) else {
                return world.fail(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not reserved"));
            };
            let end = ptr.0 + bytes;
            let cut = |at: u64| mappings.range(..at).next_back().is_some_and(|(start, old)| start + old.bytes > at);
            if bytes == 0 || cut(ptr.0) || cut(end) {
                return world.fail(ErrorCode::InvalidValue, "only whole pieces can be unmapped");
            }
            let starts: Vec<u64> = mappings.range(ptr.0..end).map(|(&at, _)| at).collect();
            let gone: Vec<(u64, Mapping)> =
                starts.into_iter().filter_map(|at| Some((at, mappings.remove(&at)?))).collect();
            for (at, mapping) in &gone {
                world.bury(*at, mapping.bytes, Gone::Unmapped);
                world.let_go(mapping.piece);
            }
            // Time passes last: work that ends meanwhile finds the memory gone.
            for (_, mapping) in gone {
                world.spend(mapping.bytes);
            }
            Ok(())
        })
    }

    fn vm_set_access(&self, ptr: DevicePtr, bytes: u64, access: &[DeviceAccess]) -> Result<()> {
        self.call(Call::VmSetAccess, |world| {
            if let Some(unknown) = access.iter().find(|rights| rights.device.0 as usize >= world.devices.len()) {
                return world.fail(ErrorCode::InvalidValue, format!("there is no {}", unknown.device));
            }
            let Some((_, mappings)) = world.reservation(ptr, bytes) else {
                return world.fail(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not reserved"));
            };
            let end = ptr.0 + bytes;
            let mut covered = ptr.0;
            for (&at, mapping) in mappings.range(ptr.0..end) {
                if at != covered {
                    break;
                }
                covered += mapping.bytes;
            }
            if bytes == 0 || covered != end {
                return world.fail(ErrorCode::InvalidValue, "the range must be whole mapped pieces without a hole");
            }
            let pieces: Vec<PieceId> = mappings.range(ptr.0..end).map(|(_, mapping)| mapping.piece).collect();
            world.check_reach(&pieces, access)?;
            let Some((_, mappings)) = world.reservation(ptr, bytes) else {
                return Err(world.error(ErrorCode::InvalidValue));
            };
            let mut sizes = Vec::new();
            for (_, mapping) in mappings.range_mut(ptr.0..end) {
                sizes.push(mapping.bytes);
                for &rights in access {
                    mapping.access.retain(|old| old.device != rights.device);
                    mapping.access.push(rights);
                }
            }
            for size in sizes {
                world.spend(size);
            }
            Ok(())
        })
    }

    fn vm_export(&self, physical: PhysicalId, kind: ShareKind) -> Result<SharedMemory> {
        self.call(Call::VmExport, |world| {
            let Physical { piece, options } = world.physical(physical)?;
            if options.share != Some(kind) {
                return world.fail(ErrorCode::InvalidValue, format!("{physical} was not created to be shared so"));
            }
            let name = share_name(world.machine, piece);
            match kind {
                ShareKind::Fabric => Ok(SharedMemory::Fabric(name)),
                ShareKind::PosixFd => match share_file(&name) {
                    Ok(fd) => Ok(SharedMemory::PosixFd(fd)),
                    Err(error) => world.fail(ErrorCode::OperatingSystem, error.to_string()),
                },
            }
        })
    }

    fn vm_import(&self, device: DeviceId, shared: &SharedMemory, bytes: u64) -> Result<PhysicalId> {
        self.call(Call::VmImport, |world| {
            world.device(device)?;
            let (kind, name) = match shared {
                SharedMemory::PosixFd(fd) => (ShareKind::PosixFd, read_share_file(fd)),
                SharedMemory::Fabric(name) => (ShareKind::Fabric, Some(*name)),
            };
            let piece = match name.as_ref().and_then(read_share_name) {
                Some((machine, piece)) if machine == world.machine => piece,
                _ => return world.fail(ErrorCode::InvalidValue, "the handle names no memory of this machine"),
            };
            let Some(holds) = world.holds.get_mut(&piece) else {
                return world.fail(ErrorCode::InvalidValue, "the memory behind the handle is gone");
            };
            let actual = world.memory.piece(piece).bytes;
            if actual != bytes {
                return world.fail(ErrorCode::InvalidValue, format!("the memory is {actual} bytes long, not {bytes}"));
            }
            *holds += 1;
            let options = PhysicalOptions { share: Some(kind), rdma: false };
            Ok(PhysicalId(world.physical.insert(Physical { piece, options })))
        })
    }
}

impl SimDriver {
    /// [`VirtualMemory::vm_free_range`], which is safe on the simulated device: its addresses are never this process's.
    pub fn vm_free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call(Call::VmFreeRange, |world| match world.memory.space.regions.get(&ptr.0) {
            Some((size, Region::Reserved { mappings })) if *size == bytes => {
                if !mappings.is_empty() {
                    return world.fail(ErrorCode::InvalidValue, "something is still mapped there");
                }
                world.memory.space.regions.remove(&ptr.0);
                world.bury(ptr.0, bytes, Gone::Unmapped);
                Ok(())
            }
            _ => world.fail(ErrorCode::InvalidValue, format!("{ptr} and {bytes} bytes are no whole reservation")),
        })
    }
}

impl World {
    fn check_virtual_memory(&self, device: DeviceId) -> Result<()> {
        if self.config.devices[device.0 as usize].properties.virtual_memory {
            return Ok(());
        }
        self.fail(ErrorCode::NotSupported, format!("{device} has no virtual memory"))
    }

    /// Checks that devices which are given access can reach the memory.
    fn check_reach(&self, pieces: &[PieceId], access: &[DeviceAccess]) -> Result<()> {
        for &piece in pieces {
            let owner = self.memory.piece(piece).device.expect("device memory");
            let reaches = |rights: &&DeviceAccess| {
                let peers = &self.config.devices[rights.device.0 as usize].properties.peers;
                rights.access == Access::None || rights.device == owner || peers.contains(&owner)
            };
            if let Some(rights) = access.iter().find(|rights| !reaches(rights)) {
                return self
                    .fail(ErrorCode::InvalidDevice, format!("{} cannot reach memory of {owner}", rights.device));
            }
        }
        Ok(())
    }

    fn physical(&mut self, physical: PhysicalId) -> Result<Physical> {
        let Some(&state) = self.physical.get(physical.0) else {
            let why = self.physical.why_missing(physical.0);
            return Err(self.missing(why, physical.to_string()));
        };
        let device = self.memory.piece(state.piece).device.expect("device memory");
        self.device(device)?;
        Ok(state)
    }

    /// The reservation that a range lies in: its start, and what is mapped in it.
    fn reservation(&mut self, ptr: DevicePtr, bytes: u64) -> Option<(u64, &mut BTreeMap<u64, Mapping>)> {
        let (&start, (size, region)) = self.memory.space.regions.range_mut(..=ptr.0).next_back()?;
        match region {
            Region::Reserved { mappings } if ptr.0.checked_add(bytes)? <= start + *size => Some((start, mappings)),
            _ => None,
        }
    }

    /// One id or mapping less holds a piece; without any it goes.
    fn let_go(&mut self, piece: PieceId) {
        let holds = self.holds.get_mut(&piece).expect("a held piece");
        *holds -= 1;
        if *holds == 0 {
            self.holds.remove(&piece);
            let state = self.memory.piece(piece);
            let (device, bytes) = (state.device.expect("device memory"), state.bytes);
            self.memory.drop_piece(piece);
            self.give_bytes(device, bytes);
        }
    }
}

/// A piece's name for others.
fn share_name(machine: u64, piece: PieceId) -> [u8; 64] {
    let mut name = [0; 64];
    name[..8].copy_from_slice(SHARE_MAGIC);
    name[8..16].copy_from_slice(&machine.to_le_bytes());
    name[16..24].copy_from_slice(&piece.0.to_le_bytes());
    name
}

fn read_share_name(name: &[u8; 64]) -> Option<(u64, PieceId)> {
    let word = |at: usize| u64::from_le_bytes(name[at..at + 8].try_into().expect("8 bytes"));
    (name[..8] == *SHARE_MAGIC).then(|| (word(8), PieceId(word(16))))
}

/// A file that nobody else sees, which holds a name: so its descriptor can be duplicated and passed on as a real one.
fn share_file(name: &[u8; 64]) -> std::io::Result<OwnedFd> {
    static FILES: AtomicU64 = AtomicU64::new(0);
    let file_name = format!("warpool-sim-{}-{}", std::process::id(), FILES.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(file_name);
    let mut file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    file.write_all(name)?;
    Ok(file.into())
}

fn read_share_file(fd: &OwnedFd) -> Option<[u8; 64]> {
    let file = File::from(fd.as_fd().try_clone_to_owned().ok()?);
    let mut name = [0; 64];
    file.read_exact_at(&mut name, 0).ok()?;
    Some(name)
}
