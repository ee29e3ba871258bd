//! A last resort before a request fails.

use std::fmt;
use std::sync::Arc;

use super::{IntoAllocator, Layer};
use crate::memory::{Allocation, DeviceAllocator, OomReport, Request};
use crate::{Error, Result};

/// An allocator that asks a callback before a request fails for lack of memory. If the callback says yes, the request
/// is tried again: as often as it says so.
///
/// It is called without a lock, on the caller's thread, and may free memory through any layer.
pub struct FailureCallback {
    inner: Arc<dyn DeviceAllocator>,
    callback: Box<dyn Fn(&OomReport) -> bool + Send + Sync>,
}

impl FailureCallback {
    /// `inner`, with `callback` as the last resort: it is given the report, and says whether to try again.
    pub fn new(inner: impl IntoAllocator, callback: impl Fn(&OomReport) -> bool + Send + Sync + 'static) -> Self {
        Self { inner: inner.into_allocator(), callback: Box::new(callback) }
    }
}

impl Layer for FailureCallback {
    fn title(&self) -> &'static str {
        "failure-callback"
    }

    fn inner(&self) -> &Arc<dyn DeviceAllocator> {
        &self.inner
    }

    fn give(&self, request: Request) -> Result<Allocation> {
        loop {
            match self.inner.allocate_raw(request) {
                Err(Error::OutOfMemory(report)) if (self.callback)(&report) => {}
                outcome => return outcome,
            }
        }
    }
}

impl fmt::Debug for FailureCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailureCallback").field("inner", &self.inner).finish_non_exhaustive()
    }
}
