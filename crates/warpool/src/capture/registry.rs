//! The captures that are under way on a [`Instance`](crate::Instance), and what each has used so far.
//!
//! Whoever hands out something that a graph will need at every replay (a workspace, a generator's numbers) looks here
//! for the graph that the stream captures for, and leaves it there. The graph takes it all over when the capture ends.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustc_hash::FxHashMap;
use warpool_driver::{CaptureId, DeviceId, DriverError, ErrorCode};

use super::pollers::{HoldOff, Pollers};
use super::status::CaptureStatus;
use crate::error::GraphError;
use crate::generator::{GeneratorInCapture, Heads};
use crate::memory::{DeviceAllocator, GraphHostPool, MemPoolId};
use crate::{Instance, Result, Stream, lock};

/// All captures under way.
#[derive(Default)]
pub(crate) struct CaptureRegistry {
    /// How many there are, or are about to be: so that nobody needs the lock, or the driver, to see that there are
    /// none.
    under_way: AtomicUsize,
    by_id: Mutex<FxHashMap<CaptureId, Site>>,
    pub(crate) pollers: Pollers,
}

/// Where in a capture a stream stands.
#[derive(Clone)]
pub(crate) struct Site {
    /// The graph's notes.
    pub(crate) record: Arc<CaptureRecord>,
    /// Whether it is in the body of a conditional node, which runs any number of times.
    pub(crate) in_body: bool,
}

/// What is known about one graph while it is captured; shared by all its streams and threads, and by the bodies of its
/// conditional nodes.
pub(crate) struct CaptureRecord {
    pub(crate) device: DeviceId,
    /// Where its memory comes from.
    pub(crate) allocator: Arc<dyn DeviceAllocator>,
    pub(crate) pool: MemPoolId,
    pub(crate) used: Mutex<Used>,
}

/// What a graph will need at every replay.
#[derive(Default)]
pub(crate) struct Used {
    /// Owned until the graph is reset: workspaces and the like.
    pub(crate) kept: Vec<Arc<dyn Any + Send + Sync>>,
    /// Pinned memory, one entry per host allocator.
    pub(crate) host_pools: Vec<Arc<GraphHostPool>>,
    /// One entry per generator state.
    pub(crate) generators: Vec<GeneratorInCapture>,
    pub(crate) heads: Heads,
}

impl CaptureRecord {
    /// Keeps `thing` as long as the graph lives.
    pub(crate) fn keep(&self, thing: Arc<dyn Any + Send + Sync>) {
        lock(&self.used).kept.push(thing);
    }

    /// Keeps pinned memory as long as the graph lives. A second time changes nothing.
    pub(crate) fn keep_host_pool(&self, pool: &Arc<GraphHostPool>) {
        let pools = &mut lock(&self.used).host_pools;
        if !pools.iter().any(|other| Arc::ptr_eq(other, pool)) {
            pools.push(Arc::clone(pool));
        }
    }
}

impl CaptureRegistry {
    /// Whether none is under way. One load.
    pub(crate) fn none(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
    }

    /// Keeps captures from beginning until the result is dropped; `None` if one is under way, or about to be. Never
    /// waits.
    pub(crate) fn hold_off(&self) -> Option<HoldOff<'_>> {
        // Looked at with captures held off: one that began before is seen, one that comes after waits.
        self.pollers.hold_off().filter(|_| self.none())
    }

    /// One is about to begin: to be called before the driver's `capture_begin`.
    pub(crate) fn begins(&self) {
        self.under_way.fetch_add(1, Ordering::AcqRel);
    }

    /// It is over, or never came to be.
    pub(crate) fn ended(&self) {
        self.under_way.fetch_sub(1, Ordering::AcqRel);
    }

    /// Notes which graph a capture is for.
    pub(crate) fn insert(&self, id: CaptureId, site: Site) {
        lock(&self.by_id).insert(id, site);
    }

    /// Forgets a capture.
    pub(crate) fn remove(&self, id: CaptureId) {
        lock(&self.by_id).remove(&id);
    }

    /// The graph that `stream` captures for, and by which capture: a body has its own. `None` if it does not capture.
    /// Always asks the driver: also captures that began without us are seen, and are [`GraphError::ForeignCapture`]. A
    /// broken capture is the driver's own error.
    pub(crate) fn find_with_id(&self, stream: &Stream) -> Result<Option<(CaptureId, Site)>> {
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
            Some(site) => Ok(Some((id, site.clone()))),
            None => Err(GraphError::ForeignCapture.into()),
        }
    }

    /// The same without the capture.
    pub(crate) fn find(&self, stream: &Stream) -> Result<Option<Site>> {
        Ok(self.find_with_id(stream)?.map(|(_, site)| site))
    }
}

impl Instance {
    /// Whether `stream` takes part in a capture, be it a broken one. As [`Stream::is_capturing`], but asks the driver
    /// only while captures of [graphs](crate::graph::Graph) are under way: those that began past Warpool may be missed.
    pub fn is_capturing(&self, stream: &Stream) -> Result<bool> {
        self.expect_same(stream.instance(), "the stream")?;
        if self.captures().none() {
            return Ok(false);
        }
        Ok(CaptureStatus::of_existing(&**self.driver(), stream.id())?.is_capturing())
    }
}
