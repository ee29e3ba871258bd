//! What dropped graphs leave behind: a destructor must not call the driver, so templates, executables and captures that
//! nobody ended wait here until the next capture or reset on the device, or until the [`Instance`](crate::Instance) is closed.
//!
//! Nothing here keeps an allocator alive: those hold the `Instance`, which holds this.

use std::sync::{Mutex, Weak};

use warpool_driver::{CaptureId, DeviceId, Driver, DriverError, ErrorCode, GraphExecId, GraphId, StreamId};

use crate::capture::{CaptureRegistry, CaptureStatus};
use crate::memory::DeviceAllocator;
use crate::{Result, lock};

/// What of one device's graphs is to go.
#[derive(Default)]
pub(crate) struct GraphShelf {
    doomed: Mutex<Vec<Doomed>>,
    orphans: Mutex<Vec<Orphan>>,
}

/// Something of the driver's that nobody will use any more.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Doomed {
    Template(GraphId),
    Exec(GraphExecId),
}

/// A capture whose graph was dropped before it ended. Its stream still captures, so it still counts as under way.
pub(crate) struct Orphan {
    pub(crate) stream: StreamId,
    /// Which one; unknown if the driver never said.
    pub(crate) id: Option<CaptureId>,
    pub(crate) device: DeviceId,
    pub(crate) allocator: Weak<dyn DeviceAllocator>,
}

impl Doomed {
    fn destroy(self, driver: &dyn Driver) -> warpool_driver::Result<()> {
        match self {
            Self::Template(graph) => driver.graph_destroy(graph),
            Self::Exec(exec) => driver.graph_exec_destroy(exec),
        }
    }
}

impl GraphShelf {
    /// Leaves something for later. No driver call.
    pub(crate) fn doom(&self, thing: Doomed) {
        lock(&self.doomed).push(thing);
    }

    /// Leaves a capture for later. No driver call.
    pub(crate) fn abandon(&self, orphan: Orphan) {
        lock(&self.orphans).push(orphan);
    }

    /// Destroys `thing`; if that fails, says so and tries again later.
    pub(crate) fn destroy(&self, driver: &dyn Driver, thing: Doomed) {
        if let Err(error) = thing.destroy(driver) {
            tracing::warn!(%error, ?thing, "a graph could not be destroyed; trying again later");
            self.doom(thing);
        }
    }

    /// Does what destructors left. What cannot be done stays.
    pub(crate) fn settle(&self, driver: &dyn Driver, captures: &CaptureRegistry) {
        for orphan in take(&self.orphans) {
            self.end_orphan(driver, captures, orphan);
        }
        for thing in take(&self.doomed) {
            self.destroy(driver, thing);
        }
    }

    fn end_orphan(&self, driver: &dyn Driver, captures: &CaptureRegistry, orphan: Orphan) {
        if is_under_way(driver, orphan.stream, orphan.id) {
            match self.end(driver, orphan.stream, orphan.id) {
                Ended::Graph(graph) => self.destroy(driver, Doomed::Template(graph)),
                Ended::Failed(_) => {}
                Ended::StillUnderWay(error) => {
                    tracing::warn!(%error, stream = %orphan.stream, "an abandoned capture could not be ended; trying again later");
                    self.abandon(orphan);
                    return;
                }
            }
        }
        captures.ended();
        if let Some(allocator) = orphan.allocator.upgrade()
            && let Ok(pools) = allocator.pools()
        {
            // It can only say that it knows of no capture, and it was told of this one.
            let _ = pools.capture_ended(orphan.device);
        }
    }

    /// The same at the very end: goes on after a failure and reports the first.
    pub(crate) fn destroy_all(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for orphan in take(&self.orphans) {
            if is_under_way(driver, orphan.stream, orphan.id) {
                match self.end(driver, orphan.stream, orphan.id) {
                    Ended::Graph(graph) => self.doom(Doomed::Template(graph)),
                    Ended::Failed(_) => {}
                    Ended::StillUnderWay(error) => outcome = outcome.and(Err(error)),
                }
            }
        }
        for thing in take(&self.doomed) {
            outcome = outcome.and(thing.destroy(driver));
        }
        Ok(outcome?)
    }

    /// Ends a capture. A driver promises that it is over whatever the answer; one that fails before it has looked, as a
    /// lost connection would, is asked once more, and what it then gives is not trusted. Another capture than `id`,
    /// which must have been ended past us, is left alone.
    pub(crate) fn end(&self, driver: &dyn Driver, stream: StreamId, id: Option<CaptureId>) -> Ended {
        if let (Some(id), Ok(CaptureStatus::Capturing(now))) = (id, CaptureStatus::of(driver, stream))
            && id != now
        {
            let detail = format!("{stream} captures for {now} by now; somebody else has ended {id}");
            return Ended::Failed(DriverError::new("capture_end", ErrorCode::IllegalState).with_detail(detail));
        }
        let error = match driver.capture_end(stream) {
            Ok(graph) => return Ended::Graph(graph),
            Err(error) => error,
        };
        if !is_under_way(driver, stream, id) {
            return Ended::Failed(error);
        }
        if let Ok(graph) = driver.capture_end(stream) {
            self.destroy(driver, Doomed::Template(graph));
            return Ended::Failed(error);
        }
        if is_under_way(driver, stream, id) { Ended::StillUnderWay(error) } else { Ended::Failed(error) }
    }
}

/// All that is in a list, which is unlocked again when this returns: what cannot be done goes back into it.
fn take<T>(list: &Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut *lock(list))
}

/// How the end of a capture went.
pub(crate) enum Ended {
    /// Well.
    Graph(GraphId),
    /// Badly, but it is over.
    Failed(DriverError),
    /// The driver did not even end it.
    StillUnderWay(DriverError),
}

/// Whether `stream` still captures, and for that capture. A broken one does not tell which it is, and is taken for it;
/// so is one that cannot be asked about.
fn is_under_way(driver: &dyn Driver, stream: StreamId, id: Option<CaptureId>) -> bool {
    match CaptureStatus::of(driver, stream) {
        Ok(CaptureStatus::NotCapturing | CaptureStatus::StreamDestroyed) => false,
        Ok(CaptureStatus::Capturing(now)) => id.is_none_or(|id| id == now),
        Ok(CaptureStatus::Invalidated | CaptureStatus::Blocked) | Err(_) => true,
    }
}
