//! What a heap knows of its owner, and of the work that used its memory last. `stream_tail.rs` says what for.

use std::sync::Arc;

use warpool_driver::StreamId;

use crate::PooledEvent;
use crate::memory::MemPoolId;

/// Whose a heap is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner {
    pub(super) stream: StreamId,
    pub(super) stream_raw: u64,
    pub(super) pool: MemPoolId,
    /// Whether the stream lives as long as the instance.
    pub(super) is_kept: bool,
    /// Whether it is the stream's first heap. A stream that lost one before lives on.
    pub(super) is_first: bool,
}

/// What is known of the last work that used a heap's memory.
#[derive(Clone, Debug)]
pub(super) enum LastWork {
    Done,
    Before(Arc<PooledEvent>),
    /// No event could be recorded. Only the device can be waited for.
    Unknown,
}
