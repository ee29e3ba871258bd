//! Replays.
//!
//! A replay of a graph without generators and typed work is one driver call: no lock, no allocation, no counter. Typed
//! work takes one lock if a single stream uses all its memory, else one per buffer. Only the first replay on each
//! stream does more: it adds the stream to those that the graph's memory waits for when the graph is dropped.

use std::panic::Location;

use warpool_driver::GraphExecId;

use super::captured::{Captured, instantiate};
use super::graph::Graph;
use crate::error::GraphError;
use crate::{Result, Stream, launch, lock};

impl Graph {
    /// Launches the captured work in `stream`, which may be any stream of the device, including the default stream.
    /// Returns at once.
    ///
    /// Two replays of one graph never overlap, even on different streams. Generators that were used in the capture give
    /// each replay the next numbers. A graph that keeps its template is instantiated at its first replay.
    ///
    /// [`Error::MemoryAsleep`](crate::Error::MemoryAsleep) if memory that the graph owns, or that typed work in it
    /// uses, is [asleep](crate::memory::Tags). The program itself has to take care of memory that it passed only by
    /// address, and of tags that another thread is putting to sleep at the same time.
    ///
    /// A replay cannot be captured: on a capturing stream it fails with [`GraphError::StreamCaptures`], and the capture
    /// stays valid.
    #[inline]
    #[track_caller]
    pub fn replay(&self, stream: &Stream) -> Result<()> {
        self.device.instance().at_line(Location::caller(), || self.replay_in(stream))
    }

    #[inline]
    fn replay_in(&self, stream: &Stream) -> Result<()> {
        self.expect_own(stream)?;
        let captured = self.captured()?;
        if self.device.instance().has_asleep() {
            captured.expect_awake(self.device.instance())?;
        }
        if self.device.instance().has_captures() {
            self.expect_no_capture(stream)?;
        }
        let exec = match captured.exec.get() {
            Some(&exec) => exec,
            None => self.exec(captured)?,
        };
        let ticket = captured.replay_streams.ticket(stream.id());
        if captured.typed.is_empty() {
            self.launch(captured, exec, stream)?;
        } else {
            captured.typed.replay(stream, || self.launch(captured, exec, stream))?;
        }
        captured.replay_streams.launched(stream.id(), ticket, self.device.instance());
        Ok(())
    }

    #[inline]
    fn launch(&self, captured: &Captured, exec: GraphExecId, stream: &Stream) -> Result<()> {
        if captured.generators.is_empty() {
            return Ok(launch::graph(self.device.driver(), exec, stream.id())?);
        }
        self.launch_with_generators(captured, exec, stream)
    }

    /// Fails if a launch would invalidate a capture. Called only while captures of graphs are active.
    #[cold]
    fn expect_no_capture(&self, stream: &Stream) -> Result<()> {
        if stream.is_capturing()? {
            return Err(GraphError::StreamCaptures { stream: stream.id() }.into());
        }
        Ok(())
    }

    /// The executable; instantiates the graph if necessary.
    #[cold]
    fn exec(&self, captured: &Captured) -> Result<GraphExecId> {
        self.device.instance().expect_own_process("replay")?;
        let _locked = lock(&captured.launch_lock);
        if let Some(&exec) = captured.exec.get() {
            return Ok(exec);
        }
        let template = captured.template.ok_or(GraphError::NotInstantiated)?;
        let exec = instantiate(self.device.driver(), template)?;
        Ok(*captured.exec.get_or_init(|| exec))
    }

    fn launch_with_generators(&self, captured: &Captured, exec: GraphExecId, stream: &Stream) -> Result<()> {
        self.device.instance().expect_own_process("replay")?;
        let driver = self.device.driver();
        // Held over the calls: the arguments that are set apply to the next launch, which must be this one.
        let _locked = lock(&captured.launch_lock);
        captured.generators.prepare(driver, exec)?;
        let launched = launch::graph(driver, exec, stream.id());
        if launched.is_err() {
            captured.generators.undo();
        }
        Ok(launched?)
    }
}
