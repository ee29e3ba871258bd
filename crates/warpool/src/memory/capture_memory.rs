//! The source of a graph's memory during its capture, as the graph stores it in its
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
