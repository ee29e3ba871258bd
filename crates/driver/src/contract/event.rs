//! Events: marks in a stream that can be waited for, asked about, and timed.

use crate::{DeviceId, EventId, Result, StreamId};

/// How an event is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventOptions {
    /// Whether it takes the time. Without, recording and asking are cheaper.
    pub timing: bool,
    /// Whether a host thread that waits for it sleeps instead of spinning.
    pub blocking: bool,
    /// Whether it can be shared with another process. Excludes `timing`.
    pub interprocess: bool,
}

/// Which world an event speaks to when it is used on a stream that captures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventScope {
    /// The order inside the capture: it becomes edges of the graph.
    #[default]
    Plain,
    /// The world outside: it becomes a node that records or waits at every replay. Only on a stream that captures.
    External,
}

/// An event's name for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcEventHandle(pub [u8; 64]);

/// Events.
pub trait Events {
    /// Makes an event. `InvalidValue` for `interprocess` with `timing`. *During capture: free.*
    fn event_create(&self, device: DeviceId, options: EventOptions) -> Result<EventId>;

    /// Takes the event away at once. Streams that already wait for it still do. *During capture: free.*
    fn event_destroy(&self, event: EventId) -> Result<()>;

    /// Marks the work that is in `stream` now; forgets what the event marked before. Event and stream must be of one
    /// device (`InvalidHandle`). *During capture: stream.* In a capture it belongs to the capture: asking about it
    /// gives `CapturedEvent` and breaks the capture; once the capture is over, `InvalidValue`, until it is recorded
    /// again. With [`EventScope::External`] it becomes a node that records at replay; `External` outside a capture
    /// gives `IllegalState`.
    fn event_record(&self, event: EventId, stream: StreamId, scope: EventScope) -> Result<()>;

    /// Whether the work that it marked is done; `true` if it never marked any. *During capture: guarded.*
    fn event_query(&self, event: EventId) -> Result<bool>;

    /// Waits for the work that it marked; nothing if it never marked any. *During capture: guarded.*
    fn event_synchronize(&self, event: EventId) -> Result<()>;

    /// Milliseconds from the one mark to the other, negative if `end` came first. `InvalidHandle` if either has no
    /// timing or never recorded, `NotReady` if either is not done yet. *During capture: free.*
    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32>;

    /// The event's name for other processes. `InvalidHandle` if it was not made `interprocess`. *During capture: free.*
    fn event_export(&self, event: EventId) -> Result<IpcEventHandle>;

    /// Opens an event of another process. `InvalidContext` in the process that exported it, `MapFailed` for
    /// bytes that name none. *During capture: free.*
    fn event_import(&self, device: DeviceId, handle: &IpcEventHandle) -> Result<EventId>;
}
