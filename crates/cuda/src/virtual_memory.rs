//! Virtual memory: reserved addresses, physical memory, mappings, sharing.
//!
//! CUDA maps a piece of physical memory only as a whole, and the caller must pass its size. So the size is stored with
//! the handle, even for an imported piece, whose size CUDA does not report.

use std::ptr;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::sys::CUmemAccess_flags_enum as AccessFlags;
use cudarc::driver::sys::CUmemAllocationHandleType_enum as HandleType;
use warpool_driver::platform::descriptor;
use warpool_driver::{
    Access, Call, DeviceAccess, DeviceId, DevicePtr, ErrorCode, Granularity, PhysicalId, PhysicalOptions, Result,
    ShareKind, SharedMemory, VirtualMemory,
};

use crate::CudaDriver;
use crate::device::Device;
use crate::error::CallSite;
use crate::object_table::Shared;

/// Physical memory in the object table.
pub(crate) struct Physical {
    raw: sys::CUmemGenericAllocationHandle,
    bytes: u64,
    device: DeviceId,
}

impl VirtualMemory for CudaDriver {
    fn vm_granularity(&self, device: DeviceId, which: Granularity) -> Result<u64> {
        let site = self.enter(Call::VmGranularity)?;
        let gpu = self.device(site, device)?;
        if !self.has(site, gpu, Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)? {
            return Err(site.error(ErrorCode::NotSupported));
        }
        self.granularity(site, gpu, which)
    }

    fn vm_reserve(&self, bytes: u64, align: u64, hint: Option<DevicePtr>) -> Result<DevicePtr> {
        let site = self.enter(Call::VmReserve)?;
        let hint = hint.map_or(0, |hint| hint.0);
        let mut address = 0;
        // SAFETY: CUDA writes the address to `address`; the flags must be 0. Needs no context.
        site.check(unsafe {
            (self.api.mem_address_reserve)(&raw mut address, bytes as usize, align as usize, hint, 0)
        })?;
        self.device_ranges.reserve(address, bytes);
        Ok(DevicePtr(address))
    }

    unsafe fn vm_free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let site = self.enter(Call::VmFreeRange)?;
        // Removed first: once CUDA has freed them, another thread may reserve the same addresses.
        let removed = self.device_ranges.unreserve(ptr.0);
        // SAFETY: CUDA checks the addresses, and the caller promises that no work uses them any more.
        let freed = site.check(unsafe { (self.api.mem_address_free)(ptr.0, bytes as usize) });
        if let (Err(_), Some(bytes)) = (&freed, removed) {
            self.device_ranges.reserve(ptr.0, bytes);
        }
        freed
    }

    fn vm_create(&self, device: DeviceId, bytes: u64, options: PhysicalOptions) -> Result<PhysicalId> {
        let site = self.enter(Call::VmCreate)?;
        let gpu = self.device(site, device)?;
        let _current = self.on_device(site, device)?;
        let properties = properties_of(gpu, options);
        let mut raw = 0;
        // SAFETY: CUDA writes the handle to `raw`, and reads `properties` during the call; the flags must be 0.
        site.check(unsafe { (self.api.mem_create)(&raw mut raw, bytes as usize, &raw const properties, 0) })?;
        Ok(PhysicalId(self.physical.insert(Physical { raw, bytes, device })))
    }

    fn vm_release(&self, physical: PhysicalId) -> Result<()> {
        let site = self.enter(Call::VmRelease)?;
        let object = self.physical.exclusive(physical.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        // SAFETY: the handle came from cuMemCreate or an import, and no other call can use it.
        site.check(unsafe { (self.api.mem_release)(object.raw) })?;
        object.remove();
        Ok(())
    }

    fn vm_map(&self, ptr: DevicePtr, physical: PhysicalId) -> Result<()> {
        let site = self.enter(Call::VmMap)?;
        let physical = self.physical(site, physical)?;
        let _current = self.on_device(site, physical.device)?;
        // SAFETY: a live handle, and addresses that CUDA checks. Offset and flags must be 0.
        site.check(unsafe { (self.api.mem_map)(ptr.0, physical.bytes as usize, 0, physical.raw, 0) })?;
        self.device_ranges.map(ptr.0, physical.bytes);
        Ok(())
    }

    fn vm_unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let site = self.enter(Call::VmUnmap)?;
        // Removed first: once CUDA has unmapped them, another thread may map the same addresses.
        let removed = self.device_ranges.unmap(ptr.0, bytes);
        // SAFETY: CUDA checks the addresses. Work that still uses the range faults on the device.
        let unmapped = site.check(unsafe { (self.api.mem_unmap)(ptr.0, bytes as usize) });
        if unmapped.is_err() {
            removed.into_iter().for_each(|(start, bytes)| self.device_ranges.map(start, bytes));
        }
        unmapped
    }

    fn vm_set_access(&self, ptr: DevicePtr, bytes: u64, access: &[DeviceAccess]) -> Result<()> {
        let site = self.enter(Call::VmSetAccess)?;
        let describe = |one: &DeviceAccess| {
            let gpu = self.device(site, one.device).map_err(|_| site.error(ErrorCode::InvalidValue))?;
            Ok(access_of(gpu, one.access))
        };
        let descriptions = access.iter().map(describe).collect::<Result<Vec<_>>>()?;
        let Some(first) = access.first() else {
            return Err(site.explain(ErrorCode::InvalidValue, "no device is given"));
        };
        let _current = self.on_device(site, first.device)?;
        // SAFETY: CUDA reads the descriptions during the call, and checks the addresses.
        site.check(unsafe {
            (self.api.mem_set_access)(ptr.0, bytes as usize, descriptions.as_ptr(), descriptions.len())
        })
    }

    fn vm_export(&self, physical: PhysicalId, kind: ShareKind) -> Result<SharedMemory> {
        let site = self.enter(Call::VmExport)?;
        let physical = self.physical(site, physical)?;
        let shared = match kind {
            ShareKind::PosixFd => {
                let mut fd = -1_i32;
                self.export(site, physical.raw, HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, &raw mut fd)?;
                // SAFETY: CUDA opened the descriptor for this call; nothing else owns it.
                let fd = unsafe { descriptor::from_number(fd) };
                SharedMemory::PosixFd(fd.map_err(|_| site.error(ErrorCode::NotSupported))?)
            }
            ShareKind::Fabric => {
                let mut name = [0_u8; 64];
                self.export(site, physical.raw, HandleType::CU_MEM_HANDLE_TYPE_FABRIC, &raw mut name)?;
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
    /// The device's allocation granularity. Needs no context.
    pub(crate) fn granularity(&self, site: CallSite<'_>, gpu: &Device, which: Granularity) -> Result<u64> {
        let which = match which {
            Granularity::Minimum => sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            Granularity::Recommended => sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        };
        let properties = properties_of(gpu, PhysicalOptions::default());
        let mut bytes = 0;
        // SAFETY: CUDA writes the number to `bytes`, and reads `properties` during the call.
        site.check(unsafe { (self.api.mem_get_allocation_granularity)(&raw mut bytes, &raw const properties, which) })?;
        Ok(bytes as u64)
    }

    /// The granularity of memory that a multicast object over all devices binds; 0 if the device or the driver has no
    /// multicast, also where it fails to say so: a machine may lack what multicast needs beside the device.
    pub(crate) fn multicast_granularity(&self, site: CallSite<'_>, gpu: &Device) -> Result<u64> {
        let Some(get_granularity) = self.api.multicast_get_granularity else { return Ok(0) };
        if !self.has(site, gpu, Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)? {
            return Ok(0);
        }
        let of_object = sys::CUmulticastObjectProp {
            numDevices: self.devices.len() as u32,
            size: self.granularity(site, gpu, Granularity::Minimum)? as usize,
            handleTypes: u64::from(HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0),
            flags: 0,
        };
        let which = sys::CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: CUDA writes the number to `bytes`, and reads the properties during the call.
        let got = site.check(unsafe { get_granularity(&raw mut bytes, &raw const of_object, which) });
        Ok(if got.is_ok() { bytes as u64 } else { 0 })
    }

    fn physical(&self, site: CallSite<'_>, physical: PhysicalId) -> Result<Shared<'_, Physical>> {
        self.physical.get(physical.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// Exports into `into`, which must have the type that `kind` needs: an `int`, or 64 bytes.
    fn export<T>(
        &self,
        site: CallSite<'_>,
        raw: sys::CUmemGenericAllocationHandle,
        kind: HandleType,
        into: *mut T,
    ) -> Result<()> {
        // SAFETY: both callers pass a variable of the type that `kind` needs; the flags must be 0.
        site.check(unsafe { (self.api.mem_export_to_shareable_handle)(into.cast(), raw, kind, 0) })
    }

    fn import(
        &self,
        site: CallSite<'_>,
        device: DeviceId,
        shared: &SharedMemory,
    ) -> Result<sys::CUmemGenericAllocationHandle> {
        let _current = self.on_device(site, device)?;
        // A descriptor is passed as the pointer itself, a fabric handle by its address.
        let (handle, kind) = match shared {
            SharedMemory::PosixFd(fd) => {
                let number = descriptor::number(fd) as usize;
                (ptr::without_provenance_mut(number), HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
            }
            SharedMemory::Fabric(name) => {
                (ptr::from_ref(name).cast_mut().cast(), HandleType::CU_MEM_HANDLE_TYPE_FABRIC)
            }
        };
        let mut raw = 0;
        // SAFETY: the descriptor is open and stays the caller's, or CUDA reads the 64 bytes during the call; it writes
        // the handle to `raw`.
        site.check(unsafe { (self.api.mem_import_from_shareable_handle)(&raw mut raw, handle, kind) })?;
        Ok(raw)
    }
}

/// A device as a memory location.
const fn location_of(gpu: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.raw }
}

/// A device's access rights.
pub(crate) const fn access_of(gpu: &Device, access: Access) -> sys::CUmemAccessDesc {
    let flags = match access {
        Access::None => AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
        Access::Read => AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_READ,
        Access::ReadWrite => AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    sys::CUmemAccessDesc { location: location_of(gpu), flags }
}

/// The properties of new physical memory.
const fn properties_of(gpu: &Device, options: PhysicalOptions) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: match options.share {
            None => HandleType::CU_MEM_HANDLE_TYPE_NONE,
            Some(ShareKind::PosixFd) => HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            Some(ShareKind::Fabric) => HandleType::CU_MEM_HANDLE_TYPE_FABRIC,
        },
        location: location_of(gpu),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: options.rdma as u8,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// The properties of a new pool: plain device memory, not shareable, without a limit.
pub(crate) const fn pool_properties_of(gpu: &Device) -> sys::CUmemPoolProps {
    sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: HandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location_of(gpu),
        win32SecurityAttributes: ptr::null_mut(),
        maxSize: 0,
        reserved: [0; 56],
    }
}
