//! Stream capture.

use crate::sim::driver::SimDriver;
use crate::sim::order::HazardKind;
use crate::sim::refuse::refuse;
use crate::sim::work::StreamKind;
use crate::{Call, CaptureMode, CaptureState, Captures, ErrorCode, GraphId, GraphTopology, NodeId, Result, StreamId};

impl Captures for SimDriver {
    fn capture_begin(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        self.call(Call::CaptureBegin, |state| {
            let stream = state.live_stream(stream)?;
            let queue = state.scheduler.streams.get(stream);
            if queue.kind == StreamKind::Legacy {
                return refuse(ErrorCode::StreamCaptureUnsupported, "the legacy default stream cannot capture");
            }
            if state.captures.is_capturing(stream) {
                return refuse(ErrorCode::IllegalState, format!("{stream} is capturing already"));
            }
            state.captures.begin(stream, queue.device, mode, None);
            Ok(())
        })
    }

    fn capture_end(&self, stream: StreamId) -> Result<GraphId> {
        self.call(Call::CaptureEnd, |state| {
            let stream = state.live_stream(stream)?;
            let Some(member) = state.captures.membership(stream).cloned() else {
                return refuse(ErrorCode::IllegalState, format!("{stream} is not capturing"));
            };
            let origin = state.captures.get(member.capture).origin;
            if origin != stream {
                let why = format!("the capture began on {origin} and was ended on {stream}");
                return state.invalidate(&[member.capture], ErrorCode::StreamCaptureUnmatched, &why);
            }
            let unjoined = state.captures.unjoined(member.capture, &member.dependencies);
            let (capture, bodies) = state.captures.end(member.capture);
            state.release_graph_addresses(&bodies);
            let failure = if capture.thread != std::thread::current().id() && capture.mode != CaptureMode::Relaxed {
                refuse(ErrorCode::StreamCaptureWrongThread, "the capture began on another thread")
            } else if let Some(why) = capture.invalidated.clone() {
                refuse(ErrorCode::StreamCaptureInvalidated, why)
            } else if let Some(other) = unjoined {
                let why = format!("{stream} did not wait for the captured work of {other}");
                let operation = format!("capture_end #{} on {stream}", state.call_number());
                state.hazards.add(HazardKind::CaptureUnjoined, operation, why.clone(), state.scheduler.now());
                refuse(ErrorCode::StreamCaptureUnjoined, why)
            } else {
                Ok(())
            };
            if let Err(error) = failure {
                state.release_graph_addresses(capture.memory());
                return Err(error);
            }
            Ok(state.graphs.add_template(capture.into_template()))
        })
    }

    fn capture_state(&self, stream: StreamId) -> Result<CaptureState> {
        self.call(Call::CaptureState, |state| {
            let stream = state.live_stream(stream)?;
            if !state.implicit_captures(stream).is_empty() {
                return refuse(ErrorCode::StreamCaptureImplicit, "a blocking stream of the device captures");
            }
            Ok(state.captures.state(stream))
        })
    }

    fn capture_dependencies(&self, stream: StreamId) -> Result<Vec<NodeId>> {
        self.call(Call::CaptureDependencies, |state| {
            let stream = state.live_stream(stream)?;
            let member = state.captures.valid_membership(stream)?;
            Ok(state.captures.node_ids(member.capture, &member.dependencies))
        })
    }

    fn capture_topology(&self, stream: StreamId) -> Result<GraphTopology> {
        self.call(Call::CaptureTopology, |state| {
            let stream = state.live_stream(stream)?;
            let member = state.captures.valid_membership(stream)?;
            Ok(state.captures.topology(member.capture))
        })
    }

    fn capture_mode_exchange(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.call(Call::CaptureModeExchange, |state| Ok(state.captures.exchange_thread_mode(mode)))
    }
}
