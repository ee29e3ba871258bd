//! The end of a capture: the driver's first, then everything else whether that went well or not, and only then the
//! report.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use warpool_driver::{CaptureMode, Driver, ErrorCode, GraphId, InstantiateOptions};

use super::begin::UnderWay;
use super::capture::Capture;
use super::graph::{Captured, Graph, Stage};
use super::shelf::{Doomed, Ended};
use super::{CaptureOptions, GraphError};
use crate::capture::RelaxedMode;
use crate::{Error, Result, Stream};

/// How graphs are made ready.
pub(super) const READY: InstantiateOptions = InstantiateOptions { auto_free_on_launch: true, use_node_priority: true };

impl Graph {
    /// Captures what `body` puts into `stream`, which is the current stream of the thread meanwhile.
    ///
    /// However `body` is left, the capture is over afterwards. After an error (its own, or of a capture that was
    /// broken) or a panic the graph is as it was before, and can capture again. An error of `body` is passed on, unless
    /// it only says that the capture was broken and more is known about why.
    pub fn capture<R>(
        &mut self,
        stream: &Stream,
        options: CaptureOptions,
        body: impl FnOnce(&mut Capture<'_>) -> Result<R>,
    ) -> Result<R> {
        self.capture_begin(stream, options)?;
        let outcome = {
            let _current = stream.enter();
            let mut scope = self.scope().expect("it has just begun");
            catch_unwind(AssertUnwindSafe(|| body(&mut scope)))
        };
        match outcome {
            Ok(Ok(value)) => self.capture_end(stream).map(|()| value),
            Ok(Err(error)) => Err(more_telling(error, self.give_up_capture())),
            Err(panic) => {
                self.give_up_capture();
                resume_unwind(panic)
            }
        }
    }

    /// Ends the capture that [`capture_begin`](Self::capture_begin) began, on the same stream, and, unless the mode is
    /// relaxed, on the same thread; on another it is an error and changes nothing.
    ///
    /// If the driver says that the capture failed, it is over all the same and the graph is as new;
    /// [`GraphError::CaptureFailed`] says why.
    pub fn capture_end(&mut self, stream: &Stream) -> Result<()> {
        let Stage::Capturing(under_way) = &self.stage else {
            return Err(GraphError::NotCapturing.into());
        };
        if under_way.stream != *stream {
            return Err(GraphError::WrongStream { began: under_way.stream.id(), ended: stream.id() }.into());
        }
        // The driver would end it, and keep nothing of it.
        if under_way.mode != CaptureMode::Relaxed && under_way.thread != thread::current().id() {
            return Err(GraphError::WrongThread.into());
        }
        let Some((under_way, template)) = self.end_on_driver()? else { return Err(GraphError::NotCapturing.into()) };
        let driver = self.device.driver();
        let shelf = &self.device.state().graphs;
        if let Some(error) = under_way.broken {
            shelf.destroy(driver, Doomed::Template(template));
            return Err(GraphError::BodyFailed { error: Box::new(error) }.into());
        }
        match self.finish(under_way, template) {
            Ok(captured) => {
                self.stage = Stage::Captured(Box::new(captured));
                Ok(())
            }
            Err(error) => {
                shelf.destroy(driver, Doomed::Template(template));
                Err(error)
            }
        }
    }

    /// Ends the capture on the driver and takes it out of the graph, which is as new afterwards. `None` if there is
    /// none.
    fn end_on_driver(&mut self) -> Result<Option<(UnderWay, GraphId)>> {
        let under_way = match std::mem::replace(&mut self.stage, Stage::New) {
            Stage::Capturing(under_way) => under_way,
            other => {
                self.stage = other;
                return Ok(None);
            }
        };
        let stream = &under_way.stream;
        match self.device.state().graphs.end(stream.driver(), stream.id(), Some(under_way.id)) {
            Ended::Graph(template) => Ok(Some((*under_way, template))),
            // With `under_way` goes everything that was noted elsewhere.
            Ended::Failed(error) => Err(match under_way.broken {
                Some(cause) => GraphError::BodyFailed { error: Box::new(cause) },
                None => GraphError::CaptureFailed { error },
            }
            .into()),
            Ended::StillUnderWay(error) => {
                under_way.orphan();
                Err(GraphError::CaptureFailed { error }.into())
            }
        }
    }

    /// Makes a graph of a capture that ended well.
    fn finish(&self, under_way: UnderWay, template: GraphId) -> Result<Captured> {
        let driver = self.device.driver();
        let is_empty = driver.graph_topology(template)?.nodes.is_empty();
        if is_empty {
            tracing::warn!(
                stream = %under_way.stream,
                "the capture holds no work: nothing was put into the streams that took part in it"
            );
        }
        let exec = if self.options.keep_graph { None } else { Some(instantiate(driver, template)?) };
        // Nothing below fails.
        let used = under_way.take_used();
        let keeps_template = self.options.keep_graph || !used.generators.is_empty();
        let template = if keeps_template {
            Some(template)
        } else {
            self.device.state().graphs.destroy(driver, Doomed::Template(template));
            None
        };
        let UnderWay { booking, buffers, .. } = under_way;
        Ok(Captured::new(template, exec, is_empty, booking.close(), buffers, used))
    }

    /// Ends a capture that is to come to nothing, and says what the driver thought of it.
    pub(super) fn give_up_capture(&mut self) -> Option<Error> {
        match self.end_on_driver() {
            Ok(Some((_, template))) => {
                self.device.state().graphs.destroy(self.device.driver(), Doomed::Template(template));
                None
            }
            Ok(None) => None,
            Err(error) => Some(error),
        }
    }
}

/// Makes a template ready to launch.
pub(super) fn instantiate(driver: &dyn Driver, template: GraphId) -> Result<warpool_driver::GraphExecId> {
    // Relaxed: another thread's capture would forbid it, and break.
    RelaxedMode::run(driver, || Ok(driver.graph_instantiate(template, READY)?))
}

/// The body's error, unless it only says that the capture was broken, and the end said why.
fn more_telling(error: Error, end: Option<Error>) -> Error {
    match (&error, end) {
        (Error::Driver(driver), Some(end)) if driver.code == ErrorCode::StreamCaptureInvalidated => end,
        _ => error,
    }
}
