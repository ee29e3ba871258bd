//! Driver objects of dropped graphs. A destructor must not call the driver, so templates, executables and captures that
//! were not ended stay here until the next capture or reset on the device, or until the [`Instance`](crate::Instance)
//! is closed.
//!
//! Nothing here keeps an allocator alive: an allocator keeps the `Instance` alive, which owns this.

use std::collections::VecDeque;
use std::sync::{Mutex, Weak};

use warpool_driver::{CaptureId, DeviceId, Driver, DriverError, ErrorCode, GraphExecId, GraphId, StreamId};

use crate::capture::CaptureStatus;
use crate::instance::{Extension, ExtensionSlot};
use crate::memory::DeviceAllocator;
use crate::{Device, Instance, Result, Stream, lock};

/// The driver objects of one device's dropped graphs.
#[derive(Default)]
pub(super) struct RetiredGraphs {
    pending_destroy: Mutex<VecDeque<GraphObject>>,
    abandoned: Mutex<VecDeque<AbandonedCapture>>,
}

/// A driver object of a graph.
#[derive(Clone, Copy, Debug)]
pub(super) enum GraphObject {
    Template(GraphId),
    Exec(GraphExecId),
}

/// A capture whose graph was dropped before it ended. Its stream is still capturing, so it still counts as active.
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

    /// Leaves `object` to be destroyed later. Makes no driver call.
    pub(super) fn destroy_later(&self, object: GraphObject) {
        lock(&self.pending_destroy).push_back(object);
    }

    /// Leaves a capture to be ended later. Makes no driver call.
    pub(super) fn end_later(&self, capture: AbandonedCapture) {
        lock(&self.abandoned).push_back(capture);
    }

    /// Destroys `object`; a failure is logged, and retried later.
    pub(super) fn destroy(&self, driver: &dyn Driver, object: GraphObject) {
        if let Err(error) = object.destroy(driver) {
            tracing::warn!(%error, ?object, "a graph could not be destroyed; trying again later");
            self.destroy_later(object);
        }
    }

    /// Ends the captures and destroys the objects that destructors left. Those that fail stay.
    pub(super) fn process_pending(&self, instance: &Instance) {
        let driver = &**instance.driver();
        // One at a time: another thread that calls this meanwhile still finds the rest.
        let count = lock(&self.abandoned).len();
        for _ in 0..count {
            let Some(capture) = lock(&self.abandoned).pop_front() else { break };
            self.end_abandoned(instance, capture);
        }
        let count = lock(&self.pending_destroy).len();
        for _ in 0..count {
            let Some(object) = lock(&self.pending_destroy).pop_front() else { break };
            self.destroy(driver, object);
        }
    }

    fn end_abandoned(&self, instance: &Instance, capture: AbandonedCapture) {
        let driver = &**instance.driver();
        if is_under_way(driver, capture.stream, capture.id).unwrap_or(true) {
            let Ok(change) = instance.change_captures() else { return self.end_later(capture) };
            let outcome = self.end_on_driver(driver, capture.stream, capture.id);
            drop(change);
            match outcome {
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

    /// Ends a capture while no typed call is enqueuing work in it. See [`end_on_driver`](Self::end_on_driver).
    pub(super) fn end(&self, stream: &Stream, id: Option<CaptureId>) -> Result<EndOutcome> {
        let _change = stream.instance().change_captures()?;
        Ok(self.end_on_driver(stream.driver(), stream.id(), id))
    }

    /// Ends a capture. A driver promises that the capture is over whatever it returns. If the call fails before the
    /// capture has ended, for example because a connection was lost, it is made once more, and the graph that it then
    /// returns is not used. A capture other than `id`, which must have been ended by someone else, is left alone.
    fn end_on_driver(&self, driver: &dyn Driver, stream: StreamId, id: Option<CaptureId>) -> EndOutcome {
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
        let still_under_way = |error: &DriverError| is_under_way(driver, stream, id).unwrap_or(!says_over(error));
        if !still_under_way(&error) {
            return EndOutcome::Failed(error);
        }
        match driver.capture_end(stream) {
            Ok(graph) => self.destroy(driver, GraphObject::Template(graph)),
            Err(again) if still_under_way(&again) => return EndOutcome::StillUnderWay(error),
            Err(_) => {}
        }
        EndOutcome::Failed(error)
    }
}

impl Extension for RetiredGraphs {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::Graphs
    }

    fn destroy(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for capture in take(&self.abandoned) {
            if is_under_way(driver, capture.stream, capture.id).unwrap_or(true) {
                match self.end_on_driver(driver, capture.stream, capture.id) {
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

/// Takes all entries of a list. The list is unlocked on return, so that entries that fail can be put back.
fn take<T>(list: &Mutex<VecDeque<T>>) -> VecDeque<T> {
    std::mem::take(&mut *lock(list))
}

/// The result of ending a capture.
pub(super) enum EndOutcome {
    /// It succeeded.
    Graph(GraphId),
    /// The capture is over, without a graph.
    Failed(DriverError),
    /// The driver did not end it.
    StillUnderWay(DriverError),
}

/// Whether the error of `capture_end` implies that its stream is no longer capturing. Used if the status cannot be
/// read: otherwise a capture that is over would still count as active.
fn says_over(error: &DriverError) -> bool {
    use ErrorCode::{
        IllegalState, InvalidHandle, StreamCaptureInvalidated, StreamCaptureUnjoined, StreamCaptureWrongThread,
    };
    matches!(
        error.code,
        IllegalState | InvalidHandle | StreamCaptureInvalidated | StreamCaptureUnjoined | StreamCaptureWrongThread
    )
}

/// Whether `stream` still takes part in that capture; `None` if its status cannot be read. An invalidated capture has
/// no id and counts as that one.
fn is_under_way(driver: &dyn Driver, stream: StreamId, id: Option<CaptureId>) -> Option<bool> {
    match CaptureStatus::of(driver, stream).ok()? {
        CaptureStatus::NotCapturing | CaptureStatus::StreamDestroyed => Some(false),
        CaptureStatus::Capturing(now) => Some(id.is_none_or(|id| id == now)),
        CaptureStatus::Invalidated | CaptureStatus::Blocked => Some(true),
    }
}
