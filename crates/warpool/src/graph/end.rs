//! The end of a capture: first on the driver, then everything else even if that failed; the error is returned last.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use warpool_driver::{CaptureMode, ErrorCode, GraphId};

use super::capture::Capture;
use super::captured::{Captured, instantiate};
use super::graph::{Graph, Stage};
use super::open_capture::OpenCapture;
use super::options::CaptureOptions;
use super::retired::{EndOutcome, GraphObject, RetiredGraphs};
use crate::error::GraphError;
use crate::generator::CapturedGenerators;
use crate::{Error, Result, Stream};

impl Graph {
    /// Captures the work that `body` enqueues in `stream`, which is the thread's current stream during the call.
    ///
    /// The capture is over when this returns. After an error (of `body`, or of an invalidated capture) or a panic the
    /// graph is as before, and can capture again. An error of `body` is returned, unless it only reports that the
    /// capture was invalidated and the end of the capture reports the cause.
    pub fn capture<R>(
        &mut self,
        stream: &Stream,
        options: CaptureOptions<'_>,
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
            Ok(Err(error)) => Err(most_specific(error, self.discard_capture())),
            Err(panic) => {
                self.discard_capture();
                resume_unwind(panic)
            }
        }
    }

    /// Ends the capture that [`capture_begin`](Self::capture_begin) began. It must be called for the same stream and,
    /// except in relaxed mode, on the same thread; otherwise it fails and changes nothing.
    ///
    /// If the capture failed on the driver, it is over nevertheless and the graph is as new;
    /// [`GraphError::CaptureFailed`] gives the cause.
    pub fn capture_end(&mut self, stream: &Stream) -> Result<()> {
        self.device.instance().expect_own_process("capture_end")?;
        let Stage::Capturing(open) = &self.stage else {
            return Err(GraphError::NotCapturing.into());
        };
        if open.stream != *stream {
            return Err(GraphError::WrongStream { began: open.stream.id(), ended: stream.id() }.into());
        }
        // The driver would end the capture, and discard it.
        if open.mode != CaptureMode::Relaxed && open.thread != thread::current().id() {
            return Err(GraphError::WrongThread.into());
        }
        self.device.instance().expect_no_typed_call()?;
        let Some((open, template)) = self.end_on_driver()? else { return Err(GraphError::NotCapturing.into()) };
        let driver = self.device.driver();
        let retired = RetiredGraphs::of(&self.device);
        if let Some(error) = open.failed {
            retired.destroy(driver, GraphObject::Template(template));
            return Err(GraphError::BodyFailed { error: Box::new(error) }.into());
        }
        match self.finish(open, template) {
            Ok(captured) => {
                self.stage = Stage::Captured(Box::new(captured));
                Ok(())
            }
            Err(error) => {
                retired.destroy(driver, GraphObject::Template(template));
                Err(error)
            }
        }
    }

    /// Frees everything that the graph holds, so that it can capture again. An active capture is ended and discarded.
    /// Driver objects that cannot be destroyed are logged as warnings and retried later.
    pub fn reset(&mut self) -> Result<()> {
        self.device.instance().expect_own_process("reset")?;
        if self.is_capturing() {
            self.device.instance().expect_no_typed_call()?;
        }
        if let Some(error) = self.discard_capture() {
            tracing::warn!(%error, "a failed capture was discarded");
        }
        let retired = RetiredGraphs::of(&self.device);
        if let Stage::Captured(captured) = std::mem::replace(&mut self.stage, Stage::New) {
            for object in captured.objects() {
                retired.destroy(self.device.driver(), object);
            }
        }
        retired.process_pending(self.device.instance());
        Ok(())
    }

    /// Ends the capture on the driver and removes it from the graph, which is as new afterwards. `None` if there is no
    /// capture.
    fn end_on_driver(&mut self) -> Result<Option<(OpenCapture, GraphId)>> {
        let open = match std::mem::replace(&mut self.stage, Stage::New) {
            Stage::Capturing(open) => open,
            other => {
                self.stage = other;
                return Ok(None);
            }
        };
        let outcome = match RetiredGraphs::of(&self.device).end(&open.stream, Some(open.id)) {
            Ok(outcome) => outcome,
            Err(error) => {
                self.stage = Stage::Capturing(open);
                return Err(error);
            }
        };
        match outcome {
            EndOutcome::Graph(template) => Ok(Some((*open, template))),
            // Dropping `open` undoes its registration.
            EndOutcome::Failed(error) => Err(match open.failed {
                Some(cause) => GraphError::BodyFailed { error: Box::new(cause) },
                None => GraphError::CaptureFailed { error },
            }
            .into()),
            EndOutcome::StillUnderWay(error) => {
                open.abandon();
                Err(GraphError::CaptureFailed { error }.into())
            }
        }
    }

    /// Builds the graph of a capture that has ended.
    fn finish(&self, open: OpenCapture, template: GraphId) -> Result<Captured> {
        let driver = self.device.driver();
        let is_empty = driver.graph_topology(template)?.nodes.is_empty();
        if is_empty {
            tracing::warn!(
                stream = %open.stream,
                "the capture is empty: no work was put into the streams that took part in it"
            );
        }
        let exec = if self.options.keep_graph { None } else { Some(instantiate(driver, template)?) };
        // Nothing below fails.
        let mut slots = open.record.take_slots();
        let generators: CapturedGenerators = slots.take();
        let template = if self.options.keep_graph || !generators.is_empty() {
            Some(template)
        } else {
            RetiredGraphs::of(&self.device).destroy(driver, GraphObject::Template(template));
            None
        };
        let OpenCapture { registration, buffers, .. } = open;
        Ok(Captured::new(template, exec, is_empty, registration.close(), buffers, generators, slots))
    }

    /// Ends a capture whose result is not used, and returns its error, if it failed.
    fn discard_capture(&mut self) -> Option<Error> {
        match self.end_on_driver() {
            Ok(Some((_, template))) => {
                RetiredGraphs::of(&self.device).destroy(self.device.driver(), GraphObject::Template(template));
                None
            }
            Ok(None) => None,
            Err(error) => Some(error),
        }
    }
}

/// The body's error, unless it only reports that the capture was invalidated, and the end reports the cause.
fn most_specific(error: Error, end: Option<Error>) -> Error {
    match (&error, end) {
        (Error::Driver(driver), Some(end)) if driver.code == ErrorCode::StreamCaptureInvalidated => end,
        _ => error,
    }
}
