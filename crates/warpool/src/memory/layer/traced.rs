//! Every call, told to a sink.

use std::fmt;
use std::sync::Arc;

use super::{AllocatorCall, IntoAllocator, Layer};
use crate::Error;
use crate::memory::DeviceAllocator;

/// Who is told of calls, after each. Called without a lock, on the caller's thread, also by destructors; it may call
/// the allocator. Any closure is one.
pub trait CallSink: Send + Sync {
    /// A call was made; with the error if it failed.
    fn call(&self, call: &AllocatorCall, error: Option<&Error>);
}

impl<F: Fn(&AllocatorCall, Option<&Error>) + Send + Sync> CallSink for F {
    fn call(&self, call: &AllocatorCall, error: Option<&Error>) {
        self(call, error);
    }
}

/// Writes calls down with [`tracing`], at level `DEBUG`; failed ones at `WARN`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TracingSink;

impl CallSink for TracingSink {
    fn call(&self, call: &AllocatorCall, error: Option<&Error>) {
        match error {
            Some(error) => tracing::warn!(?call, %error, "a call of the allocator failed"),
            None => tracing::debug!(?call, "a call of the allocator"),
        }
    }
}

/// An allocator whose calls are told to a sink. Calls about private pools are not among them.
pub struct Traced {
    inner: Arc<dyn DeviceAllocator>,
    sink: Box<dyn CallSink>,
}

impl Traced {
    /// `inner`, with `sink` being told.
    pub fn new(inner: impl IntoAllocator, sink: impl CallSink + 'static) -> Self {
        Self { inner: inner.into_allocator(), sink: Box::new(sink) }
    }
}

impl Layer for Traced {
    fn title(&self) -> &'static str {
        "traced"
    }

    fn inner(&self) -> &Arc<dyn DeviceAllocator> {
        &self.inner
    }

    fn after(&self, call: &AllocatorCall, error: Option<&Error>) {
        self.sink.call(call, error);
    }
}

impl fmt::Debug for Traced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traced").field("inner", &self.inner).finish_non_exhaustive()
    }
}
