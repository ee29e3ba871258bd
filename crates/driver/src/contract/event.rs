//! Events: points in a stream that can be waited for, queried, and timed.

use crate::{DeviceId, EventId, Result, StreamId};

/// How an event is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventOptions {
    /// Whether it records the time. Without, recording and queries are cheaper.
    pub timing: bool,
    /// Whether a host thread that waits for it sleeps instead of spinning.
    pub blocking: bool,
    /// Whether it can be shared with another process. Excludes `timing`.
    pub interprocess: bool,
}

/// The meaning of an event on a stream that captures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventScope {
    /// Order inside the capture: it becomes edges of the graph.
    #[default]
    Plain,
    /// Order with work outside of the graph: it becomes a node that records or waits at every launch. Only on a stream
    /// that captures.
    External,
}

/// An event's handle for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcEventHandle(pub [u8; 64]);

/// Events.
pub trait Events {
    /// Creates an event. `InvalidValue` for `interprocess` with `timing`. *During capture: free.*
    fn event_create(&self, device: DeviceId, options: EventOptions) -> Result<EventId>;

    /// Destroys the event at once. Streams that already wait for it still do. *During capture: free.*
    fn event_destroy(&self, event: EventId) -> Result<()>;

    /// Records the work that is in `stream` now, instead of what the event recorded before. Event and stream must
    /// belong to one device (`InvalidHandle`). *During capture: stream.* An event recorded in a capture belongs to it:
    /// a query gives `CapturedEvent` and invalidates the capture. After the capture a query gives `InvalidValue`, until
    /// the event is recorded again. With [`EventScope::External`] it becomes a node that records at every launch;
    /// `External` outside of a capture gives `IllegalState`.
    fn event_record(&self, event: EventId, stream: StreamId, scope: EventScope) -> Result<()>;

    /// Records all work that is in the context of the event's device now, in all its streams, also in those that were
    /// destroyed; no stream is named. `NotSupported` if the driver cannot (before CUDA 12.5). *During capture:
    /// refused.* A capture of the device that did not begin through this driver is invalidated.
    fn event_record_context(&self, event: EventId) -> Result<()>;

    /// Whether the work that it recorded is done; `true` if it was never recorded. *During capture: guarded.*
    fn event_query(&self, event: EventId) -> Result<bool>;

    /// Waits for the work that it recorded; returns at once if it was never recorded. *During capture: guarded.*
    fn event_synchronize(&self, event: EventId) -> Result<()>;

    /// Milliseconds from one event to the other, negative if `end` came first. `InvalidHandle` if either has no timing
    /// or was never recorded, `NotReady` if either is not done yet. *During capture: free.*
    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32>;

    /// The event's handle for other processes. `InvalidHandle` if it was not created `interprocess`. *During capture:
    /// free.*
    fn event_export(&self, event: EventId) -> Result<IpcEventHandle>;

    /// Opens an event of another process. `InvalidContext` in the process that exported it, `MapFailed` for bytes that
    /// are no handle. *During capture: free.*
    fn event_import(&self, device: DeviceId, handle: &IpcEventHandle) -> Result<EventId>;
}
