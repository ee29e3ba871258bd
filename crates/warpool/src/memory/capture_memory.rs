//! Where the memory of a graph comes from while it is captured: what a graph stores in its
//! [`CaptureRecord`](crate::capture::CaptureRecord).

use std::sync::Arc;

use super::{DeviceAllocator, MemPoolId};
use crate::capture::CaptureRecord;

/// Allocator and pool of a graph under capture.
pub(crate) struct CaptureMemory {
    pub(crate) allocator: Arc<dyn DeviceAllocator>,
    pub(crate) pool: MemPoolId,
}

impl CaptureMemory {
    pub(crate) fn of(record: &CaptureRecord) -> &Self {
        record.memory()
    }
}
