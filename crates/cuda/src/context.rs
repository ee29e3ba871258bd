//! Making a context current for the length of a call.
//!
//! The rule: a call leaves the calling thread's current context as it was, "none" included.

use std::ptr;

use cudarc::driver::sys;
use warpool_driver::{ErrorCode, Result};

use crate::CudaDriver;
use crate::api::Api;
use crate::error::CallSite;
use crate::handle::{Context, CudaHandle};

/// A context that is current until this is dropped; then the previous one is current again.
pub(crate) struct CurrentContext<'a> {
    api: &'a Api,
    /// `None` if the context was current already.
    previous: Option<Context>,
}

impl Drop for CurrentContext<'_> {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: `previous` was this thread's current context when the call began; null means none.
            let code = unsafe { (self.api.ctx_set_current)(previous.raw()) };
            if code != 0 {
                tracing::warn!("the thread's context could not be restored: {}", ErrorCode::from_number(code));
            }
        }
    }
}

impl CudaDriver {
    /// Makes `context` current until the result is dropped.
    pub(crate) fn make_current(&self, site: CallSite<'_>, context: Context) -> Result<CurrentContext<'_>> {
        let mut previous = ptr::null_mut();
        // SAFETY: CUDA writes the handle to `previous`.
        site.check(unsafe { (self.api.ctx_get_current)(&raw mut previous) })?;
        if previous == context.raw() {
            return Ok(CurrentContext { api: &self.api, previous: None });
        }
        // SAFETY: contexts come from a retained primary context, or from `adopt_context` or an adopted stream, whose
        // callers keep them alive.
        site.check(unsafe { (self.api.ctx_set_current)(context.raw()) })?;
        Ok(CurrentContext { api: &self.api, previous: Some(CudaHandle::new(previous)) })
    }

    /// The device that a context belongs to.
    pub(crate) fn device_of_context(&self, site: CallSite<'_>, context: Context) -> Result<sys::CUdevice> {
        let _current = self.make_current(site, context)?;
        let mut device = 0;
        // SAFETY: the context is current; CUDA writes the device to `device`.
        site.check(unsafe { (self.api.ctx_get_device)(&raw mut device) })?;
        Ok(device)
    }
}
