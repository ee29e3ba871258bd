//! Contexts: which one a device works with, and making it current for the length of a call.
//!
//! The rule: a call leaves the calling thread's current context as it found it, "none" included. A device's primary
//! context is retained when first needed, and never released: the last owner of a driver may go while the process
//! exits, when no call to CUDA is safe any more, and the context goes with the process anyway.

use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use cudarc::driver::sys;
use warpool_driver::{DeviceId, ErrorCode, RawHandle, Result, StreamId};

use crate::CudaDriver;
use crate::api::Api;
use crate::error::Site;
use crate::stream::{Stream, StreamKind};
use crate::table::{Handle, Table, lock};

/// A context's handle.
pub(crate) type Context = Handle<sys::CUctx_st>;

/// One device: its handle, its context, its default streams.
pub(crate) struct Device {
    /// CUDA's handle.
    pub(crate) raw: sys::CUdevice,
    /// The context that calls use: the primary one once it is retained, or an adopted one. Null before.
    context: AtomicPtr<sys::CUctx_st>,
    holds: Mutex<Holds>,
    /// The ids of the legacy default stream and of the threads' own.
    pub(crate) stream_default: StreamId,
    pub(crate) stream_per_thread: StreamId,
}

/// How often the primary context is retained for callers of `context_retain`.
#[derive(Default)]
struct Holds {
    callers: u32,
}

impl Device {
    /// A device without a context yet; its default streams get their ids.
    pub(crate) fn new((id, raw): (DeviceId, sys::CUdevice), streams: &Table<Stream>) -> Self {
        let default = |kind| StreamId(streams.insert(Stream::default_of(id, kind)));
        Self {
            raw,
            context: AtomicPtr::new(ptr::null_mut()),
            holds: Mutex::default(),
            stream_default: default(StreamKind::Legacy),
            stream_per_thread: default(StreamKind::PerThread),
        }
    }
}

/// A context that is current until this is dropped; then the one before it is.
pub(crate) struct Current<'a> {
    api: &'a Api,
    before: Option<Context>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: `before` was this thread's current context when the call began; null means none.
            let code = unsafe { (self.api.ctx_set_current)(before.raw()) };
            if code != 0 {
                tracing::warn!("the thread's context could not be put back: {}", ErrorCode::from_number(code));
            }
        }
    }
}

impl CudaDriver {
    /// The device of that number.
    pub(crate) fn device(&self, site: Site<'_>, device: DeviceId) -> Result<&Device> {
        self.devices.get(device.0 as usize).ok_or_else(|| site.error(ErrorCode::InvalidDevice))
    }

    /// The context that calls on `device` use; made if there is none.
    pub(crate) fn context_of(&self, site: Site<'_>, device: DeviceId) -> Result<Context> {
        let slot = self.device(site, device)?;
        let known = slot.context.load(Ordering::Acquire);
        if !known.is_null() {
            return Ok(Handle::new(known));
        }
        let _holds = lock(&slot.holds);
        let known = slot.context.load(Ordering::Acquire);
        if !known.is_null() {
            return Ok(Handle::new(known));
        }
        let mut context = ptr::null_mut();
        // SAFETY: `context` takes the handle; `raw` came from cuDeviceGet.
        site.check(unsafe { (self.api.primary_ctx_retain)(&raw mut context, slot.raw) })?;
        slot.context.store(context, Ordering::Release);
        Ok(Handle::new(context))
    }

    /// Makes `context` current for as long as the result lives.
    pub(crate) fn make_current(&self, site: Site<'_>, context: Context) -> Result<Current<'_>> {
        let mut before = ptr::null_mut();
        // SAFETY: `before` takes the handle.
        site.check(unsafe { (self.api.ctx_get_current)(&raw mut before) })?;
        if before == context.raw() {
            return Ok(Current { api: &self.api, before: None });
        }
        // SAFETY: contexts come from a retained primary context or from `adopt_context`, whose caller keeps them alive.
        site.check(unsafe { (self.api.ctx_set_current)(context.raw()) })?;
        Ok(Current { api: &self.api, before: Some(Handle::new(before)) })
    }

    /// Makes the context of `device` current.
    pub(crate) fn on_device(&self, site: Site<'_>, device: DeviceId) -> Result<Current<'_>> {
        let context = self.context_of(site, device)?;
        self.make_current(site, context)
    }

    /// Lets a context that somebody else made stand in for the primary one of `device`, for all that is made through
    /// this driver from now on. Streams and events that exist keep theirs. PyTorch and cudarc use primary contexts: for
    /// them there is no need.
    ///
    /// `InvalidValue` if the context is another device's.
    ///
    /// # Safety
    /// `context` must be a live `CUcontext` and stay so for as long as this driver.
    pub unsafe fn adopt_context(&self, device: DeviceId, context: RawHandle) -> Result<()> {
        let site = self.enter_named("adopt_context")?;
        let slot = self.device(site, device)?;
        let context = Context::from_number(context.0);
        if context.raw().is_null() {
            return Err(site.error(ErrorCode::InvalidValue));
        }
        let owner = self.device_of_context(site, context)?;
        if owner != slot.raw {
            let detail = format!("the context belongs to CUDA's device {owner}, not to {device}");
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let _holds = lock(&slot.holds);
        slot.context.store(context.raw(), Ordering::Release);
        Ok(())
    }

    /// The device that a context is for, as CUDA knows it.
    pub(crate) fn device_of_context(&self, site: Site<'_>, context: Context) -> Result<sys::CUdevice> {
        let _current = self.make_current(site, context)?;
        let mut owner = 0;
        // SAFETY: `owner` takes the device; the context is current.
        site.check(unsafe { (self.api.ctx_get_device)(&raw mut owner) })?;
        Ok(owner)
    }

    /// Retains the primary context for a caller.
    pub(crate) fn retain_for_caller(&self, site: Site<'_>, device: DeviceId) -> Result<RawHandle> {
        let slot = self.device(site, device)?;
        let mut holds = lock(&slot.holds);
        let mut context = ptr::null_mut();
        // SAFETY: `context` takes the handle; `raw` came from cuDeviceGet.
        site.check(unsafe { (self.api.primary_ctx_retain)(&raw mut context, slot.raw) })?;
        holds.callers += 1;
        Ok(Handle::new(context).exposed())
    }

    /// Gives back one retain of a caller.
    pub(crate) fn release_for_caller(&self, site: Site<'_>, device: DeviceId) -> Result<()> {
        let slot = self.device(site, device)?;
        let mut holds = lock(&slot.holds);
        if holds.callers == 0 {
            return Err(site.explain(ErrorCode::InvalidContext, "released more often than retained"));
        }
        // SAFETY: a caller's retain is outstanding, so this takes nobody else's.
        site.check(unsafe { (self.api.primary_ctx_release)(slot.raw) })?;
        holds.callers -= 1;
        Ok(())
    }
}
