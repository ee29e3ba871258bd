//! What an allocator tells the driver about memory that it keeps in its own books.
//!
//! A caching allocator gives one driver allocation to many users in turn, and the driver sees none of it. A driver that
//! checks for hazards needs to know; one that does not ignores it. The notes change nothing and cannot fail.

use crate::{DevicePtr, StreamId};

/// Notes about suballocation.
pub trait Notes {
    /// Whether anybody listens to notes: an allocator asks once, and saves itself the calls if not.
    fn listens(&self) -> bool {
        false
    }

    /// The range now belongs to work that comes behind what is in `stream`: whoever used it before must be done by
    /// then. *During capture: free.*
    fn note_handed_out(&self, ptr: DevicePtr, bytes: u64, stream: StreamId) {
        let _ = (ptr, bytes, stream);
    }

    /// The range went back to the allocator: work that is queued from now on must not touch it. *During capture: free.*
    fn note_returned(&self, ptr: DevicePtr, bytes: u64) {
        let _ = (ptr, bytes);
    }
}
