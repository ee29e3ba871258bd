//! Devices: properties, primary contexts, peer access. Queries about a device create no context on it.
//!
//! A device's primary context is retained when it is first needed, and never released. The last reference to a driver
//! may be dropped while the process exits, when no call to CUDA is safe, and the context ends with the process anyway.

use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use warpool_driver::{
    Call, DeviceId, DeviceProperties, DeviceUuid, Devices, ErrorCode, Granularity, RawHandle, Result, StreamId,
};

use crate::api::Api;
use crate::context::CurrentContext;
use crate::error::CallSite;
use crate::handle::{Context, CudaHandle};
use crate::object_table::ObjectTable;
use crate::stream::{Stream, StreamKind};
use crate::sync::lock;
use crate::{CudaDriver, OpenError, check_start};

/// One device: its handle, its context, its default streams.
pub(crate) struct Device {
    /// CUDA's handle.
    pub(crate) raw: sys::CUdevice,
    /// The context that calls use: the primary one once it is retained, or an adopted one. Null before.
    context: AtomicPtr<sys::CUctx_st>,
    /// How many retains of `context_retain` are not released yet. Locked while `context` is set.
    caller_retains: Mutex<u32>,
    /// The ids of the legacy default stream and of the per-thread default stream.
    pub(crate) stream_default: StreamId,
    pub(crate) stream_per_thread: StreamId,
}

impl Device {
    /// A device without a context yet, and ids for its default streams.
    pub(crate) fn new((id, raw): (DeviceId, sys::CUdevice), streams: &ObjectTable<Stream>) -> Self {
        let default = |kind| StreamId(streams.insert(Stream::default_of(id, kind)));
        Self {
            raw,
            context: AtomicPtr::new(ptr::null_mut()),
            caller_retains: Mutex::default(),
            stream_default: default(StreamKind::Legacy),
            stream_per_thread: default(StreamKind::PerThread),
        }
    }

    /// The context that calls use, if there is one yet.
    pub(crate) fn context(&self) -> Option<Context> {
        let context = self.context.load(Ordering::Acquire);
        (!context.is_null()).then(|| CudaHandle::new(context))
    }
}

/// All devices, in the driver's order.
pub(crate) fn enumerate(api: &Api) -> std::result::Result<Vec<(DeviceId, sys::CUdevice)>, OpenError> {
    let mut count: c_int = 0;
    // SAFETY: CUDA writes the number to `count`.
    check_start("cuDeviceGetCount", unsafe { (api.device_get_count)(&raw mut count) })?;
    let one = |ordinal: c_int| {
        let mut raw = 0;
        // SAFETY: CUDA writes the handle to `raw`.
        check_start("cuDeviceGet", unsafe { (api.device_get)(&raw mut raw, ordinal) })?;
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
        let gpu = self.device(site, device)?;
        let number = |attribute| self.attribute(site, gpu, attribute);
        let can = |attribute| self.has(site, gpu, attribute);
        let virtual_memory = can(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?;
        let share_posix_fd = can(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?;
        let rdma = can(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        Ok(DeviceProperties {
            name: self.name_of(site, gpu)?,
            uuid: self.uuid_of(site, gpu)?,
            compute_capability: self.compute_capability(site, gpu)?,
            bytes_total: self.bytes_total(site, gpu)?,
            multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
            granularity: if virtual_memory { self.granularity(site, gpu, Granularity::Minimum)? } else { 0 },
            virtual_memory,
            host_registration: can(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)?,
            async_pools: can(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?,
            conditional_nodes: self.api.missing_for_conditionals().is_none(),
            ipc_events: can(Attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED)?,
            share_posix_fd: virtual_memory && share_posix_fd,
            share_fabric: virtual_memory && can(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?,
            rdma: virtual_memory && rdma,
            multicast_granularity: self.multicast_granularity(site, gpu)?,
            peers: self.peers_of(site, device)?,
        })
    }

    fn context_retain(&self, device: DeviceId) -> Result<RawHandle> {
        let site = self.enter(Call::ContextRetain)?;
        let gpu = self.device(site, device)?;
        let mut retains = lock(&gpu.caller_retains);
        let context = self.retain_primary(site, gpu)?;
        *retains += 1;
        Ok(context.exposed())
    }

    fn context_release(&self, device: DeviceId) -> Result<()> {
        let site = self.enter(Call::ContextRelease)?;
        let gpu = self.device(site, device)?;
        let mut retains = lock(&gpu.caller_retains);
        if *retains == 0 {
            return Err(site.explain(ErrorCode::InvalidContext, "released more often than retained"));
        }
        // SAFETY: a retain of a caller is outstanding, so this releases no other.
        site.check(unsafe { (self.api.primary_ctx_release)(gpu.raw) })?;
        *retains -= 1;
        Ok(())
    }

    fn context_is_active(&self, device: DeviceId) -> Result<bool> {
        let site = self.enter(Call::ContextIsActive)?;
        let gpu = self.device(site, device)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: CUDA writes one number each to `flags` and `active`.
        site.check(unsafe { (self.api.primary_ctx_get_state)(gpu.raw, &raw mut flags, &raw mut active) })?;
        Ok(active != 0)
    }

    fn current_device(&self) -> Result<Option<DeviceId>> {
        let site = self.enter(Call::CurrentDevice)?;
        let mut context = ptr::null_mut();
        // SAFETY: CUDA writes the handle to `context`.
        site.check(unsafe { (self.api.ctx_get_current)(&raw mut context) })?;
        if context.is_null() {
            return Ok(None);
        }
        let raw = self.device_of_context(site, CudaHandle::new(context))?;
        Ok(self.devices.iter().position(|gpu| gpu.raw == raw).map(|index| DeviceId(index as u32)))
    }

    fn set_current_device(&self, device: DeviceId) -> Result<()> {
        let site = self.enter(Call::SetCurrentDevice)?;
        let context = self.context_of(site, device)?;
        // SAFETY: the context is retained by this driver, or kept alive by the caller of `adopt_context`.
        site.check(unsafe { (self.api.ctx_set_current)(context.raw()) })
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        let site = self.enter(Call::DeviceSynchronize)?;
        let _current = self.on_device(site, device)?;
        // SAFETY: the device's context is current.
        site.check(unsafe { (self.api.ctx_synchronize)() })
    }

    fn peer_can_access(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        self.can_access(self.enter(Call::PeerCanAccess)?, device, peer)
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
    /// The device of that number.
    pub(crate) fn device(&self, site: CallSite<'_>, device: DeviceId) -> Result<&Device> {
        self.devices.get(device.0 as usize).ok_or_else(|| site.error(ErrorCode::InvalidDevice))
    }

    /// The context that calls on `device` use; the primary one is retained if there is none yet.
    pub(crate) fn context_of(&self, site: CallSite<'_>, device: DeviceId) -> Result<Context> {
        let gpu = self.device(site, device)?;
        if let Some(context) = gpu.context() {
            return Ok(context);
        }
        let _retains = lock(&gpu.caller_retains);
        if let Some(context) = gpu.context() {
            return Ok(context);
        }
        let context = self.retain_primary(site, gpu)?;
        gpu.context.store(context.raw(), Ordering::Release);
        Ok(context)
    }

    /// Makes the context of `device` current.
    pub(crate) fn on_device(&self, site: CallSite<'_>, device: DeviceId) -> Result<CurrentContext<'_>> {
        let context = self.context_of(site, device)?;
        self.make_current(site, context)
    }

    fn retain_primary(&self, site: CallSite<'_>, gpu: &Device) -> Result<Context> {
        let mut context = ptr::null_mut();
        // SAFETY: `raw` came from cuDeviceGet; CUDA writes the handle to `context`.
        site.check(unsafe { (self.api.primary_ctx_retain)(&raw mut context, gpu.raw) })?;
        Ok(CudaHandle::new(context))
    }

    /// Uses a context that was created elsewhere instead of the primary one of `device`, for all that this driver
    /// creates from now on. Streams and events that exist keep theirs. PyTorch and cudarc use primary contexts and need
    /// no adoption.
    ///
    /// `InvalidValue` if the context belongs to another device.
    ///
    /// # Safety
    /// `context` must be a live `CUcontext`, and stay so for as long as this driver, and any thread on which
    /// [`Devices::set_current_device`] made it current, exists.
    pub unsafe fn adopt_context(&self, device: DeviceId, context: RawHandle) -> Result<()> {
        let site = self.enter_named("adopt_context")?;
        let gpu = self.device(site, device)?;
        let context = Context::from_number(context.0);
        if context.raw().is_null() {
            return Err(site.error(ErrorCode::InvalidValue));
        }
        let owner = self.device_of_context(site, context)?;
        if owner != gpu.raw {
            let detail = format!("the context belongs to CUDA's device {owner}, not to {device}");
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let _retains = lock(&gpu.caller_retains);
        gpu.context.store(context.raw(), Ordering::Release);
        Ok(())
    }

    /// The device's compute capability, major and minor.
    pub(crate) fn compute_capability(&self, site: CallSite<'_>, gpu: &Device) -> Result<(u32, u32)> {
        let major = self.attribute(site, gpu, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(site, gpu, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Whether an attribute of the device is not 0. Also false if the driver is too old for the attribute.
    pub(crate) fn has(&self, site: CallSite<'_>, gpu: &Device, attribute: Attribute) -> Result<bool> {
        match self.attribute(site, gpu, attribute) {
            Ok(number) => Ok(number != 0),
            Err(error) if error.code == ErrorCode::InvalidValue => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn attribute(&self, site: CallSite<'_>, gpu: &Device, attribute: Attribute) -> Result<c_int> {
        let mut number = 0;
        // SAFETY: CUDA writes the value to `number`.
        site.check(unsafe { (self.api.device_get_attribute)(&raw mut number, attribute, gpu.raw) })?;
        Ok(number)
    }

    fn name_of(&self, site: CallSite<'_>, gpu: &Device) -> Result<String> {
        let mut name = [0_u8; 256];
        // SAFETY: CUDA writes at most the buffer's length, with a terminating 0.
        site.check(unsafe { (self.api.device_get_name)(name.as_mut_ptr().cast(), name.len() as c_int, gpu.raw) })?;
        let text = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy);
        Ok(text.map_or_else(|_| String::from_utf8_lossy(&name).into_owned(), std::borrow::Cow::into_owned))
    }

    fn uuid_of(&self, site: CallSite<'_>, gpu: &Device) -> Result<DeviceUuid> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: CUDA writes the id to `uuid`.
        site.check(unsafe { (self.api.device_get_uuid)(&raw mut uuid, gpu.raw) })?;
        Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)))
    }

    fn bytes_total(&self, site: CallSite<'_>, gpu: &Device) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: CUDA writes the number to `bytes`.
        site.check(unsafe { (self.api.device_total_mem)(&raw mut bytes, gpu.raw) })?;
        Ok(bytes as u64)
    }

    fn can_access(&self, site: CallSite<'_>, device: DeviceId, peer: DeviceId) -> Result<bool> {
        let (gpu, peer) = (self.device(site, device)?, self.device(site, peer)?);
        let mut can = 0;
        // SAFETY: CUDA writes the answer to `can`.
        site.check(unsafe { (self.api.device_can_access_peer)(&raw mut can, gpu.raw, peer.raw) })?;
        Ok(can != 0)
    }

    fn peers_of(&self, site: CallSite<'_>, device: DeviceId) -> Result<Vec<DeviceId>> {
        let mut peers = Vec::new();
        for peer in (0..self.devices.len() as u32).map(DeviceId).filter(|&peer| peer != device) {
            if self.can_access(site, device, peer)? {
                peers.push(peer);
            }
        }
        Ok(peers)
    }
}
