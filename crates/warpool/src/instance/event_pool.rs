//! Pooled events: creating and destroying an event costs 2 us on an H200, recording one 0.14 us.
//!
//! Every event of this crate is either in use or idle in its device's cache, and dropping one only returns it there.
//! **No destructor calls the driver**: an event that must not be reused waits in the cache, and is destroyed the next
//! time an event is created on that device, or by [`EventPool::trim`]. So an event may be dropped anywhere: in a host
//! callback, during a capture, in the destructor of a thread-local variable, while the process exits.
//!
//! Locks: one per kind of event, a leaf, held for one push or pop. Driver calls are made outside of it.

use std::fmt;
use std::sync::Mutex;

use warpool_driver::{DeviceId, Driver, EventId, EventOptions, EventScope};

use super::Instance;
use super::device::Device;
use super::stream::Stream;
use crate::{Error, Result, lock};

/// What happens to an event when it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnDrop {
    /// It is reused for a request with the same options.
    Reuse { timing: bool, blocking: bool },
    /// It is destroyed: another process or a graph may still record it.
    Destroy,
}

/// The idle events of one device.
pub(super) struct EventCache {
    device: DeviceId,
    /// By [`EventCache::idle_of`]. The event that was returned last is reused first: its memory in the driver is warm.
    idle: [Mutex<Vec<EventId>>; 4],
    pending_destroy: Mutex<Vec<EventId>>,
}

impl EventCache {
    pub(super) fn new(device: DeviceId) -> Self {
        Self { device, idle: Default::default(), pending_destroy: Mutex::default() }
    }

    /// An idle event of that kind, or a new one.
    fn take(&self, driver: &dyn Driver, options: EventOptions) -> Result<(EventId, OnDrop)> {
        let EventOptions { timing, blocking, interprocess } = options;
        if interprocess {
            return Ok((self.create(driver, options)?, OnDrop::Destroy));
        }
        let idle = lock(self.idle_of(timing, blocking)).pop();
        let id = match idle {
            Some(id) => id,
            None => self.create(driver, options)?,
        };
        Ok((id, OnDrop::Reuse { timing, blocking }))
    }

    /// Takes an event back. Makes no driver call.
    fn put_back(&self, id: EventId, on_drop: OnDrop) {
        match on_drop {
            OnDrop::Reuse { timing, blocking } => lock(self.idle_of(timing, blocking)).push(id),
            OnDrop::Destroy => lock(&self.pending_destroy).push(id),
        }
    }

    fn create(&self, driver: &dyn Driver, options: EventOptions) -> Result<EventId> {
        if let Err(error) = destroy_list(&self.pending_destroy, driver) {
            tracing::warn!(device = %self.device, %error, "an event could not be destroyed; trying again later");
        }
        Ok(driver.event_create(self.device, options)?)
    }

    /// Destroys all idle events and returns how many. Stops at the first failure and keeps the rest.
    fn trim(&self, driver: &dyn Driver) -> Result<usize> {
        let mut count = 0;
        for list in self.idle.iter().chain([&self.pending_destroy]) {
            count += destroy_list(list, driver)?;
        }
        Ok(count)
    }

    /// Destroys all idle events. After a failure it continues, and returns the first error.
    pub(super) fn destroy_all(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for list in self.idle.iter().chain([&self.pending_destroy]) {
            for event in std::mem::take(&mut *lock(list)) {
                outcome = outcome.and(driver.event_destroy(event));
            }
        }
        Ok(outcome?)
    }

    fn idle_of(&self, timing: bool, blocking: bool) -> &Mutex<Vec<EventId>> {
        &self.idle[usize::from(timing) + 2 * usize::from(blocking)]
    }
}

/// Destroys the events of `list`, one by one, without holding the lock during a call.
fn destroy_list(list: &Mutex<Vec<EventId>>, driver: &dyn Driver) -> Result<usize> {
    let mut count = 0;
    loop {
        let Some(event) = lock(list).pop() else { return Ok(count) };
        if let Err(error) = driver.event_destroy(event) {
            lock(list).push(event);
            return Err(error.into());
        }
        count += 1;
    }
}

/// The pool of one device's events: plain ones without timing, as allocators need them. Without an upper limit.
#[derive(Clone, Debug)]
pub struct EventPool {
    device: Device,
}

impl Device {
    /// The device's pool of events.
    #[must_use]
    pub fn event_pool(&self) -> EventPool {
        EventPool { device: self.clone() }
    }
}

impl EventPool {
    /// The event that was returned last, or a new one.
    pub fn take(&self) -> Result<PooledEvent> {
        PooledEvent::take(&self.device, EventOptions::default())
    }

    /// Creates events until `count` are idle, so that the next `count` takes make no driver call. After a failure those
    /// already created are kept.
    pub fn reserve(&self, count: usize) -> Result<()> {
        let events = &self.device.state().events;
        // Counted once: while other threads take events, a loop until `count` are idle might never end.
        for _ in self.idle()..count {
            let id = events.create(self.device.driver(), EventOptions::default())?;
            events.put_back(id, OnDrop::Reuse { timing: false, blocking: false });
        }
        Ok(())
    }

    /// How many plain events are idle.
    #[must_use]
    pub fn idle(&self) -> usize {
        lock(self.device.state().events.idle_of(false, false)).len()
    }

    /// Destroys all idle events of the device, including those with timing, and returns how many. Stops at the first
    /// failure and keeps the rest.
    pub fn trim(&self) -> Result<usize> {
        self.device.state().events.trim(self.device.driver())
    }
}

/// An event from a pool; dropping it returns it. [`Event`](crate::Event) is the one with options.
///
/// A record of an earlier owner does not count: until it is recorded again, it counts as completed.
pub struct PooledEvent {
    instance: Instance,
    device: DeviceId,
    id: EventId,
    on_drop: OnDrop,
    /// Whether its status must be read from the driver: it was recorded here, or may have been recorded by another
    /// process.
    recorded: bool,
}

impl PooledEvent {
    pub(super) fn take(device: &Device, options: EventOptions) -> Result<Self> {
        let (id, on_drop) = device.state().events.take(device.driver(), options)?;
        Ok(Self { instance: device.instance().clone(), device: device.id(), id, on_drop, recorded: false })
    }

    /// An event that another process created.
    pub(super) fn imported(device: &Device, id: EventId) -> Self {
        let on_drop = OnDrop::Destroy;
        Self { instance: device.instance().clone(), device: device.id(), id, on_drop, recorded: true }
    }

    /// Its device.
    #[must_use]
    pub fn device_id(&self) -> DeviceId {
        self.device
    }

    /// The driver's id of it.
    #[must_use]
    pub fn id(&self) -> EventId {
        self.id
    }

    /// Records it after the work that `stream` holds now. The stream must be of the same device.
    pub fn record(&mut self, stream: &Stream) -> Result<()> {
        self.record_in(stream, EventScope::Plain)
    }

    /// Whether the work before it is done; `true` if it was never recorded. During a capture, the capture mode decides
    /// whether a query is allowed.
    pub fn query(&self) -> Result<bool> {
        Ok(!self.recorded || self.driver().event_query(self.id)?)
    }

    /// Waits for the work before it; returns at once if it was never recorded.
    pub fn synchronize(&self) -> Result<()> {
        if self.recorded {
            self.driver().event_synchronize(self.id)?;
        }
        Ok(())
    }

    /// Makes later work of `stream`, of any device, wait for the event; does nothing if it was never recorded.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        if self.recorded {
            self.driver().stream_wait_event(stream.id(), self.id, EventScope::Plain)?;
        }
        Ok(())
    }

    /// Records it as an external event if `stream` is capturing, else as a plain one.
    pub(super) fn record_external(&mut self, stream: &Stream) -> Result<()> {
        self.record_in(stream, external_scope(stream)?)
    }

    /// Waits for it as an external event if `stream` is capturing, else as a plain one.
    pub(super) fn wait_external(&self, stream: &Stream) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        match external_scope(stream)? {
            // Even if it was never recorded: the node waits for the record that exists at the time of the replay.
            EventScope::External => Ok(self.driver().stream_wait_event(stream.id(), self.id, EventScope::External)?),
            EventScope::Plain => self.wait(stream),
        }
    }

    /// Marks it to be destroyed instead of reused.
    pub(crate) fn never_reuse(&mut self) {
        self.on_drop = OnDrop::Destroy;
    }

    /// Marks it as one that another process may record, so its status is always read from the driver.
    pub(super) fn may_be_recorded_elsewhere(&mut self) {
        self.recorded = true;
    }

    fn record_in(&mut self, stream: &Stream, scope: EventScope) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        if stream.device_id() != self.device {
            return Err(Error::EventDevice { event: self.device, stream: stream.device_id() });
        }
        self.driver().event_record(self.id, stream.id(), scope)?;
        self.recorded = true;
        Ok(())
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }
}

/// The scope of an external event on `stream`: external only if the stream is capturing.
fn external_scope(stream: &Stream) -> Result<EventScope> {
    Ok(if stream.is_capturing()? { EventScope::External } else { EventScope::Plain })
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        if !self.instance.is_inherited() {
            self.instance.state(self.device).events.put_back(self.id, self.on_drop);
        }
    }
}

impl fmt::Debug for PooledEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.id, self.device)
    }
}
