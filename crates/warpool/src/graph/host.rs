//! Pinned host memory in a capture: memory that the graph owns, for copies between host and device, and for kernels
//! that read and write it where it is.
//!
//! Its contents are the host's as well: what is written there between two replays, the next replay sees. To do so while
//! a replay runs is a race. The rule: before anything in the capture touches a block, the block knows that the graph
//! uses it.

use std::sync::Arc;

use warpool_driver::Address;

use super::GraphError;
use super::buffers::{BufferAt, BufferKey, GraphArg, Owned};
use super::capture::Capture;
use super::graph::{Graph, Stage};
use crate::memory::{HostAllocator, HostBlock};
use crate::{Result, Stream};

/// The name of pinned host memory in one capture, and in the graph that comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostKey {
    pub(super) capture: u64,
    pub(super) index: u32,
}

impl HostKey {
    /// A place in it, `offset` bytes from its start.
    #[must_use]
    pub const fn at(self, offset: u64) -> HostAt {
        HostAt { key: self, offset }
    }
}

/// A place in pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostAt {
    /// The memory.
    pub key: HostKey,
    /// How many bytes from its start.
    pub offset: u64,
}

impl From<HostKey> for HostAt {
    fn from(key: HostKey) -> Self {
        key.at(0)
    }
}

/// Either side of a captured copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a buffer on the device.
    Device(BufferAt),
    /// In pinned host memory.
    Host(HostAt),
}

impl From<BufferKey> for Place {
    fn from(key: BufferKey) -> Self {
        Self::Device(key.into())
    }
}

impl From<BufferAt> for Place {
    fn from(at: BufferAt) -> Self {
        Self::Device(at)
    }
}

impl From<HostKey> for Place {
    fn from(key: HostKey) -> Self {
        Self::Host(key.into())
    }
}

impl From<HostAt> for Place {
    fn from(at: HostAt) -> Self {
        Self::Host(at)
    }
}

impl Graph {
    /// Pinned host memory that the graph owns, to be read and written between replays.
    ///
    /// It is only lent, and cannot outlive the graph:
    /// ```compile_fail,E0505
    /// # use warpool::graph::{Graph, HostKey};
    /// # fn outlives(graph: Graph, key: HostKey) -> warpool::Result<()> {
    /// let pinned = graph.host_buffer(key)?;
    /// drop(graph);
    /// pinned.write(0, &[1, 2, 3])
    /// # }
    /// ```
    /// Nor can it be held over a reset, which may give it to others:
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
            Stage::Capturing(under_way) => under_way.buffers.get_host(key),
            Stage::Captured(captured) => captured.buffers.get_host(key),
        }
    }
}

impl Capture<'_> {
    /// Pinned host memory that the graph owns, from its own pool in `host`. What is written there in the capture, or
    /// later between replays, replays read.
    pub fn allocate_host(&mut self, host: &HostAllocator, bytes: u64) -> Result<HostKey> {
        self.expect_in_capture(&self.stream)?;
        let block = host.allocate_on(bytes, &self.stream)?;
        Ok(self.under_way.buffers.add_host(Owned::Moved(block)))
    }

    /// Moves pinned host memory into the graph. It is gone for everybody else:
    /// ```compile_fail,E0382
    /// # use warpool::{Stream, graph::{CaptureOptions, Graph}, memory::HostBlock};
    /// # fn lost(graph: &mut Graph, stream: &Stream, block: HostBlock) -> warpool::Result<()> {
    /// graph.capture(stream, CaptureOptions::default(), |capture| capture.keep_host(block))?;
    /// block.write(0, &[1, 2, 3])
    /// # }
    /// ```
    pub fn keep_host(&mut self, block: HostBlock) -> Result<HostKey> {
        block.expect_of(self.device().instance())?;
        Ok(self.under_way.buffers.add_host(Owned::Moved(block)))
    }

    /// Shares pinned host memory with the graph: it is there at least as long as the graph is.
    pub fn share_host(&mut self, block: Arc<HostBlock>) -> Result<HostKey> {
        block.expect_of(self.device().instance())?;
        Ok(self.under_way.buffers.add_host(Owned::Shared(block)))
    }

    /// Pinned host memory that the graph owns.
    pub fn host_buffer(&self, key: HostKey) -> Result<&HostBlock> {
        self.under_way.buffers.get_host(key)
    }

    /// The address of a place that work on `stream` is about to use, with `bytes` behind it.
    pub(super) fn place(&self, place: Place, bytes: u64, stream: &Stream) -> Result<Address> {
        let buffers = &self.under_way.buffers;
        match place {
            Place::Device(at) => Ok(Address::Device(buffers.address(at, bytes)?)),
            Place::Host(at) => {
                let ptr = buffers.host_address(at, bytes)?;
                buffers.get_host(at.key)?.record_use(stream)?;
                Ok(Address::Host(ptr))
            }
        }
    }

    /// Notes that a kernel on `stream` is about to use the pinned memory among its arguments.
    pub(super) fn note_host_uses(&self, args: &[GraphArg], stream: &Stream) -> Result<()> {
        let keys = args.iter().filter_map(|arg| if let GraphArg::Host(at) = arg { Some(at.key) } else { None });
        keys.into_iter().try_for_each(|key| self.under_way.buffers.get_host(key)?.record_use(stream))
    }
}
