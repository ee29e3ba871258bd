//! Pinned host memory in a capture: memory that the graph owns, for copies between host and device, and for kernels
//! that access it in place.
//!
//! The host may write it between two replays, and the next replay reads the new contents. Writing while a replay runs
//! is a race. A block's use by the graph is recorded before anything in the capture accesses it.

use std::sync::Arc;

use super::buffers::Owned;
use super::capture::Capture;
use super::keys::HostKey;
use crate::Result;
use crate::memory::{HostAllocator, HostBlock};

impl Capture<'_> {
    /// Allocates pinned host memory that the graph owns, from the graph's pool in `host`. Replays read what the host
    /// has written there, during the capture or later between replays.
    pub fn allocate_host(&mut self, host: &HostAllocator, bytes: u64) -> Result<HostKey> {
        self.expect_in_capture(&self.stream)?;
        let block = host.allocate_on(bytes, &self.stream)?;
        Ok(self.open.buffers.add_host(Owned::Moved(block)))
    }

    /// Moves pinned host memory into the graph. It cannot be used by others then:
    /// ```compile_fail,E0382
    /// # use warpool::{Stream, graph::{CaptureOptions, Graph}, memory::HostBlock};
    /// # fn lost(graph: &mut Graph, stream: &Stream, block: HostBlock) -> warpool::Result<()> {
    /// graph.capture(stream, CaptureOptions::default(), |capture| capture.keep_host(block))?;
    /// block.write(0, &[1, 2, 3])
    /// # }
    /// ```
    pub fn keep_host(&mut self, block: HostBlock) -> Result<HostKey> {
        block.expect_of(self.device().instance())?;
        Ok(self.open.buffers.add_host(Owned::Moved(block)))
    }

    /// Shares pinned host memory with the graph, which keeps it alive.
    pub fn share_host(&mut self, block: Arc<HostBlock>) -> Result<HostKey> {
        block.expect_of(self.device().instance())?;
        Ok(self.open.buffers.add_host(Owned::Shared(block)))
    }

    /// Pinned host memory that the graph owns.
    pub fn host_buffer(&self, key: HostKey) -> Result<&HostBlock> {
        self.open.buffers.get_host(key)
    }
}
