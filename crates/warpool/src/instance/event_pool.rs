//! Events that are used again: making and destroying one costs 2 us on an H200, recording one 0.14 us.
//!
//! Every event of this crate lives on its device's shelf or is out with somebody, and dropping one only puts it back.
//! **No destructor calls the driver**: what must not be used again waits on the shelf, and is destroyed the next time
//! that an event is made on that device, or by [`EventPool::trim`]. So an event may be dropped anywhere: in a host
//! callback, during a capture, in the destructor of a thread-local variable, while the process exits.
//!
//! Locks: one per kind of event, a leaf, held for one push or pop. Driver calls are made outside it.

use std::fmt;
use std::sync::Mutex;

use warpool_driver::{DeviceId, Driver, EventId, EventOptions, EventScope};

use crate::{Device, Error, Instance, Result, Stream, lock};

/// What becomes of an event when its owner drops it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Used again, by whoever wants one of the same options.
    Reuse { timing: bool, blocking: bool },
    /// Destroyed: another process or a graph may still know it, and mark it in its next life.
    Destroy,
}

/// The idle events of one device.
pub(crate) struct EventShelf {
    device: DeviceId,
    /// By [`EventShelf::stack`]. The last one returned goes out first: its memory in the driver is warm.
    idle: [Mutex<Vec<EventId>>; 4],
    doomed: Mutex<Vec<EventId>>,
}

impl EventShelf {
    pub(crate) fn new(device: DeviceId) -> Self {
        Self { device, idle: Default::default(), doomed: Mutex::default() }
    }

    /// An idle event of that kind, or a new one.
    fn take(&self, driver: &dyn Driver, options: EventOptions) -> Result<(EventId, Fate)> {
        let EventOptions { timing, blocking, interprocess } = options;
        if interprocess {
            return Ok((self.create(driver, options)?, Fate::Destroy));
        }
        let idle = lock(self.stack(timing, blocking)).pop();
        let id = match idle {
            Some(id) => id,
            None => self.create(driver, options)?,
        };
        Ok((id, Fate::Reuse { timing, blocking }))
    }

    /// Puts an event back. No driver call.
    fn put_back(&self, id: EventId, fate: Fate) {
        match fate {
            Fate::Reuse { timing, blocking } => lock(self.stack(timing, blocking)).push(id),
            Fate::Destroy => lock(&self.doomed).push(id),
        }
    }

    fn create(&self, driver: &dyn Driver, options: EventOptions) -> Result<EventId> {
        if let Err(error) = destroy_all_in(&self.doomed, driver) {
            tracing::warn!(device = %self.device, %error, "an old event could not be destroyed; trying again later");
        }
        Ok(driver.event_create(self.device, options)?)
    }

    /// Destroys all idle events and returns how many. Stops at the first that cannot be, and keeps it.
    fn trim(&self, driver: &dyn Driver) -> Result<usize> {
        let mut count = 0;
        for stack in self.idle.iter().chain([&self.doomed]) {
            count += destroy_all_in(stack, driver)?;
        }
        Ok(count)
    }

    /// The same, but goes on after a failure and reports the first.
    pub(crate) fn destroy_all(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for stack in self.idle.iter().chain([&self.doomed]) {
            for event in std::mem::take(&mut *lock(stack)) {
                outcome = outcome.and(driver.event_destroy(event));
            }
        }
        Ok(outcome?)
    }

    fn stack(&self, timing: bool, blocking: bool) -> &Mutex<Vec<EventId>> {
        &self.idle[usize::from(timing) + 2 * usize::from(blocking)]
    }
}

/// Destroys what is in `stack`, one by one, without holding the lock during the call.
fn destroy_all_in(stack: &Mutex<Vec<EventId>>, driver: &dyn Driver) -> Result<usize> {
    let mut count = 0;
    loop {
        let Some(event) = lock(stack).pop() else { return Ok(count) };
        if let Err(error) = driver.event_destroy(event) {
            lock(stack).push(event);
            return Err(error.into());
        }
        count += 1;
    }
}

/// The events of one device that are kept for use again: plain ones without timing, as allocators want them. No upper
/// limit.
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

    /// Makes as many events as are missing for `count` idle ones, so that the next `count` takes make no driver
    /// call. After a failure those already made are kept.
    pub fn reserve(&self, count: usize) -> Result<()> {
        let shelf = &self.device.state().events;
        // Counted once: with others taking meanwhile, "until so many are idle" might never end.
        for _ in self.idle()..count {
            let id = shelf.create(self.device.driver(), EventOptions::default())?;
            shelf.put_back(id, Fate::Reuse { timing: false, blocking: false });
        }
        Ok(())
    }

    /// How many plain events are idle.
    #[must_use]
    pub fn idle(&self) -> usize {
        lock(self.device.state().events.stack(false, false)).len()
    }

    /// Destroys all idle events of the device, those with timing too, and returns how many. At a failure it stops
    /// and keeps the rest.
    pub fn trim(&self) -> Result<usize> {
        self.device.state().events.trim(self.device.driver())
    }
}

/// An event from a pool; dropping it puts it back. [`Event`](crate::Event) is the one with options.
///
/// The previous owner's mark is never seen: until recorded it counts as done.
pub struct PooledEvent {
    instance: Instance,
    device: DeviceId,
    id: EventId,
    fate: Fate,
    /// Whether the driver has an answer that is ours: recorded, or marked by another process.
    marked: bool,
}

impl PooledEvent {
    pub(crate) fn take(device: &Device, options: EventOptions) -> Result<Self> {
        let (id, fate) = device.state().events.take(device.driver(), options)?;
        Ok(Self { instance: device.instance().clone(), device: device.id(), id, fate, marked: false })
    }

    /// An event that another process made.
    pub(crate) fn imported(device: &Device, id: EventId) -> Self {
        Self { instance: device.instance().clone(), device: device.id(), id, fate: Fate::Destroy, marked: true }
    }

    /// Its device.
    #[must_use]
    pub fn device_id(&self) -> DeviceId {
        self.device
    }

    /// Its name for the driver.
    #[must_use]
    pub fn id(&self) -> EventId {
        self.id
    }

    /// Marks the work that is in `stream` now, which must be of the same device.
    pub fn record(&mut self, stream: &Stream) -> Result<()> {
        self.record_in(stream, EventScope::Plain)
    }

    /// Whether the marked work is done; `true` if it never marked any. During a capture, ask only what the capture
    /// mode allows.
    pub fn query(&self) -> Result<bool> {
        Ok(!self.marked || self.driver().event_query(self.id)?)
    }

    /// Waits for the marked work; nothing if it never marked any.
    pub fn synchronize(&self) -> Result<()> {
        if self.marked {
            self.driver().event_synchronize(self.id)?;
        }
        Ok(())
    }

    /// Makes later work of `stream`, of any device, wait for the marked work; nothing if it never marked any.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        if self.marked {
            self.driver().stream_wait_event(stream.id(), self.id, EventScope::Plain)?;
        }
        Ok(())
    }

    /// Records into the world outside if `stream` captures, plainly if not.
    pub(crate) fn record_external(&mut self, stream: &Stream) -> Result<()> {
        self.record_in(stream, external_scope(stream)?)
    }

    /// Waits for the world outside if `stream` captures, plainly if not.
    pub(crate) fn wait_external(&self, stream: &Stream) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        match external_scope(stream)? {
            // Also when never marked: the node waits for whatever is marked by the time of the replay.
            EventScope::External => Ok(self.driver().stream_wait_event(stream.id(), self.id, EventScope::External)?),
            EventScope::Plain => self.wait(stream),
        }
    }

    /// Sees to it that nobody uses the event again.
    pub(crate) fn never_reuse(&mut self) {
        self.fate = Fate::Destroy;
    }

    /// From here on others may mark it, so the driver must be asked.
    pub(crate) fn may_be_marked_elsewhere(&mut self) {
        self.marked = true;
    }

    fn record_in(&mut self, stream: &Stream, scope: EventScope) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        if stream.device_id() != self.device {
            return Err(Error::EventDevice { event: self.device, stream: stream.device_id() });
        }
        self.driver().event_record(self.id, stream.id(), scope)?;
        self.marked = true;
        Ok(())
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }
}

/// The scope of an event that is to speak to the world outside: only a stream that captures has one.
fn external_scope(stream: &Stream) -> Result<EventScope> {
    Ok(if stream.is_capturing()? { EventScope::External } else { EventScope::Plain })
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        self.instance.state(self.device).events.put_back(self.id, self.fate);
    }
}

impl fmt::Debug for PooledEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.id, self.device)
    }
}
