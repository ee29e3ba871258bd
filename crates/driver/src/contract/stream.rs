//! Streams: queues of work. Work in one stream runs in order; work in different streams is ordered only by events, by
//! the default stream's rules, or by the host waiting in between.

use std::sync::Arc;

use crate::{DeviceId, EventId, EventScope, ForeignStream, RawHandle, Result, StreamId};

/// How a stream is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// A non-blocking stream is not ordered with the legacy default stream; a blocking one is.
    pub non_blocking: bool,
    /// Lower numbers have priority; clamped to the device's [`PriorityRange`].
    pub priority: i32,
}

impl Default for StreamOptions {
    /// Non-blocking, at the lowest priority.
    fn default() -> Self {
        Self { non_blocking: true, priority: 0 }
    }
}

/// The priorities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityRange {
    /// The lowest priority; usually 0.
    pub least: i32,
    /// The highest priority; a lower number than `least`, or the same.
    pub greatest: i32,
}

impl PriorityRange {
    /// The nearest priority of the device.
    #[must_use]
    pub fn clamp(self, priority: i32) -> i32 {
        priority.clamp(self.greatest, self.least)
    }
}

/// The properties of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamInfo {
    /// Its device.
    pub device: DeviceId,
    /// Its priority after clamping.
    pub priority: i32,
    /// Whether it is not ordered with the legacy default stream.
    pub non_blocking: bool,
    /// The driver's handle. Handles, unlike ids, may be reused after the stream is destroyed.
    pub raw: RawHandle,
}

/// A stream's device and handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle {
    /// Its device.
    pub device: DeviceId,
    /// As in [`StreamInfo`].
    pub raw: RawHandle,
}

/// Code that runs on the host in the order of a stream. `Fn`, since a captured one runs at every launch.
pub type HostCallback = Arc<dyn Fn() + Send + Sync>;

/// Streams.
pub trait Streams {
    /// The device's legacy default stream, which is ordered with all blocking streams. Always the same id.
    /// *During capture: free.*
    fn stream_default(&self, device: DeviceId) -> Result<StreamId>;

    /// The per-thread default stream of that device. One id, which means a different stream on each thread. It is a
    /// blocking stream. *During capture: free.*
    fn stream_per_thread(&self, device: DeviceId) -> Result<StreamId>;

    /// The priorities of `device`. *During capture: free.*
    fn stream_priority_range(&self, device: DeviceId) -> Result<PriorityRange>;

    /// Creates a stream. Its id is never reused. *During capture: free.*
    fn stream_create(&self, device: DeviceId, options: StreamOptions) -> Result<StreamId>;

    /// Destroys the stream at once; work already in it still completes. The default streams cannot be destroyed
    /// (`InvalidHandle`), an adopted one is only forgotten. A capture that began on it is dropped. *During
    /// capture: free.*
    fn stream_destroy(&self, stream: StreamId) -> Result<()>;

    /// Adopts a stream that was created elsewhere. Adopting the same handle again gives the same id while the stream
    /// exists. The handles of the default streams (0 and 1 for the legacy one, 2 for the per-thread one) give theirs.
    /// *During capture: free.*
    fn stream_adopt(&self, device: DeviceId, stream: ForeignStream) -> Result<StreamId>;

    /// The stream's properties. *During capture: free*, except for a stream that was adopted while it captures:
    /// `StreamCaptureUnsupported`, which invalidates no capture.
    fn stream_info(&self, stream: StreamId) -> Result<StreamInfo>;

    /// Its device and its handle. *During capture: free*, also for a stream that was adopted while it captures.
    fn stream_handle(&self, stream: StreamId) -> Result<StreamHandle>;

    /// Whether all work in the stream is done; for the legacy default stream, also that in the blocking streams of its
    /// device, but not vice versa. Returns the error of work that failed. *During capture: guarded*; on a stream that
    /// captures it always gives `StreamCaptureUnsupported` and invalidates the capture.
    fn stream_query(&self, stream: StreamId) -> Result<bool>;

    /// Waits until all work in the stream is done. *During capture:* as [`stream_query`](Self::stream_query).
    fn stream_synchronize(&self, stream: StreamId) -> Result<()>;

    /// Makes later work of `stream` wait for what `event` recorded last before this call; nothing if it was never
    /// recorded. *During capture: stream.* Waiting for an event of a capture joins the stream to it. In a capture, an
    /// event that was recorded outside gives `StreamCaptureIsolation`, one of another capture `StreamCaptureMerge`;
    /// with [`EventScope::External`] it becomes a node that waits at every launch. `External` outside of a capture
    /// gives `IllegalState`.
    fn stream_wait_event(&self, stream: StreamId, event: EventId, scope: EventScope) -> Result<()>;

    /// Runs `callback` on a thread of the driver once the work before it is done; later work waits for it. It must not
    /// call the driver (`NotPermitted`). A panic in it ends the callback and nothing else: later work of the stream
    /// runs. *During capture: stream.*
    fn stream_host_callback(&self, stream: StreamId, callback: HostCallback) -> Result<()>;
}
