//! Streams and events for checks.

#![expect(unsafe_code, reason = "a foreign stream is unsafe to make")]

use warpool_driver::{DeviceId, ErrorCode, EventId, EventOptions, EventScope, ForeignStream, StreamId, StreamOptions};

use super::TestContext;
use super::cleanup::Resource;
use crate::expect::{CheckResult, expect, require};

impl TestContext {
    /// A non-blocking stream.
    pub fn stream(&self) -> CheckResult<StreamId> {
        self.stream_with(StreamOptions::default())
    }

    /// A stream that synchronizes with the legacy default stream.
    pub(crate) fn blocking_stream(&self) -> CheckResult<StreamId> {
        self.stream_with(StreamOptions { non_blocking: false, priority: 0 })
    }

    pub(crate) fn stream_with(&self, options: StreamOptions) -> CheckResult<StreamId> {
        self.stream_on(self.device_id, options)
    }

    pub(crate) fn stream_on(&self, device: DeviceId, options: StreamOptions) -> CheckResult<StreamId> {
        let stream = self.driver.stream_create(device, options)?;
        self.track(Resource::Stream(stream));
        Ok(stream)
    }

    pub(crate) fn destroy_stream(&self, stream: StreamId) -> CheckResult {
        self.untrack(Resource::Stream(stream));
        Ok(self.driver.stream_destroy(stream)?)
    }

    /// The legacy default stream.
    pub(crate) fn legacy_stream(&self) -> CheckResult<StreamId> {
        let stream = self.driver.stream_default(self.device_id)?;
        self.track(Resource::DefaultStream(stream));
        Ok(stream)
    }

    /// The per-thread default stream.
    pub(crate) fn per_thread_stream(&self) -> CheckResult<StreamId> {
        let stream = self.driver.stream_per_thread(self.device_id)?;
        self.track(Resource::DefaultStream(stream));
        Ok(stream)
    }

    /// The handle of a stream of this context, as another library would pass it.
    pub(crate) fn foreign_stream(&self, stream: StreamId) -> CheckResult<ForeignStream> {
        let handle = self.driver.stream_handle(stream)?;
        // SAFETY: the stream lives until the cleanup after the check.
        Ok(unsafe { ForeignStream::new(handle.raw) })
    }

    pub(crate) fn synchronize(&self, stream: StreamId) -> CheckResult {
        Ok(self.driver.stream_synchronize(stream)?)
    }

    /// The stream must have unfinished work. `what` names it.
    #[track_caller]
    pub(crate) fn expect_busy(&self, what: &str, stream: StreamId) -> CheckResult {
        let done = self.driver.stream_query(stream)?;
        expect(!done, &format!("{what} has unfinished work"))
    }

    /// The stream must have no unfinished work. `what` names it.
    #[track_caller]
    pub(crate) fn expect_idle(&self, what: &str, stream: StreamId) -> CheckResult {
        let done = self.driver.stream_query(stream)?;
        expect(done, &format!("{what} has finished its work"))
    }

    /// Whether the driver records events of whole contexts.
    pub(crate) fn records_contexts(&self) -> CheckResult<bool> {
        match self.driver.event_record_context(self.event()?) {
            Err(error) if error.code == ErrorCode::NotSupported => Ok(false),
            recorded => Ok(recorded.map(|()| true)?),
        }
    }

    /// An event without timing.
    pub fn event(&self) -> CheckResult<EventId> {
        self.event_with(EventOptions::default())
    }

    /// An event that can be exported. Skips the check where that is not supported.
    pub fn interprocess_event(&self) -> CheckResult<EventId> {
        require(self.properties()?.ipc_events, "the device shares no events between processes")?;
        self.event_with(EventOptions { interprocess: true, ..EventOptions::default() })
    }

    pub(crate) fn timing_event(&self) -> CheckResult<EventId> {
        self.event_with(EventOptions { timing: true, ..EventOptions::default() })
    }

    pub(crate) fn event_with(&self, options: EventOptions) -> CheckResult<EventId> {
        let event = self.driver.event_create(self.device_id, options)?;
        self.track(Resource::Event(event));
        Ok(event)
    }

    pub(crate) fn destroy_event(&self, event: EventId) -> CheckResult {
        self.untrack(Resource::Event(event));
        Ok(self.driver.event_destroy(event)?)
    }

    /// Records `event` after the work that is in `stream` now.
    pub fn record(&self, event: EventId, stream: StreamId) -> CheckResult {
        Ok(self.driver.event_record(event, stream, EventScope::Plain)?)
    }

    /// Makes later work of `stream` wait for `event`.
    pub(crate) fn wait(&self, stream: StreamId, event: EventId) -> CheckResult {
        Ok(self.driver.stream_wait_event(stream, event, EventScope::Plain)?)
    }

    /// Makes later work of `second` wait for the work that is in `first` now.
    pub(crate) fn order(&self, first: StreamId, second: StreamId) -> CheckResult {
        let event = self.event()?;
        self.record(event, first)?;
        self.wait(second, event)
    }
}
