//! Replays, and the streams that they went to.
//!
//! A replay of a graph without generators is one driver call: no lock, no memory, nothing counted. Only the first one
//! on each stream does more, and notes that the memory of the graph is used there.

use std::sync::OnceLock;

use warpool_driver::{GraphExecId, StreamId};

use super::GraphError;
use super::end::instantiate;
use super::graph::{Captured, Graph, Stage};
use crate::{Result, Stream, launch, lock};

impl Graph {
    /// Runs what was captured, in the order of `stream`, which may be any stream of the device, the default one too.
    /// Returns at once.
    ///
    /// Two replays of one graph never overlap, whatever their streams. Generators that were used in the capture give
    /// each replay the numbers that come next. A graph that keeps its template is made ready at its first replay.
    ///
    /// A replay cannot be captured: on a stream of a capture it is [`GraphError::StreamCaptures`], and the capture goes
    /// on.
    #[inline]
    pub fn replay(&self, stream: &Stream) -> Result<()> {
        self.expect_own(stream)?;
        let captured = self.captured()?;
        if !self.device.instance().captures().none() {
            self.expect_no_capture(stream)?;
        }
        let Some(&exec) = captured.exec.get() else { return self.replay_first(captured, stream) };
        if !captured.seen.contains(stream.id()) || !captured.generators.is_empty() {
            return self.replay_with(captured, exec, stream);
        }
        Ok(launch::graph(self.device.driver(), exec, stream.id())?)
    }

    /// Fails where a launch would break a capture. Asked only while captures of ours are under way.
    #[cold]
    fn expect_no_capture(&self, stream: &Stream) -> Result<()> {
        if stream.is_capturing()? {
            return Err(GraphError::StreamCaptures { stream: stream.id() }.into());
        }
        Ok(())
    }

    #[cold]
    fn replay_first(&self, captured: &Captured, stream: &Stream) -> Result<()> {
        let exec = self.exec(captured)?;
        self.replay_with(captured, exec, stream)
    }

    /// What is ready to launch, made if it was not.
    fn exec(&self, captured: &Captured) -> Result<GraphExecId> {
        let _making = lock(&captured.turn);
        if let Some(&exec) = captured.exec.get() {
            return Ok(exec);
        }
        let template = captured.template.ok_or(GraphError::NotInstantiated)?;
        let exec = instantiate(self.device.driver(), template)?;
        Ok(*captured.exec.get_or_init(|| exec))
    }

    fn replay_with(&self, captured: &Captured, exec: GraphExecId, stream: &Stream) -> Result<()> {
        let is_new = !captured.seen.contains(stream.id());
        if is_new {
            // Before the launch: what could not be noted must not be used.
            captured.record_use(&self.allocator, stream)?;
        }
        self.launch(captured, exec, stream)?;
        if is_new {
            captured.seen.insert(stream.id());
        }
        Ok(())
    }

    fn launch(&self, captured: &Captured, exec: GraphExecId, stream: &Stream) -> Result<()> {
        let driver = self.device.driver();
        if captured.generators.is_empty() {
            return Ok(launch::graph(driver, exec, stream.id())?);
        }
        // Held over the calls: the arguments that are set are those of the next launch, which must be ours.
        let _turn = lock(&captured.turn);
        let mut prepared = 0;
        let outcome = captured
            .generators
            .iter()
            .try_for_each(|generator| generator.prepare(driver, exec).inspect(|()| prepared += 1))
            .and_then(|()| Ok(launch::graph(driver, exec, stream.id())?));
        if outcome.is_err() {
            for generator in captured.generators[..prepared].iter().rev() {
                generator.take_back();
            }
        }
        outcome
    }

    pub(super) fn captured(&self) -> Result<&Captured> {
        match &self.stage {
            Stage::Captured(captured) => Ok(captured),
            Stage::Capturing(_) => Err(GraphError::StillCapturing.into()),
            Stage::New => Err(GraphError::NotCaptured.into()),
        }
    }
}

/// The streams that a graph was replayed on: a chain that only grows, so that looking takes no lock. Most graphs see
/// one or two.
#[derive(Default)]
pub(super) struct SeenStreams {
    first: OnceLock<Box<Seen>>,
}

struct Seen {
    stream: StreamId,
    next: OnceLock<Box<Self>>,
}

impl SeenStreams {
    #[inline]
    fn contains(&self, stream: StreamId) -> bool {
        let mut link = &self.first;
        while let Some(seen) = link.get() {
            if seen.stream == stream {
                return true;
            }
            link = &seen.next;
        }
        false
    }

    fn insert(&self, stream: StreamId) {
        let mut link = &self.first;
        // `stream` may get in twice, by two threads at once. That does no harm.
        loop {
            let seen = link.get_or_init(|| Box::new(Seen { stream, next: OnceLock::new() }));
            if seen.stream == stream {
                return;
            }
            link = &seen.next;
        }
    }
}

impl Drop for SeenStreams {
    fn drop(&mut self) {
        // One by one: link inside link, a long chain would not fit on the stack.
        let mut link = self.first.take();
        while let Some(mut seen) = link {
            link = seen.next.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_without_number_are_seen() {
        let seen = SeenStreams::default();
        let streams = 0..20_000;
        // Each behind the last, as `insert` would find its place.
        let mut link = &seen.first;
        for stream in streams.clone().map(StreamId) {
            link = &link.get_or_init(|| Box::new(Seen { stream, next: OnceLock::new() })).next;
        }
        seen.insert(StreamId(streams.end));
        seen.insert(StreamId(7));
        assert!([0, 7, streams.end - 1, streams.end].into_iter().all(|stream| seen.contains(StreamId(stream))));
        assert!(!seen.contains(StreamId(streams.end + 1)));
        // On a thread's small stack.
        std::thread::Builder::new().stack_size(64 << 10).spawn(|| drop(seen)).unwrap().join().unwrap();
    }
}
