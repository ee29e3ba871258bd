//! Streams: queues of work. What is in one stream runs in order; what is in two is ordered only by events, by the
//! default stream's rules, or by the host waiting in between.

use std::sync::Arc;

use crate::{DeviceId, EventId, EventScope, ForeignStream, RawHandle, Result, StreamId};

/// How a stream is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// A non-blocking stream ignores the legacy default stream. A blocking one waits for it and is waited for by it.
    pub non_blocking: bool,
    /// Lower is more urgent; clamped into the device's [`PriorityRange`].
    pub priority: i32,
}

impl Default for StreamOptions {
    /// Non-blocking, at the least urgent priority: what pools of streams are made of.
    fn default() -> Self {
        Self { non_blocking: true, priority: 0 }
    }
}

/// The priorities that a device knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityRange {
    /// The least urgent; most often 0.
    pub least: i32,
    /// The most urgent; a lower number than `least`, or the same.
    pub greatest: i32,
}

impl PriorityRange {
    /// The nearest priority that the device knows.
    #[must_use]
    pub fn clamp(self, priority: i32) -> i32 {
        priority.clamp(self.greatest, self.least)
    }
}

/// What a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamInfo {
    /// The device it works for.
    pub device: DeviceId,
    /// Its priority after clamping.
    pub priority: i32,
    /// Whether it ignores the legacy default stream.
    pub non_blocking: bool,
    /// The driver's own handle. Handles, unlike ids, may come again after the stream is gone.
    pub raw: RawHandle,
}

/// How the driver and others call a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle {
    /// The device it works for.
    pub device: DeviceId,
    /// As in [`StreamInfo`].
    pub raw: RawHandle,
}

/// Code that runs on the host when a stream gets to it. `Fn`, since a captured one runs at every replay.
pub type HostCallback = Arc<dyn Fn() + Send + Sync>;

/// Streams.
pub trait Streams {
    /// The device's legacy default stream: it waits for all blocking streams, and they for it. Always the same id.
    /// *During capture: free.*
    fn stream_default(&self, device: DeviceId) -> Result<StreamId>;

    /// The calling thread's own default stream on that device. One id, which means another stream on each
    /// thread that uses it. It is a blocking stream. *During capture: free.*
    fn stream_per_thread(&self, device: DeviceId) -> Result<StreamId>;

    /// The priorities that `device` knows. *During capture: free.*
    fn stream_priority_range(&self, device: DeviceId) -> Result<PriorityRange>;

    /// Makes a stream. Its id is never given to another. *During capture: free.*
    fn stream_create(&self, device: DeviceId, options: StreamOptions) -> Result<StreamId>;

    /// Takes the stream away at once; work already in it still completes. The default streams cannot be destroyed
    /// (`InvalidHandle`), an adopted one is only forgotten. If a capture began on it, the capture is dropped. *During
    /// capture: free.*
    fn stream_destroy(&self, stream: StreamId) -> Result<()>;

    /// Takes in a stream that somebody else made and keeps. Adopting the same live handle again gives the same id. The
    /// handles of the two default streams (0 and 1 for the legacy one, 2 for the thread's own) give theirs. *During
    /// capture: free.*
    fn stream_adopt(&self, device: DeviceId, stream: ForeignStream) -> Result<StreamId>;

    /// What the stream is. *During capture: free*, but for a stream that was adopted while it captures:
    /// `StreamCaptureUnsupported`, which breaks nothing.
    fn stream_info(&self, stream: StreamId) -> Result<StreamInfo>;

    /// Its device and its handle, and no more: that is known of every stream, so the system below is not asked. *During
    /// capture: free*, also for a stream that was adopted while it captures.
    fn stream_handle(&self, stream: StreamId) -> Result<StreamHandle>;

    /// Whether all work in the stream is done; for the legacy default stream, also that in the blocking streams of its
    /// device, though not the other way round. Returns the code of work that failed. *During capture: guarded*; on a
    /// stream that captures itself it always gives `StreamCaptureUnsupported` and breaks the capture.
    fn stream_query(&self, stream: StreamId) -> Result<bool>;

    /// Waits until all work in the stream is done. *During capture:* as [`stream_query`](Self::stream_query).
    fn stream_synchronize(&self, stream: StreamId) -> Result<()>;

    /// Makes later work of `stream` wait for what `event` last recorded before this call; nothing if it never recorded.
    /// *During capture: stream.* Waiting for an event of the capture joins the stream to it. In a capture, an event
    /// from outside gives `StreamCaptureIsolation`, one from another capture `StreamCaptureMerge`; with
    /// [`EventScope::External`] it becomes a node that waits at replay. `External` outside a capture gives
    /// `IllegalState`.
    fn stream_wait_event(&self, stream: StreamId, event: EventId, scope: EventScope) -> Result<()>;

    /// Runs `callback` on some host thread once the work before it is done; later work waits for it. It must not
    /// call the driver. *During capture: stream.*
    fn stream_host_callback(&self, stream: StreamId, callback: HostCallback) -> Result<()>;
}
