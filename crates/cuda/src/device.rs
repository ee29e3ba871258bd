//! Devices: what there is and what it can do, contexts, peers.
//! Asking about a device creates no context on it.

use std::ffi::{CStr, c_int};
use std::ptr;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use warpool_driver::{Call, DeviceId, DeviceProperties, Devices, ErrorCode, Granularity, RawHandle, Result};

use crate::api::Api;
use crate::context::Device;
use crate::error::Site;
use crate::table::Handle;
use crate::{CudaDriver, OpenError, start};

/// The devices that the driver shows, in its order.
pub(crate) fn enumerate(api: &Api) -> std::result::Result<Vec<(DeviceId, sys::CUdevice)>, OpenError> {
    let mut count: c_int = 0;
    // SAFETY: `count` takes the number.
    start("cuDeviceGetCount", unsafe { (api.device_get_count)(&raw mut count) })?;
    let one = |ordinal: c_int| {
        let mut raw = 0;
        // SAFETY: `raw` takes the handle.
        start("cuDeviceGet", unsafe { (api.device_get)(&raw mut raw, ordinal) })?;
        Ok((DeviceId(ordinal.unsigned_abs()), raw))
    };
    (0..count).map(one).collect()
}

impl Devices for CudaDriver {
    fn device_count(&self) -> Result<u32> {
        self.enter(Call::DeviceCount)?;
        Ok(self.devices.len() as u32)
    }

    fn device_properties(&self, device: DeviceId) -> Result<DeviceProperties> {
        let site = self.enter(Call::DeviceProperties)?;
        let slot = self.device(site, device)?;
        let number = |attribute| self.attribute(site, slot, attribute);
        let can = |attribute| self.has(site, slot, attribute);
        let virtual_memory = can(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?;
        let share_posix_fd = can(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?;
        let rdma = can(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        Ok(DeviceProperties {
            name: self.name_of(site, slot)?,
            compute_capability: self.compute_capability(site, slot)?,
            bytes_total: self.bytes_total(site, slot)?,
            multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
            granularity: if virtual_memory { self.granularity(site, slot, Granularity::Minimum)? } else { 0 },
            virtual_memory,
            host_registration: can(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)?,
            async_pools: can(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?,
            conditional_nodes: self.api.missing_for_conditionals().is_none(),
            ipc_events: can(Attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED)?,
            share_posix_fd: virtual_memory && share_posix_fd,
            share_fabric: virtual_memory && can(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?,
            rdma: virtual_memory && rdma,
            peers: self.peers_of(site, device)?,
        })
    }

    fn context_retain(&self, device: DeviceId) -> Result<RawHandle> {
        self.retain_for_caller(self.enter(Call::ContextRetain)?, device)
    }

    fn context_release(&self, device: DeviceId) -> Result<()> {
        self.release_for_caller(self.enter(Call::ContextRelease)?, device)
    }

    fn context_is_active(&self, device: DeviceId) -> Result<bool> {
        let site = self.enter(Call::ContextIsActive)?;
        let slot = self.device(site, device)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: `flags` and `active` take one number each.
        site.check(unsafe { (self.api.primary_ctx_get_state)(slot.raw, &raw mut flags, &raw mut active) })?;
        Ok(active != 0)
    }

    fn current_device(&self) -> Result<Option<DeviceId>> {
        let site = self.enter(Call::CurrentDevice)?;
        let mut context = ptr::null_mut();
        // SAFETY: `context` takes the handle.
        site.check(unsafe { (self.api.ctx_get_current)(&raw mut context) })?;
        if context.is_null() {
            return Ok(None);
        }
        let raw = self.device_of_context(site, Handle::new(context))?;
        Ok(self.devices.iter().position(|slot| slot.raw == raw).map(|index| DeviceId(index as u32)))
    }

    fn set_current_device(&self, device: DeviceId) -> Result<()> {
        let site = self.enter(Call::SetCurrentDevice)?;
        let context = self.context_of(site, device)?;
        // SAFETY: the context is held by this driver, or kept alive by whoever had it adopted.
        site.check(unsafe { (self.api.ctx_set_current)(context.raw()) })
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        let site = self.enter(Call::DeviceSynchronize)?;
        let _current = self.on_device(site, device)?;
        // SAFETY: takes nothing; the device's context is current.
        site.check(unsafe { (self.api.ctx_synchronize)() })
    }

    fn peer_can_access(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        self.can_reach(self.enter(Call::PeerCanAccess)?, device, peer)
    }

    fn peer_enable(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        let site = self.enter(Call::PeerEnable)?;
        let peer = self.context_of(site, peer)?;
        let _current = self.on_device(site, device)?;
        // SAFETY: `peer` is a live context; the flags must be 0.
        site.check(unsafe { (self.api.ctx_enable_peer_access)(peer.raw(), 0) })
    }

    fn peer_disable(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        let site = self.enter(Call::PeerDisable)?;
        let peer = self.context_of(site, peer)?;
        let _current = self.on_device(site, device)?;
        // SAFETY: `peer` is a live context.
        site.check(unsafe { (self.api.ctx_disable_peer_access)(peer.raw()) })
    }
}

impl CudaDriver {
    /// The device's compute capability, major and minor.
    pub(crate) fn compute_capability(&self, site: Site<'_>, slot: &Device) -> Result<(u32, u32)> {
        let major = self.attribute(site, slot, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(site, slot, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Whether the device has what `attribute` stands for. A driver that does not know the attribute does not have it.
    pub(crate) fn has(&self, site: Site<'_>, slot: &Device, attribute: Attribute) -> Result<bool> {
        match self.attribute(site, slot, attribute) {
            Ok(number) => Ok(number != 0),
            Err(error) if error.code == ErrorCode::InvalidValue => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn attribute(&self, site: Site<'_>, slot: &Device, attribute: Attribute) -> Result<c_int> {
        let mut number = 0;
        // SAFETY: `number` takes the value.
        site.check(unsafe { (self.api.device_get_attribute)(&raw mut number, attribute, slot.raw) })?;
        Ok(number)
    }

    fn name_of(&self, site: Site<'_>, slot: &Device) -> Result<String> {
        let mut name = [0_u8; 256];
        // SAFETY: the buffer is as long as said; CUDA ends the text with a 0 inside it.
        site.check(unsafe { (self.api.device_get_name)(name.as_mut_ptr().cast(), name.len() as c_int, slot.raw) })?;
        let text = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy);
        Ok(text.map_or_else(|_| String::from_utf8_lossy(&name).into_owned(), std::borrow::Cow::into_owned))
    }

    fn bytes_total(&self, site: Site<'_>, slot: &Device) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: `bytes` takes the number.
        site.check(unsafe { (self.api.device_total_mem)(&raw mut bytes, slot.raw) })?;
        Ok(bytes as u64)
    }

    fn can_reach(&self, site: Site<'_>, device: DeviceId, peer: DeviceId) -> Result<bool> {
        let (slot, peer) = (self.device(site, device)?, self.device(site, peer)?);
        let mut can = 0;
        // SAFETY: `can` takes the answer.
        site.check(unsafe { (self.api.device_can_access_peer)(&raw mut can, slot.raw, peer.raw) })?;
        Ok(can != 0)
    }

    fn peers_of(&self, site: Site<'_>, device: DeviceId) -> Result<Vec<DeviceId>> {
        let mut peers = Vec::new();
        for peer in (0..self.devices.len() as u32).map(DeviceId).filter(|&peer| peer != device) {
            if self.can_reach(site, device, peer)? {
                peers.push(peer);
            }
        }
        Ok(peers)
    }
}
