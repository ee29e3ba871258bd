//! Plain device memory.

use std::ffi::{c_char, c_uint};

use cudarc::driver::sys;
use warpool_driver::{Call, DeviceId, DevicePtr, ErrorCode, IpcMemoryHandle, Memory, MemoryInfo, Result};

use crate::CudaDriver;
use crate::device_ranges::{Allocation, Lifetime};
use crate::error::CallSite;

impl Memory for CudaDriver {
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        let site = self.enter(Call::MemAlloc)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let mut address = 0;
        // SAFETY: CUDA writes the address to `address`.
        site.check(unsafe { (self.api.mem_alloc)(&raw mut address, bytes as usize) })?;
        self.device_ranges.insert(address, bytes, Allocation { context, lifetime: Lifetime::UntilFreed });
        Ok(DevicePtr(address))
    }

    fn mem_free(&self, ptr: DevicePtr) -> Result<()> {
        let site = self.enter(Call::MemFree)?;
        if ptr.is_null() {
            return Ok(());
        }
        let allocation = self.allocation(site, ptr)?;
        let _current = self.make_current(site, allocation.context)?;
        self.free_with(site, ptr, allocation, || {
            // SAFETY: this driver allocated the address; if a graph did, CUDA checks whether it is allocated.
            site.check(unsafe { (self.api.mem_free)(ptr.0) })
        })
    }

    fn mem_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        let site = self.enter(Call::MemInfo)?;
        let _current = self.on_device(site, device)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: CUDA writes one number each to `free` and `total`.
        site.check(unsafe { (self.api.mem_get_info)(&raw mut free, &raw mut total) })?;
        Ok(MemoryInfo { bytes_free: free as u64, bytes_total: total as u64 })
    }

    fn mem_export(&self, ptr: DevicePtr) -> Result<IpcMemoryHandle> {
        let site = self.enter(Call::MemExport)?;
        let allocation = self.allocation(site, ptr)?;
        let _current = self.make_current(site, allocation.context)?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the memory is allocated; CUDA writes 64 bytes to `handle`.
        site.check(unsafe { (self.api.ipc_get_mem_handle)(&raw mut handle, ptr.0) })?;
        Ok(IpcMemoryHandle(handle.reserved.map(|byte| byte as u8)))
    }

    fn mem_import(&self, device: DeviceId, handle: &IpcMemoryHandle) -> Result<DevicePtr> {
        let site = self.enter(Call::MemImport)?;
        let _current = self.on_device(site, device)?;
        let handle = sys::CUipcMemHandle { reserved: handle.0.map(|byte| byte as c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        let mut address = 0;
        // SAFETY: CUDA checks the bytes, and writes the address to `address`.
        site.check(unsafe { (self.api.ipc_open_mem_handle)(&raw mut address, handle, flags) })?;
        Ok(DevicePtr(address))
    }

    fn mem_close(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        let site = self.enter(Call::MemClose)?;
        let _current = self.on_device(site, device)?;
        // SAFETY: CUDA checks whether the address is that of opened memory.
        site.check(unsafe { (self.api.ipc_close_mem_handle)(ptr.0) })
    }
}

impl CudaDriver {
    /// The allocation that starts at `ptr`.
    pub(crate) fn allocation(&self, site: CallSite<'_>, ptr: DevicePtr) -> Result<Allocation> {
        self.device_ranges.allocation(ptr.0).ok_or_else(|| site.error(ErrorCode::InvalidValue))
    }

    /// Frees an allocation with `free`, and keeps the known ranges up to date.
    pub(crate) fn free_with(
        &self,
        site: CallSite<'_>,
        ptr: DevicePtr,
        allocation: Allocation,
        free: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // Removed first: once CUDA has freed it, another thread may allocate the same address.
        let removed = self.device_ranges.remove_until_freed(ptr.0);
        if removed.is_none() && allocation.lifetime == Lifetime::UntilFreed {
            // Freed by another thread meanwhile.
            return Err(site.error(ErrorCode::InvalidValue));
        }
        let freed = free();
        if let (Err(_), Some(bytes)) = (&freed, removed) {
            self.device_ranges.insert(ptr.0, bytes, allocation);
        }
        freed
    }
}
