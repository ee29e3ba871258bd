//! What dropped graphs leave on the driver. A destructor must not call the driver, so templates, executables and
//! captures that were not ended wait here until the next capture or reset on the device, or until the
//! [`Instance`](crate::Instance) is closed.
//!
//! Nothing here keeps an allocator alive: an allocator keeps the `Instance` alive, which owns this.

use std::sync::{Mutex, Weak};

use warpool_driver::{CaptureId, DeviceId, Driver, DriverError, ErrorCode, GraphExecId, GraphId, StreamId};

use crate::capture::CaptureStatus;
use crate::instance::{Extension, ExtensionSlot};
use crate::memory::DeviceAllocator;
use crate::{Device, Instance, Result, lock};

/// The driver objects of one device's dropped graphs.
#[derive(Default)]
pub(super) struct RetiredGraphs {
    pending_destroy: Mutex<Vec<GraphObject>>,
    abandoned: Mutex<Vec<AbandonedCapture>>,
}

/// A driver object of a graph.
#[derive(Clone, Copy, Debug)]
pub(super) enum GraphObject {
    Template(GraphId),
    Exec(GraphExecId),
}

/// A capture whose graph was dropped before it ended. Its stream still captures, so it still counts as under way.
pub(super) struct AbandonedCapture {
    pub(super) stream: StreamId,
    /// `None` if the driver never returned it.
    pub(super) id: Option<CaptureId>,
    pub(super) device: DeviceId,
    pub(super) allocator: Weak<dyn DeviceAllocator>,
}

impl GraphObject {
    fn destroy(self, driver: &dyn Driver) -> warpool_driver::Result<()> {
        match self {
            Self::Template(graph) => driver.graph_destroy(graph),
            Self::Exec(exec) => driver.graph_exec_destroy(exec),
        }
    }
}

impl RetiredGraphs {
    pub(super) fn of(device: &Device) -> &Self {
        device.extensions().get_or_init(Self::default)
    }

    /// Has `object` destroyed later. No driver call.
    pub(super) fn destroy_later(&self, object: GraphObject) {
        lock(&self.pending_destroy).push(object);
    }

    /// Has a capture ended later. No driver call.
    pub(super) fn end_later(&self, capture: AbandonedCapture) {
        lock(&self.abandoned).push(capture);
    }

    /// Destroys `object`; a failure is logged, and retried later.
    pub(super) fn destroy(&self, driver: &dyn Driver, object: GraphObject) {
        if let Err(error) = object.destroy(driver) {
            tracing::warn!(%error, ?object, "a graph could not be destroyed; trying again later");
            self.destroy_later(object);
        }
    }

    /// Ends and destroys what destructors left. What fails stays.
    pub(super) fn process_pending(&self, instance: &Instance) {
        let driver = &**instance.driver();
        for capture in take(&self.abandoned) {
            self.end_abandoned(instance, capture);
        }
        for object in take(&self.pending_destroy) {
            self.destroy(driver, object);
        }
    }

    fn end_abandoned(&self, instance: &Instance, capture: AbandonedCapture) {
        let driver = &**instance.driver();
        if is_under_way(driver, capture.stream, capture.id) {
            match self.end(driver, capture.stream, capture.id) {
                EndOutcome::Graph(graph) => self.destroy(driver, GraphObject::Template(graph)),
                EndOutcome::Failed(_) => {}
                EndOutcome::StillUnderWay(error) => {
                    tracing::warn!(
                        %error,
                        stream = %capture.stream,
                        "the capture of a dropped graph could not be ended; trying again later"
                    );
                    self.end_later(capture);
                    return;
                }
            }
        }
        instance.uncount_capture();
        if let Some(allocator) = capture.allocator.upgrade()
            && let Ok(pools) = allocator.pools()
        {
            // Its only error is an end without a begin, and this capture was counted.
            let _ = pools.capture_ended(capture.device);
        }
    }

    /// Ends a capture. A driver promises that the capture is over whatever it returns; if it fails before it has ended
    /// anything, as by a lost connection, it is called once more, and the graph that it then returns is not used. A
    /// capture other than `id`, which must have been ended by someone else, is left alone.
    pub(super) fn end(&self, driver: &dyn Driver, stream: StreamId, id: Option<CaptureId>) -> EndOutcome {
        if let (Some(id), Ok(CaptureStatus::Capturing(now))) = (id, CaptureStatus::of(driver, stream))
            && id != now
        {
            let detail = format!("{stream} now takes part in {now}; {id} was ended outside of its graph");
            return EndOutcome::Failed(DriverError::new("capture_end", ErrorCode::IllegalState).with_detail(detail));
        }
        let error = match driver.capture_end(stream) {
            Ok(graph) => return EndOutcome::Graph(graph),
            Err(error) => error,
        };
        if !is_under_way(driver, stream, id) {
            return EndOutcome::Failed(error);
        }
        if let Ok(graph) = driver.capture_end(stream) {
            self.destroy(driver, GraphObject::Template(graph));
            return EndOutcome::Failed(error);
        }
        if is_under_way(driver, stream, id) { EndOutcome::StillUnderWay(error) } else { EndOutcome::Failed(error) }
    }
}

impl Extension for RetiredGraphs {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::Graphs
    }

    fn destroy(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for capture in take(&self.abandoned) {
            if is_under_way(driver, capture.stream, capture.id) {
                match self.end(driver, capture.stream, capture.id) {
                    EndOutcome::Graph(graph) => self.destroy_later(GraphObject::Template(graph)),
                    EndOutcome::Failed(_) => {}
                    EndOutcome::StillUnderWay(error) => outcome = outcome.and(Err(error)),
                }
            }
        }
        for object in take(&self.pending_destroy) {
            outcome = outcome.and(object.destroy(driver));
        }
        Ok(outcome?)
    }
}

/// Takes a list out. It is unlocked when this returns, so that what fails can be put back.
fn take<T>(list: &Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut *lock(list))
}

/// How the end of a capture went.
pub(super) enum EndOutcome {
    /// It succeeded.
    Graph(GraphId),
    /// The capture is over, without a graph.
    Failed(DriverError),
    /// The driver did not end it.
    StillUnderWay(DriverError),
}

/// Whether `stream` still takes part in that capture. An invalidated capture has no id and counts as that one; so does
/// a stream whose status cannot be read.
fn is_under_way(driver: &dyn Driver, stream: StreamId, id: Option<CaptureId>) -> bool {
    match CaptureStatus::of(driver, stream) {
        Ok(CaptureStatus::NotCapturing | CaptureStatus::StreamDestroyed) => false,
        Ok(CaptureStatus::Capturing(now)) => id.is_none_or(|id| id == now),
        Ok(CaptureStatus::Invalidated | CaptureStatus::Blocked) | Err(_) => true,
    }
}
