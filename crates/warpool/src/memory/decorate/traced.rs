//! A function that sees every call.

use std::fmt;
use std::sync::Arc;

use super::{AllocatorCall, Decorator};
use crate::Error;
use crate::memory::{DeviceAllocator, SharedAllocator};

/// An allocator that passes every allocation, free, recorded use and trim to a function: for logs, counters and
/// profilers. Calls about private pools are not reported.
pub struct Traced {
    inner: Arc<dyn DeviceAllocator>,
    on_call: OnCall,
}

type OnCall = Box<dyn Fn(&AllocatorCall, Option<&Error>) + Send + Sync>;

impl Traced {
    /// Calls `on_call` after each call of `inner`, with the error if it failed: on the caller's thread, without a lock,
    /// also in destructors. It may call the allocator.
    pub fn new(
        inner: &impl SharedAllocator,
        on_call: impl Fn(&AllocatorCall, Option<&Error>) + Send + Sync + 'static,
    ) -> Self {
        Self { inner: inner.to_dyn(), on_call: Box::new(on_call) }
    }
}

#[expect(unsafe_code, reason = "the promise of `Decorator`")]
// SAFETY: it returns what the inner allocator returns.
unsafe impl Decorator for Traced {
    fn decorator_name(&self) -> &'static str {
        "traced"
    }

    fn inner(&self) -> &Arc<dyn DeviceAllocator> {
        &self.inner
    }

    fn after(&self, call: &AllocatorCall, error: Option<&Error>) {
        (self.on_call)(call, error);
    }
}

impl fmt::Debug for Traced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traced").field("inner", &self.inner).finish_non_exhaustive()
    }
}
