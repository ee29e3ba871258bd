//! The graph: its stages, and everything that is neither capturing nor replaying.
//!
//! # The memory of a graph that is reset or dropped
//! Replays may be under way when a graph is reset or dropped, on streams that its memory was not allocated for. Neither
//! call waits for them:
//! - The use of its blocks on every stream of a replay was recorded, so the allocator reuses them only after the
//!   replays.
//! - Its own pool serves no requests once its last user is gone. The pool's memory returns to the driver when the
//!   allocator is trimmed or runs out; that waits for the streams of replays.
//! - In a pool with other users, replays must not overlap: graphs that share one are ordered by the program.
//! - Pinned blocks, owned or only used, return to their allocator with the last graph of the pool, and are reused only
//!   after the work of the replay streams.
//! - The executable is destroyed, or, by a destructor, left to be destroyed later; launches under way complete either
//!   way.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use warpool_driver::{GraphExecId, GraphId, GraphTopology, RawHandle};

use super::captured::{Captured, instantiate};
use super::keys::{BufferKey, HostKey};
use super::open_capture::OpenCapture;
use super::options::GraphOptions;
use super::retired::{GraphObject, RetiredGraphs};
use crate::error::GraphError;
use crate::memory::{DeviceAllocator, DeviceBlock, HostBlock, MemPool, SharedAllocator};
use crate::{Device, Result, Stream};

/// Captured work that can be replayed any number of times.
///
/// It owns the resources of the work: handles of the pools that its memory came from, blocks that were moved into it or
/// shared with it (including pinned ones), workspaces and generators' slots. In safe Rust none of them can be freed
/// before the graph. See the [module](super) for an example.
///
/// A block that a graph keeps cannot be used by others:
/// ```compile_fail,E0382
/// # use warpool::{Stream, graph::{CaptureOptions, Graph}, memory::DeviceBlock};
/// # fn lost(graph: &mut Graph, stream: &Stream, block: DeviceBlock) -> warpool::Result<()> {
/// graph.capture(stream, CaptureOptions::default(), |capture| capture.keep(block))?;
/// drop(block);
/// # Ok(())
/// # }
/// ```
/// A reference to a buffer cannot outlive its graph:
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
/// A pool is given by a handle, which keeps it, and not by a number, which another allocator may use too:
/// ```compile_fail,E0308
/// # use warpool::{graph::CaptureOptions, memory::MemPoolId};
/// let options = CaptureOptions::default().with_pool(MemPoolId { graph: 1, user: 0 });
/// ```
/// A capture cannot be given a handle that is gone:
/// ```compile_fail,E0505
/// # use warpool::{Stream, graph::{CaptureOptions, Graph}, memory::MemPool};
/// # fn gone(graph: &mut Graph, stream: &Stream, pool: MemPool) -> warpool::Result<()> {
/// let options = CaptureOptions::default().with_pool(&pool);
/// drop(pool);
/// graph.capture_begin(stream, options)
/// # }
/// ```
/// Nor can a raw call be given the handle of a graph's pool, to release it:
/// ```compile_fail,E0308
/// # use warpool::{graph::Graph, memory::pools::PrivatePools};
/// # fn released(graph: &Graph, pools: &dyn PrivatePools) -> warpool::Result<()> {
/// pools.release_pool(graph.device().id(), graph.pool()?)
/// # }
/// ```
/// Inside its own capture the graph can be neither replayed nor reset:
/// ```compile_fail,E0502
/// # use warpool::{Stream, graph::{CaptureOptions, Graph}};
/// # fn replayed(graph: &mut Graph, stream: &Stream) -> warpool::Result<()> {
/// graph.capture(stream, CaptureOptions::default(), |_| graph.replay(stream))
/// # }
/// ```
/// ```compile_fail,E0501
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

/// The stages of a graph.
pub(super) enum Stage {
    /// It holds nothing.
    New,
    Capturing(Box<OpenCapture>),
    Captured(Box<Captured>),
}

impl Graph {
    /// An empty graph, for streams of `device` and with memory from `allocator`, which must support private pools.
    /// Makes no driver call.
    pub fn new(allocator: &impl SharedAllocator, device: &Device, options: GraphOptions) -> Result<Self> {
        let allocator = allocator.to_dyn();
        allocator.instance().expect_same(device.instance(), "the device")?;
        allocator.pools()?;
        Ok(Self { allocator, device: device.clone(), options, stage: Stage::New })
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its options.
    #[must_use]
    pub fn options(&self) -> GraphOptions {
        self.options
    }

    /// Whether a capture of it is active.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        matches!(self.stage, Stage::Capturing(_))
    }

    /// Whether a capture of it has succeeded: it can be replayed.
    #[must_use]
    pub fn is_captured(&self) -> bool {
        matches!(self.stage, Stage::Captured(_))
    }

    /// Whether the capture contains no work. The usual cause is work that was enqueued in another stream or device.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.captured()?.is_empty)
    }

    /// The pool that its memory comes from, for [sharing](super::CaptureOptions::pool) it. A clone of the handle keeps
    /// the pool alive even after the graph is gone.
    pub fn pool(&self) -> Result<&MemPool> {
        Ok(&self.captured()?.pools[0])
    }

    /// All pools that it retains, starting with the one that its memory comes from. Empty if it holds nothing.
    #[must_use]
    pub fn pools(&self) -> &[MemPool] {
        match &self.stage {
            Stage::New => &[],
            Stage::Capturing(open) => open.registration.pools(),
            Stage::Captured(captured) => &captured.pools,
        }
    }

    /// A block that the graph owns.
    pub fn buffer(&self, key: BufferKey) -> Result<&DeviceBlock> {
        match &self.stage {
            Stage::New => Err(GraphError::NotCaptured.into()),
            Stage::Capturing(open) => open.buffers.get(key),
            Stage::Captured(captured) => captured.buffers.get(key),
        }
    }

    /// Pinned host memory that the graph owns, to be read and written between replays.
    ///
    /// The reference cannot outlive the graph:
    /// ```compile_fail,E0505
    /// # use warpool::graph::{Graph, HostKey};
    /// # fn outlives(graph: Graph, key: HostKey) -> warpool::Result<()> {
    /// let pinned = graph.host_buffer(key)?;
    /// drop(graph);
    /// pinned.write(0, &[1, 2, 3])
    /// # }
    /// ```
    /// Nor can it be held over a reset, after which others may use the memory:
    /// ```compile_fail,E0502
    /// # use warpool::graph::{Graph, HostKey};
    /// # fn held(graph: &mut Graph, key: HostKey) -> warpool::Result<()> {
    /// let pinned = graph.host_buffer(key)?;
    /// graph.reset()?;
    /// pinned.write(0, &[1, 2, 3])
    /// # }
    /// ```
    pub fn host_buffer(&self, key: HostKey) -> Result<&HostBlock> {
        match &self.stage {
            Stage::New => Err(GraphError::NotCaptured.into()),
            Stage::Capturing(open) => open.buffers.get_host(key),
            Stage::Captured(captured) => captured.buffers.get_host(key),
        }
    }

    /// Instantiates a graph that keeps its template, or instantiates it again. Without this call the first replay does
    /// it.
    pub fn instantiate(&mut self) -> Result<()> {
        let template = self.template()?;
        let driver = self.device.driver();
        let exec = instantiate(driver, template)?;
        let Stage::Captured(captured) = &mut self.stage else { unreachable!("it has a template") };
        if let Some(old) = std::mem::replace(&mut captured.exec, OnceLock::from(exec)).take() {
            RetiredGraphs::of(&self.device).destroy(driver, GraphObject::Exec(old));
        }
        Ok(())
    }

    /// The driver's handle of the template, if it is [kept](GraphOptions::keep_graph). Valid until the graph is reset
    /// or dropped.
    pub fn raw(&self) -> Result<RawHandle> {
        Ok(self.device.driver().graph_raw(self.template()?)?)
    }

    /// The driver's id of the executable. Valid until the graph is instantiated again, reset or dropped.
    pub fn exec_id(&self) -> Result<GraphExecId> {
        Ok(*self.captured()?.exec.get().ok_or(GraphError::NotInstantiated)?)
    }

    /// The driver's handle of the executable. Valid until the graph is instantiated again, reset or dropped.
    pub fn raw_exec(&self) -> Result<RawHandle> {
        Ok(self.device.driver().graph_exec_raw(self.exec_id()?)?)
    }

    /// Nodes and edges, if the template is [kept](GraphOptions::keep_graph).
    pub fn topology(&self) -> Result<GraphTopology> {
        Ok(self.device.driver().graph_topology(self.template()?)?)
    }

    /// The graph in the DOT language, if the template is [kept](GraphOptions::keep_graph).
    pub fn dot(&self) -> Result<String> {
        Ok(self.device.driver().graph_dot(self.template()?)?)
    }

    /// Writes the graph to a file, in the DOT language.
    pub fn write_dot(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, text) = (path.as_ref(), self.dot()?);
        let failed =
            |why: std::io::Error| GraphError::WriteDot { path: path.display().to_string(), why: why.to_string() };
        Ok(std::fs::write(path, text).map_err(failed)?)
    }

    pub(super) fn captured(&self) -> Result<&Captured> {
        match &self.stage {
            Stage::Captured(captured) => Ok(captured),
            Stage::Capturing(_) => Err(GraphError::StillCapturing.into()),
            Stage::New => Err(GraphError::NotCaptured.into()),
        }
    }

    /// The template, if it is kept.
    fn template(&self) -> Result<GraphId> {
        let captured = self.captured()?;
        let template = captured.template.filter(|_| self.options.keep_graph);
        Ok(template.ok_or(GraphError::NotKept)?)
    }

    /// Fails unless `stream` belongs to the graph's device.
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
        let stage = std::mem::replace(&mut self.stage, Stage::New);
        if self.device.instance().is_inherited() {
            std::mem::forget(stage);
            return;
        }
        match stage {
            Stage::New => {}
            Stage::Capturing(open) => open.abandon(),
            Stage::Captured(captured) => {
                let retired = RetiredGraphs::of(&self.device);
                captured.objects().for_each(|object| retired.destroy_later(object));
            }
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match &self.stage {
            Stage::New => "new".to_owned(),
            Stage::Capturing(open) => format!("capturing on {}", open.stream),
            Stage::Captured(captured) if captured.is_empty => "captured, empty".to_owned(),
            Stage::Captured(_) => "captured".to_owned(),
        };
        f.debug_struct("Graph").field("device", &self.device).field("stage", &stage).finish_non_exhaustive()
    }
}
