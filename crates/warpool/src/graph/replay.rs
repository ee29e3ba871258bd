//! Replays.
//!
//! A replay of a graph without generators is one driver call: no lock, no allocation, no counter. Only the first replay
//! on each stream does more: it records the use of the graph's memory there.

use warpool_driver::GraphExecId;

use super::captured::{Captured, instantiate};
use super::graph::Graph;
use crate::error::GraphError;
use crate::{Result, Stream, launch, lock};

impl Graph {
    /// Launches the captured work, in the order of `stream`, which may be any stream of the device, also the default
    /// one. Returns at once.
    ///
    /// Two replays of one graph never overlap, whatever their streams. Generators that were used in the capture give
    /// each replay the next numbers. A graph that keeps its template is instantiated at its first replay.
    ///
    /// A replay cannot be captured: on a stream that captures it is [`GraphError::StreamCaptures`], and the capture
    /// stays valid.
    #[inline]
    pub fn replay(&self, stream: &Stream) -> Result<()> {
        self.expect_own(stream)?;
        let captured = self.captured()?;
        if self.device.instance().has_captures() {
            self.expect_no_capture(stream)?;
        }
        let Some(&exec) = captured.exec.get() else { return self.first_replay(captured, stream) };
        if !captured.replay_streams.contains(stream.id()) || !captured.generators.is_empty() {
            return self.replay_with(captured, exec, stream);
        }
        Ok(launch::graph(self.device.driver(), exec, stream.id())?)
    }

    /// Fails where a launch would invalidate a capture. Called only while captures of graphs are under way.
    #[cold]
    fn expect_no_capture(&self, stream: &Stream) -> Result<()> {
        if stream.is_capturing()? {
            return Err(GraphError::StreamCaptures { stream: stream.id() }.into());
        }
        Ok(())
    }

    #[cold]
    fn first_replay(&self, captured: &Captured, stream: &Stream) -> Result<()> {
        let exec = self.exec(captured)?;
        self.replay_with(captured, exec, stream)
    }

    /// The executable, instantiated if it was not.
    fn exec(&self, captured: &Captured) -> Result<GraphExecId> {
        let _locked = lock(&captured.launch_lock);
        if let Some(&exec) = captured.exec.get() {
            return Ok(exec);
        }
        let template = captured.template.ok_or(GraphError::NotInstantiated)?;
        let exec = instantiate(self.device.driver(), template)?;
        Ok(*captured.exec.get_or_init(|| exec))
    }

    fn replay_with(&self, captured: &Captured, exec: GraphExecId, stream: &Stream) -> Result<()> {
        let is_new = !captured.replay_streams.contains(stream.id());
        if is_new {
            // Before the launch: memory whose use could not be recorded must not be used.
            captured.record_use(&self.allocator, stream)?;
        }
        self.launch(captured, exec, stream)?;
        if is_new {
            captured.replay_streams.insert(stream.id());
        }
        Ok(())
    }

    fn launch(&self, captured: &Captured, exec: GraphExecId, stream: &Stream) -> Result<()> {
        let driver = self.device.driver();
        if captured.generators.is_empty() {
            return Ok(launch::graph(driver, exec, stream.id())?);
        }
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
