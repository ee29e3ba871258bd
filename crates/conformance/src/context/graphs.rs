//! Captures, graphs and library handles for checks.

use warpool_driver::{
    CaptureMode, CaptureState, DeviceId, DriverError, ErrorCode, GraphExecId, GraphId, HandleId, InstantiateOptions,
    Library, StreamId,
};

use super::TestContext;
use super::cleanup::Resource;
use crate::expect::{CheckError, CheckResult, expect_eq, skip};

/// The state of a stream's capture, without its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capture {
    None,
    Active,
    Invalidated,
}

impl TestContext {
    /// Begins a relaxed capture, which forbids no calls.
    pub(crate) fn begin_capture(&self, stream: StreamId) -> CheckResult {
        Ok(self.driver.capture_begin(stream, CaptureMode::Relaxed)?)
    }

    pub(crate) fn end_capture(&self, stream: StreamId) -> CheckResult<GraphId> {
        let graph = self.driver.capture_end(stream)?;
        self.track(Resource::Graph(graph));
        Ok(graph)
    }

    /// The graph of the work that `body` submits to `stream`.
    pub(crate) fn capture(&self, stream: StreamId, body: impl FnOnce() -> CheckResult) -> CheckResult<GraphId> {
        self.begin_capture(stream)?;
        body()?;
        self.end_capture(stream)
    }

    pub(crate) fn instantiate(&self, graph: GraphId) -> CheckResult<GraphExecId> {
        self.instantiate_with(graph, InstantiateOptions::default())
    }

    pub(crate) fn instantiate_with(&self, graph: GraphId, options: InstantiateOptions) -> CheckResult<GraphExecId> {
        let exec = self.driver.graph_instantiate(graph, options)?;
        self.track(Resource::GraphExec(exec));
        Ok(exec)
    }

    /// Captures `body` and instantiates the graph.
    pub(crate) fn capture_exec(
        &self,
        stream: StreamId,
        body: impl FnOnce() -> CheckResult,
    ) -> CheckResult<GraphExecId> {
        self.instantiate(self.capture(stream, body)?)
    }

    /// Launches a graph and waits for it.
    pub(crate) fn replay(&self, exec: GraphExecId, stream: StreamId) -> CheckResult {
        self.launch_graph(exec, stream)?;
        self.synchronize(stream)
    }

    #[track_caller]
    pub(crate) fn expect_capture(&self, stream: StreamId, want: Capture) -> CheckResult {
        let got = match self.driver.capture_state(stream)? {
            CaptureState::None => Capture::None,
            CaptureState::Active(_) => Capture::Active,
            CaptureState::Invalidated => Capture::Invalidated,
        };
        expect_eq("the state of the stream's capture", got, want)
    }

    /// A library handle. Skips the check if the library is not installed.
    pub(crate) fn library_handle(&self, library: Library) -> CheckResult<HandleId> {
        self.library_handle_on(library, self.device_id)
    }

    pub(crate) fn library_handle_on(&self, library: Library, device: DeviceId) -> CheckResult<HandleId> {
        match self.driver.library_create(library, device) {
            Ok(handle) => {
                self.track(Resource::Handle(handle));
                Ok(handle)
            }
            Err(error) if is_not_installed(&error) => skip(format!("{library} is not installed: {error}")),
            Err(error) => Err(error.into()),
        }
    }

    /// A library handle, or `None` if the library is not installed.
    pub(crate) fn library_handle_if_installed(&self, library: Library) -> CheckResult<Option<HandleId>> {
        match self.library_handle(library) {
            Err(CheckError::Skipped(_)) => Ok(None),
            other => other.map(Some),
        }
    }

    pub(crate) fn destroy_handle(&self, handle: HandleId) -> CheckResult {
        self.untrack(Resource::Handle(handle));
        Ok(self.driver.library_destroy(handle)?)
    }
}

/// Whether a call failed because a library or one of its symbols is missing.
fn is_not_installed(error: &DriverError) -> bool {
    matches!(error.code, ErrorCode::SharedObjectInitFailed | ErrorCode::SharedObjectSymbolNotFound)
}
