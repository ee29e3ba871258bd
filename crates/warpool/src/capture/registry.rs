//! The active captures of an [`Instance`], and the objects that each has used so far.
//!
//! A module that provides an object that a graph needs at every replay (a workspace, a generator's slot, pinned memory)
//! looks up the capture of a stream here, and stores the object in the capture's record, in a slot of its own type.
//! When the capture ends, the graph takes over all slots.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustc_hash::FxHashMap;
use warpool_driver::{CaptureId, DeviceId, Driver, DriverError, ErrorCode};

use super::pollers::{HoldOff, Pollers};
use crate::capture_status::CaptureStatus;
use crate::error::GraphError;
use crate::instance::{Extension, ExtensionSlot};
use crate::sync::{CaptureChange, FrozenCaptures, FrozenForCall};
use crate::{Instance, Result, Stream, lock};

/// The active captures that graphs have begun, and the threads that poll.
#[derive(Default)]
pub(crate) struct CaptureRegistry {
    by_id: Mutex<FxHashMap<CaptureId, StreamCapture>>,
    pub(crate) pollers: Pollers,
}

impl Extension for CaptureRegistry {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::Captures
    }

    fn destroy(&self, _: &dyn Driver) -> Result<()> {
        Ok(())
    }
}

/// The capture that a stream takes part in.
#[derive(Clone)]
pub(crate) struct StreamCapture {
    /// The body of a conditional node has its own id.
    pub(crate) id: CaptureId,
    /// Shared by all streams and threads of the capture, and by the bodies of its conditional nodes.
    pub(crate) record: Arc<CaptureRecord>,
    /// Whether this is the body of a conditional node, which runs any number of times.
    pub(crate) in_body: bool,
}

/// One graph while it is captured.
pub(crate) struct CaptureRecord {
    pub(crate) device: DeviceId,
    /// The source of the graph's memory.
    memory: Box<dyn Any + Send + Sync>,
    slots: Mutex<CaptureSlots>,
}

impl CaptureRecord {
    /// `memory` describes the source of the graph's memory; its type is defined by the module `memory`.
    pub(crate) fn new(device: DeviceId, memory: impl Any + Send + Sync) -> Self {
        Self { device, memory: Box::new(memory), slots: Mutex::default() }
    }

    /// The value that was passed to [`new`](Self::new).
    pub(crate) fn memory<T: Any>(&self) -> &T {
        self.memory.downcast_ref().expect("captures are begun with one type of memory")
    }

    /// Reads or changes the slot of type `T`, under the record's lock: `act` calls neither the driver nor user code.
    pub(crate) fn with<T: Default + Send + Sync + 'static, R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        act(lock(&self.slots).get_mut())
    }

    /// Takes all slots, for the graph to own. Called at the end of the capture.
    pub(crate) fn take_slots(&self) -> CaptureSlots {
        std::mem::take(&mut *lock(&self.slots))
    }
}

/// The objects that a graph needs at every replay: one value per type, each defined by the module that stores it.
#[derive(Default)]
pub(crate) struct CaptureSlots(Vec<Box<dyn Any + Send + Sync>>);

impl CaptureSlots {
    fn get_mut<T: Default + Send + Sync + 'static>(&mut self) -> &mut T {
        let at = self.0.iter().position(|slot| slot.is::<T>()).unwrap_or_else(|| {
            self.0.push(Box::new(T::default()));
            self.0.len() - 1
        });
        self.0[at].downcast_mut().expect("found by its type")
    }

    /// Takes one value out; its default if there is none.
    pub(crate) fn take<T: Default + Send + Sync + 'static>(&mut self) -> T {
        std::mem::take(self.get_mut())
    }
}

impl CaptureRegistry {
    /// Adds the capture that has just begun on `stream`, or the body of a conditional node (`in_body`).
    pub(crate) fn add(&self, stream: &Stream, record: &Arc<CaptureRecord>, in_body: bool) -> Result<CaptureId> {
        match CaptureStatus::of_existing(stream.driver(), stream.id())? {
            CaptureStatus::Capturing(id) => {
                self.insert(StreamCapture { id, record: Arc::clone(record), in_body });
                Ok(id)
            }
            // Any other status is caused by a raw call of another thread since the capture began.
            _ => Err(GraphError::StreamCaptures { stream: stream.id() }.into()),
        }
    }

    pub(crate) fn insert(&self, capture: StreamCapture) {
        lock(&self.by_id).insert(capture.id, capture);
    }

    pub(crate) fn remove(&self, id: CaptureId) {
        lock(&self.by_id).remove(&id);
    }

    /// The capture that `stream` takes part in; `None` if it is not capturing. Always calls the driver, so captures
    /// that were begun without a graph are found too, as [`GraphError::ForeignCapture`]. An invalidated capture is
    /// reported as the driver's error.
    pub(crate) fn find(&self, stream: &Stream) -> Result<Option<StreamCapture>> {
        let id = match CaptureStatus::of_existing(stream.driver(), stream.id())? {
            CaptureStatus::Capturing(id) => id,
            CaptureStatus::Invalidated => {
                let detail = format!("{stream} takes part in a capture that was invalidated");
                return Err(DriverError::new("capture_state", ErrorCode::StreamCaptureInvalidated)
                    .with_detail(detail)
                    .into());
            }
            CaptureStatus::NotCapturing | CaptureStatus::Blocked | CaptureStatus::StreamDestroyed => return Ok(None),
        };
        match lock(&self.by_id).get(&id) {
            Some(capture) => Ok(Some(capture.clone())),
            None => Err(GraphError::ForeignCapture.into()),
        }
    }
}

impl Instance {
    /// Whether `stream` takes part in a capture, valid or invalidated. As [`Stream::is_capturing`], but calls the
    /// driver only while captures of [graphs](crate::graph::Graph) are active: captures begun without one may be
    /// missed.
    pub fn is_capturing(&self, stream: &Stream) -> Result<bool> {
        self.expect_same(stream.instance(), "the stream")?;
        if !self.has_captures() {
            return Ok(false);
        }
        Ok(CaptureStatus::of_existing(&**self.driver(), stream.id())?.is_capturing())
    }

    /// Whether captures of graphs are active, or about to begin. One load.
    #[inline]
    pub(crate) fn has_captures(&self) -> bool {
        self.captures_under_way().load(Ordering::Acquire) > 0
    }

    /// Counts a capture. Call it before the driver's `capture_begin`.
    pub(crate) fn count_capture(&self) {
        self.captures_under_way().fetch_add(1, Ordering::AcqRel);
    }

    /// Uncounts a capture that has ended, or was not begun.
    pub(crate) fn uncount_capture(&self) {
        self.captures_under_way().fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn captures(&self) -> &CaptureRegistry {
        self.extensions().get_or_init(CaptureRegistry::default)
    }

    /// Keeps captures of graphs from beginning and ending until the result is dropped: the capture status of `stream`
    /// stays the same, except that it may join one. Waits while one begins or ends; fails with the driver's error
    /// inside a host callback. Call it without a lock that a typed call needs.
    pub(crate) fn freeze_captures(&self, stream: &Stream) -> Result<FrozenCaptures<'_>> {
        self.capture_gate().enter(stream.id().0, || {
            self.expect_own_process("queue typed work")?;
            self.driver().current_device()?;
            Ok(())
        })
    }

    /// As [`freeze_captures`](Self::freeze_captures), if none is beginning or ending.
    #[inline]
    pub(crate) fn try_freeze_captures(&self, stream: &Stream) -> Option<FrozenCaptures<'_>> {
        self.capture_gate().try_enter(stream.id().0)
    }

    /// As [`freeze_captures`](Self::freeze_captures), for driver calls of an allocator, which may hold its own locks.
    /// Hold the result neither over user code nor over another call of this.
    pub(crate) fn freeze_captures_for_call(&self) -> Result<FrozenForCall<'_>> {
        self.capture_gate().enter_for_call(|| {
            self.driver().current_device()?;
            Ok(())
        })
    }

    /// Waits for typed calls that are between their check and their driver call, and keeps others from beginning, until
    /// the result is dropped. Hold it over a driver call that begins or ends a capture.
    pub(crate) fn change_captures(&self) -> Result<CaptureChange<'_>> {
        self.expect_no_typed_call()?;
        Ok(self.capture_gate().close())
    }

    /// Fails if beginning or ending a capture would wait for the calling thread itself.
    pub(crate) fn expect_no_typed_call(&self) -> Result<()> {
        if self.capture_gate().is_thread_inside() { Err(GraphError::InTypedCall.into()) } else { Ok(()) }
    }

    /// Keeps captures from beginning until the result is dropped; `None` if one is active or about to begin. Never
    /// waits.
    pub(crate) fn hold_off_captures(&self) -> Option<HoldOff<'_>> {
        // Counted captures are read while captures are held off: one that began before is seen, a later one waits.
        self.captures().pollers.hold_off().filter(|_| !self.has_captures())
    }
}
