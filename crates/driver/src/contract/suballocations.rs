//! Suballocations: an allocator reports which parts of its memory are in use.
//!
//! A caching allocator gives one driver allocation to many users in turn, without a driver call. A driver that detects
//! hazards needs these reports; other drivers ignore them. A report changes no behaviour and cannot fail. It
//! is made under the lock of the allocator, so an implementation must not call an allocator.

use crate::{DevicePtr, StreamId};

/// Reports about suballocations.
pub trait Suballocations {
    /// Whether reports are used. An allocator reads this once and makes no reports if it is false.
    fn tracks_suballocations(&self) -> bool {
        false
    }

    /// The range was allocated for work queued after what is in `stream` now: earlier users of the range must have
    /// finished by then. *During capture: free.*
    fn suballocated(&self, ptr: DevicePtr, bytes: u64, stream: StreamId) {
        let _ = (ptr, bytes, stream);
    }

    /// As [`suballocated`](Self::suballocated), at addresses that do not change: captured work may know them, and may
    /// use the range although its memory was freed elsewhere since the capture.
    fn suballocated_in_place(&self, ptr: DevicePtr, bytes: u64, stream: StreamId) {
        let _ = (ptr, bytes, stream);
    }

    /// Names a range for messages: the memory that is there now, until it is freed.
    fn label_memory(&self, ptr: DevicePtr, bytes: u64, label: &str) {
        let _ = (ptr, bytes, label);
    }

    /// Names a stream for messages.
    fn label_stream(&self, stream: StreamId, label: &str) {
        let _ = (stream, label);
    }

    /// The range was freed: work queued from now on must not touch it. *During capture: free.*
    fn suballocation_freed(&self, ptr: DevicePtr, bytes: u64) {
        let _ = (ptr, bytes);
    }
}
