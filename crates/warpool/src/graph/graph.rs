//! The graph itself: what it holds at each stage, and everything that is neither capturing nor replaying.
//!
//! # What happens to memory when a graph goes
//! Replays may be under way when a graph is reset or dropped, on streams that its memory was never allocated for.
//! Nothing waits for them there:
//! - Blocks that it owns go back to their allocator, which was told of every stream that replays ran on, and gives them
//!   out again only behind those.
//! - Its own pool gives out nothing any more once nobody uses it. Its memory goes back to the driver when the allocator
//!   is trimmed or needs room; that waits for the streams that replays ran on.
//! - A pool that others still use is theirs to order: graphs that share one must not overlap.
//! - Pinned blocks, be they owned or used in passing, go back to their allocator when the last graph of the pool goes,
//!   and to their next owner behind the streams that replays ran on.
//! - The executable is destroyed, or left on a shelf by a destructor; launches under way complete either way.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use warpool_driver::{GraphExecId, GraphId, GraphTopology, RawHandle};

use super::begin::{UnderWay, release_pools};
use super::buffers::{BufferKey, Buffers};
use super::end::instantiate;
use super::replay::SeenStreams;
use super::shelf::Doomed;
use super::{GraphError, GraphOptions};
use crate::capture::Used;
use crate::generator::GeneratorInCapture;
use crate::memory::{DeviceAllocator, DeviceBlock, GraphHostPool, MemPoolId};
use crate::{Device, Result, Stream};

/// Captured work that can be run again and again.
///
/// It owns what the work needs: the pools that its memory came from, blocks that were moved or lent into it (pinned
/// ones too), workspaces and generators' slots. In safe Rust none of that can go before the graph does. See the
/// [module](super) for how it is used.
///
/// A block that a graph keeps is gone for everybody else:
/// ```compile_fail,E0382
/// # use warpool::{Stream, graph::{CaptureOptions, Graph}, memory::DeviceBlock};
/// # fn lost(graph: &mut Graph, stream: &Stream, block: DeviceBlock) -> warpool::Result<()> {
/// graph.capture(stream, CaptureOptions::default(), |capture| capture.keep(block))?;
/// drop(block);
/// # Ok(())
/// # }
/// ```
/// A buffer is only lent, and cannot outlive its graph:
/// ```compile_fail,E0505
/// # use warpool::graph::{BufferKey, Graph};
/// # fn outlives(graph: Graph, key: BufferKey) -> warpool::Result<()> {
/// let buffer = graph.buffer(key)?;
/// drop(graph);
/// println!("{buffer:?}");
/// # Ok(())
/// # }
/// ```
/// The scope of a capture cannot leave it:
/// ```compile_fail,E0521
/// # use warpool::{Stream, graph::{Capture, CaptureOptions, Graph}};
/// # fn escapes(graph: &mut Graph, stream: &Stream) -> warpool::Result<()> {
/// let mut escaped = None;
/// graph.capture(stream, CaptureOptions::default(), |capture| {
///     escaped = Some(capture);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
/// Inside its own capture the graph can be neither replayed nor reset:
/// ```compile_fail,E0502
/// # use warpool::{Stream, graph::{CaptureOptions, Graph}};
/// # fn replayed(graph: &mut Graph, stream: &Stream) -> warpool::Result<()> {
/// graph.capture(stream, CaptureOptions::default(), |_| graph.replay(stream))
/// # }
/// ```
/// ```compile_fail,E0499
/// # use warpool::{Stream, graph::{CaptureOptions, Graph}};
/// # fn reset(graph: &mut Graph, stream: &Stream) -> warpool::Result<()> {
/// graph.capture(stream, CaptureOptions::default(), |_| graph.reset())
/// # }
/// ```
pub struct Graph {
    pub(super) allocator: Arc<dyn DeviceAllocator>,
    pub(super) device: Device,
    pub(super) options: GraphOptions,
    pub(super) stage: Stage,
}

/// Where a graph stands.
pub(super) enum Stage {
    /// It holds nothing.
    New,
    Capturing(Box<UnderWay>),
    Captured(Box<Captured>),
}

/// What a capture came to.
pub(super) struct Captured {
    /// There if the graph keeps it, or if generators need it: their arguments are set through its nodes.
    pub(super) template: Option<GraphId>,
    pub(super) exec: OnceLock<GraphExecId>,
    is_empty: bool,
    pools: Vec<MemPoolId>,
    pub(super) buffers: Buffers,
    /// Workspaces and the like.
    _kept: Vec<Arc<dyn Any + Send + Sync>>,
    host_pools: Vec<Arc<GraphHostPool>>,
    pub(super) generators: Vec<GeneratorInCapture>,
    /// Held while it is made ready, and over a replay with generators.
    pub(super) turn: Mutex<()>,
    pub(super) seen: SeenStreams,
}

impl Captured {
    pub(super) fn new(
        template: Option<GraphId>,
        exec: Option<GraphExecId>,
        is_empty: bool,
        pools: Vec<MemPoolId>,
        buffers: Buffers,
        used: Used,
    ) -> Self {
        Self {
            template,
            exec: exec.map_or_else(OnceLock::new, OnceLock::from),
            is_empty,
            pools,
            buffers,
            _kept: used.kept,
            host_pools: used.host_pools,
            generators: used.generators,
            turn: Mutex::default(),
            seen: SeenStreams::default(),
        }
    }

    /// Notes that replays run on `stream`.
    pub(super) fn record_use(&self, allocator: &Arc<dyn DeviceAllocator>, stream: &Stream) -> Result<()> {
        let keeper = allocator.pools()?;
        for &pool in &self.pools {
            keeper.record_pool_use(stream.device_id(), pool, stream.id())?;
        }
        self.host_pools.iter().for_each(|pool| pool.record_replay(stream));
        self.generators.iter().try_for_each(|generator| generator.record_use(stream))?;
        self.buffers.record_use(stream)
    }

    /// What is the driver's of it.
    fn objects(&self) -> impl Iterator<Item = Doomed> {
        let exec = self.exec.get().copied().map(Doomed::Exec);
        exec.into_iter().chain(self.template.map(Doomed::Template))
    }
}

impl Graph {
    /// A graph that holds nothing yet, for streams of `device` and with memory from `allocator`, which must have
    /// private pools. Makes no driver call.
    pub fn new(allocator: &Arc<dyn DeviceAllocator>, device: &Device, options: GraphOptions) -> Result<Self> {
        allocator.instance().expect_same(device.instance(), "the device")?;
        allocator.pools()?;
        Ok(Self { allocator: Arc::clone(allocator), device: device.clone(), options, stage: Stage::New })
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How it was made.
    #[must_use]
    pub fn options(&self) -> GraphOptions {
        self.options
    }

    /// Whether a capture of it is under way.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        matches!(self.stage, Stage::Capturing(_))
    }

    /// Whether a capture of it has succeeded: it can be replayed.
    #[must_use]
    pub fn is_captured(&self) -> bool {
        matches!(self.stage, Stage::Captured(_))
    }

    /// Whether nothing was captured. Most often the work went to another stream or device then.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.captured()?.is_empty)
    }

    /// The pool that its memory comes from, for [sharing](super::CaptureOptions::pool) it.
    pub fn pool(&self) -> Result<MemPoolId> {
        Ok(self.captured()?.pools[0])
    }

    /// All pools that it keeps, the one that its memory comes from first. Empty if it holds nothing.
    #[must_use]
    pub fn pools(&self) -> Vec<MemPoolId> {
        match &self.stage {
            Stage::New => Vec::new(),
            Stage::Capturing(under_way) => under_way.booking.pools().to_vec(),
            Stage::Captured(captured) => captured.pools.clone(),
        }
    }

    /// During a capture: keeps `pool`, whose memory the capture uses, for as long as the graph holds it. A second time
    /// changes nothing.
    pub fn retain_pool(&mut self, pool: MemPoolId) -> Result<()> {
        self.scope()?.retain_pool(pool)
    }

    /// A block that the graph owns.
    pub fn buffer(&self, key: BufferKey) -> Result<&DeviceBlock> {
        match &self.stage {
            Stage::New => Err(GraphError::NotCaptured.into()),
            Stage::Capturing(under_way) => under_way.buffers.get(key),
            Stage::Captured(captured) => captured.buffers.get(key),
        }
    }

    /// Makes a graph that keeps its template ready to launch, or ready anew. The first replay does it too, if nobody
    /// did.
    pub fn instantiate(&mut self) -> Result<()> {
        let template = self.template()?;
        let driver = self.device.driver();
        let exec = instantiate(driver, template)?;
        let Stage::Captured(captured) = &mut self.stage else { unreachable!("it has a template") };
        if let Some(old) = std::mem::replace(&mut captured.exec, OnceLock::from(exec)).take() {
            self.device.state().graphs.destroy(driver, Doomed::Exec(old));
        }
        Ok(())
    }

    /// The driver's handle of the template, if it is [kept](GraphOptions::keep_graph). It is good until the graph is
    /// reset or dropped.
    pub fn raw(&self) -> Result<RawHandle> {
        Ok(self.device.driver().graph_raw(self.template()?)?)
    }

    /// The name of what is launched, for the driver's contract. It is good until the graph is made ready again, reset
    /// or dropped.
    pub fn exec_id(&self) -> Result<GraphExecId> {
        Ok(*self.captured()?.exec.get().ok_or(GraphError::NotInstantiated)?)
    }

    /// The driver's handle of what is launched. It is good until the graph is made ready again, reset or dropped.
    pub fn raw_exec(&self) -> Result<RawHandle> {
        Ok(self.device.driver().graph_exec_raw(self.exec_id()?)?)
    }

    /// Nodes and edges, if the template is [kept](GraphOptions::keep_graph).
    pub fn topology(&self) -> Result<GraphTopology> {
        Ok(self.device.driver().graph_topology(self.template()?)?)
    }

    /// The graph as text in the DOT language, if the template is [kept](GraphOptions::keep_graph).
    pub fn dot(&self) -> Result<String> {
        Ok(self.device.driver().graph_dot(self.template()?)?)
    }

    /// Writes that text to a file.
    pub fn write_dot(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, text) = (path.as_ref(), self.dot()?);
        let failed =
            |why: std::io::Error| GraphError::WriteDot { path: path.display().to_string(), why: why.to_string() };
        Ok(std::fs::write(path, text).map_err(failed)?)
    }

    /// Gives up everything that the graph holds; it can capture again then. A capture that is under way is ended and
    /// comes to nothing. What the driver cannot destroy is tried again later, and is a warning.
    pub fn reset(&mut self) -> Result<()> {
        if let Some(error) = self.give_up_capture() {
            tracing::warn!(%error, "a capture was given up that had failed");
        }
        let driver = self.device.driver();
        let shelf = &self.device.state().graphs;
        if let Stage::Captured(captured) = std::mem::replace(&mut self.stage, Stage::New) {
            for object in captured.objects() {
                shelf.destroy(driver, object);
            }
            release_pools(&self.allocator, &self.device, &captured.pools);
        }
        shelf.settle(driver, self.device.instance().captures());
        Ok(())
    }

    /// The template, if it is there for others.
    fn template(&self) -> Result<GraphId> {
        let captured = self.captured()?;
        let template = captured.template.filter(|_| self.options.keep_graph);
        Ok(template.ok_or(GraphError::NotKept)?)
    }

    /// Fails unless `stream` is one of the graph's device.
    #[inline]
    pub(super) fn expect_own(&self, stream: &Stream) -> Result<()> {
        self.device.instance().expect_same(stream.instance(), "the stream")?;
        if stream.device_id() == self.device.id() {
            return Ok(());
        }
        let (graph, owner) = (self.device.id(), stream.device_id());
        Err(GraphError::StreamDevice { graph, stream: stream.id(), owner }.into())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::New) {
            Stage::New => {}
            Stage::Capturing(under_way) => under_way.orphan(),
            Stage::Captured(captured) => {
                captured.objects().for_each(|object| self.device.state().graphs.doom(object));
                release_pools(&self.allocator, &self.device, &captured.pools);
            }
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match &self.stage {
            Stage::New => "new".to_owned(),
            Stage::Capturing(under_way) => format!("capturing on {}", under_way.stream),
            Stage::Captured(captured) if captured.is_empty => "captured, empty".to_owned(),
            Stage::Captured(_) => "captured".to_owned(),
        };
        f.debug_struct("Graph").field("device", &self.device).field("stage", &stage).finish_non_exhaustive()
    }
}
