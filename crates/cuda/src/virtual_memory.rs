//! Virtual memory: reserved addresses, physical pieces, mappings, sharing.
//!
//! CUDA maps a piece whole or not at all, and the caller must know its size: so it is kept beside the handle, also of
//! an imported piece, whose size CUDA does not tell.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::sys::CUmemAccess_flags_enum as AccessFlags;
use cudarc::driver::sys::CUmemAllocationHandleType_enum as HandleType;
use warpool_driver::{
    Access, Call, DeviceAccess, DeviceId, DevicePtr, ErrorCode, Granularity, PhysicalId, PhysicalOptions, Result,
    ShareKind, SharedMemory, VirtualMemory,
};

use crate::CudaDriver;
use crate::context::Device;
use crate::error::Site;
use crate::table::Used;

/// A piece of physical memory behind its id.
pub(crate) struct Physical {
    raw: sys::CUmemGenericAllocationHandle,
    bytes: u64,
    device: DeviceId,
}

impl VirtualMemory for CudaDriver {
    fn vm_granularity(&self, device: DeviceId, which: Granularity) -> Result<u64> {
        let site = self.enter(Call::VmGranularity)?;
        let slot = self.device(site, device)?;
        if !self.has(site, slot, Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)? {
            return Err(site.error(ErrorCode::NotSupported));
        }
        self.granularity(site, slot, which)
    }

    fn vm_reserve(&self, bytes: u64, align: u64, hint: Option<DevicePtr>) -> Result<DevicePtr> {
        let site = self.enter(Call::VmReserve)?;
        let hint = hint.map_or(0, |hint| hint.0);
        let mut address = 0;
        // SAFETY: `address` takes the number; the flags must be 0. Needs no context.
        site.check(unsafe {
            (self.api.mem_address_reserve)(&raw mut address, bytes as usize, align as usize, hint, 0)
        })?;
        Ok(DevicePtr(address))
    }

    unsafe fn vm_free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let site = self.enter(Call::VmFreeRange)?;
        // SAFETY: addresses only; CUDA checks them, and the caller promises that no work uses them any more.
        site.check(unsafe { (self.api.mem_address_free)(ptr.0, bytes as usize) })
    }

    fn vm_create(&self, device: DeviceId, bytes: u64, options: PhysicalOptions) -> Result<PhysicalId> {
        let site = self.enter(Call::VmCreate)?;
        let slot = self.device(site, device)?;
        let _current = self.on_device(site, device)?;
        let properties = properties_of(slot, options);
        let mut raw = 0;
        // SAFETY: `raw` takes the handle; `properties` is read during the call; the flags must be 0.
        site.check(unsafe { (self.api.mem_create)(&raw mut raw, bytes as usize, &raw const properties, 0) })?;
        Ok(PhysicalId(self.physical.insert(Physical { raw, bytes, device })))
    }

    fn vm_release(&self, physical: PhysicalId) -> Result<()> {
        let site = self.enter(Call::VmRelease)?;
        let row = self.physical.alone(physical.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        // SAFETY: the handle came from cuMemCreate or an import, and nobody else can use it.
        site.check(unsafe { (self.api.mem_release)(row.raw) })?;
        row.remove();
        Ok(())
    }

    fn vm_map(&self, ptr: DevicePtr, physical: PhysicalId) -> Result<()> {
        let site = self.enter(Call::VmMap)?;
        let row = self.physical(site, physical)?;
        let _current = self.on_device(site, row.device)?;
        // SAFETY: addresses and a live handle; CUDA checks that they fit. Offset and flags must be 0.
        site.check(unsafe { (self.api.mem_map)(ptr.0, row.bytes as usize, 0, row.raw, 0) })
    }

    fn vm_unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let site = self.enter(Call::VmUnmap)?;
        // SAFETY: addresses only; CUDA checks them. Work that still uses the range faults on the device, not here.
        site.check(unsafe { (self.api.mem_unmap)(ptr.0, bytes as usize) })
    }

    fn vm_set_access(&self, ptr: DevicePtr, bytes: u64, access: &[DeviceAccess]) -> Result<()> {
        let site = self.enter(Call::VmSetAccess)?;
        let describe = |one: &DeviceAccess| {
            let slot = self.device(site, one.device).map_err(|_| site.error(ErrorCode::InvalidValue))?;
            Ok(access_of(slot, one.access))
        };
        let descriptions = access.iter().map(describe).collect::<Result<Vec<_>>>()?;
        let Some(first) = access.first() else {
            return Err(site.explain(ErrorCode::InvalidValue, "no device is named"));
        };
        let _current = self.on_device(site, first.device)?;
        // SAFETY: the descriptions are read during the call; CUDA checks the addresses.
        site.check(unsafe {
            (self.api.mem_set_access)(ptr.0, bytes as usize, descriptions.as_ptr(), descriptions.len())
        })
    }

    fn vm_export(&self, physical: PhysicalId, kind: ShareKind) -> Result<SharedMemory> {
        let site = self.enter(Call::VmExport)?;
        let row = self.physical(site, physical)?;
        let shared = match kind {
            ShareKind::PosixFd => {
                let mut fd: RawFd = -1;
                self.export(site, row.raw, HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, &raw mut fd)?;
                // SAFETY: CUDA opened the descriptor for us, and nobody else has it.
                SharedMemory::PosixFd(unsafe { OwnedFd::from_raw_fd(fd) })
            }
            ShareKind::Fabric => {
                let mut name = [0_u8; 64];
                self.export(site, row.raw, HandleType::CU_MEM_HANDLE_TYPE_FABRIC, &raw mut name)?;
                SharedMemory::Fabric(name)
            }
        };
        Ok(shared)
    }

    fn vm_import(&self, device: DeviceId, shared: &SharedMemory, bytes: u64) -> Result<PhysicalId> {
        let site = self.enter(Call::VmImport)?;
        let raw = self.import(site, device, shared)?;
        Ok(PhysicalId(self.physical.insert(Physical { raw, bytes, device })))
    }
}

impl CudaDriver {
    /// The device's unit of physical memory. Needs no context.
    pub(crate) fn granularity(&self, site: Site<'_>, slot: &Device, which: Granularity) -> Result<u64> {
        let which = match which {
            Granularity::Minimum => sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            Granularity::Recommended => sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        };
        let properties = properties_of(slot, PhysicalOptions::default());
        let mut bytes = 0;
        // SAFETY: `bytes` takes the number; `properties` is read during the call.
        site.check(unsafe { (self.api.mem_get_allocation_granularity)(&raw mut bytes, &raw const properties, which) })?;
        Ok(bytes as u64)
    }

    fn physical(&self, site: Site<'_>, physical: PhysicalId) -> Result<Used<'_, Physical>> {
        self.physical.get(physical.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// Exports into `into`, which must be what `kind` says: an `int`, or 64 bytes.
    fn export<T>(
        &self,
        site: Site<'_>,
        raw: sys::CUmemGenericAllocationHandle,
        kind: HandleType,
        into: *mut T,
    ) -> Result<()> {
        // SAFETY: both callers pass a local of the type that `kind` stands for; the flags must be 0.
        site.check(unsafe { (self.api.mem_export_to_shareable_handle)(into.cast(), raw, kind, 0) })
    }

    fn import(
        &self,
        site: Site<'_>,
        device: DeviceId,
        shared: &SharedMemory,
    ) -> Result<sys::CUmemGenericAllocationHandle> {
        let _current = self.on_device(site, device)?;
        // A descriptor is passed as the pointer itself, a fabric handle by its address.
        let (handle, kind) = match shared {
            SharedMemory::PosixFd(fd) => {
                let number = fd.as_raw_fd() as usize;
                (ptr::without_provenance_mut(number), HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
            }
            SharedMemory::Fabric(name) => {
                (ptr::from_ref(name).cast_mut().cast(), HandleType::CU_MEM_HANDLE_TYPE_FABRIC)
            }
        };
        let mut raw = 0;
        // SAFETY: the descriptor is open and stays the caller's, or the 64 bytes are read during the call; `raw` takes
        // the handle.
        site.check(unsafe { (self.api.mem_import_from_shareable_handle)(&raw mut raw, handle, kind) })?;
        Ok(raw)
    }
}

/// A place on a device, as CUDA wants it.
const fn location_of(slot: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: slot.raw }
}

/// What a device may do, as CUDA wants it.
pub(crate) const fn access_of(slot: &Device, access: Access) -> sys::CUmemAccessDesc {
    let flags = match access {
        Access::None => AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
        Access::Read => AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_READ,
        Access::ReadWrite => AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    sys::CUmemAccessDesc { location: location_of(slot), flags }
}

/// What is asked of physical memory, as CUDA wants it.
const fn properties_of(slot: &Device, options: PhysicalOptions) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: match options.share {
            None => HandleType::CU_MEM_HANDLE_TYPE_NONE,
            Some(ShareKind::PosixFd) => HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            Some(ShareKind::Fabric) => HandleType::CU_MEM_HANDLE_TYPE_FABRIC,
        },
        location: location_of(slot),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: options.rdma as u8,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// What is asked of a pool, as CUDA wants it: plain memory of the device, shared with nobody, without a limit.
pub(crate) const fn pool_properties_of(slot: &Device) -> sys::CUmemPoolProps {
    sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: HandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location_of(slot),
        win32SecurityAttributes: ptr::null_mut(),
        maxSize: 0,
        reserved: [0; 56],
    }
}
