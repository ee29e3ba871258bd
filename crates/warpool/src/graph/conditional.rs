//! `if` and `while` in graphs: bodies that run depending on a flag in device memory.
//!
//! A conditional node has a flag of its own, which only kernels set. So before the node, and at the end of a `while`'s
//! body, a kernel of one thread reads the caller's flag from memory and sets the node's. The body is captured on a
//! stream of its own, leased until the whole capture ends: bodies come one after another, so as many streams are needed
//! as bodies are nested.
//!
//! The node is in the graph before its body is captured, and cannot be taken out again. So once anything fails from
//! there on, the whole capture comes to nothing.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use warpool_driver::{
    ConditionalId, ConditionalKind, DevicePtr, DriverError, ErrorCode, FunctionId, KernelFault, KernelMirror,
    KernelScope, KernelSource,
};

use super::GraphError;
use super::buffers::BufferAt;
use super::capture::Capture;
use super::shelf::{Doomed, Ended};
use crate::capture::{CaptureStatus, Site};
use crate::{Error, Result, Stream, launch};

/// The kernels that carry a flag from memory into a node.
static FLAGS: KernelSource = KernelSource {
    name: "warpool conditional flags",
    cuda: r#"
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
extern "C" __global__ void flag_from_byte(unsigned long long flag, const unsigned char *value) {
    cudaGraphSetConditional(flag, *value != 0 ? 1 : 0);
}
extern "C" __global__ void flag_from_word(unsigned long long flag, const unsigned int *value) {
    cudaGraphSetConditional(flag, *value != 0 ? 1 : 0);
}
"#,
    mirrors: &[
        KernelMirror { name: "flag_from_byte", run: flag_from_byte, nanos: None },
        KernelMirror { name: "flag_from_word", run: flag_from_word, nanos: None },
    ],
};

type Ran = std::result::Result<(), KernelFault>;

fn flag_from_byte(scope: &mut KernelScope<'_>) -> Ran {
    let (flag, ptr) = (scope.arg_conditional(0)?, scope.arg_ptr(1)?);
    let mut value = [0];
    scope.memory.read(ptr, &mut value)?;
    scope.memory.set_conditional(flag, u32::from(value[0] != 0))
}

fn flag_from_word(scope: &mut KernelScope<'_>) -> Ran {
    let (flag, ptr) = (scope.arg_conditional(0)?, scope.arg_ptr(1)?);
    let value = scope.read_u32(ptr, 1)?[0];
    scope.memory.set_conditional(flag, u32::from(value != 0))
}

/// A flag in device memory: set if it is not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    at: BufferAt,
    bytes: u64,
}

impl Flag {
    /// One byte, as booleans are.
    #[must_use]
    pub fn byte(at: impl Into<BufferAt>) -> Self {
        Self { at: at.into(), bytes: 1 }
    }

    /// Four bytes, at a multiple of four.
    #[must_use]
    pub fn word(at: impl Into<BufferAt>) -> Self {
        Self { at: at.into(), bytes: 4 }
    }

    fn kernel(self) -> &'static str {
        if self.bytes == 1 { "flag_from_byte" } else { "flag_from_word" }
    }
}

impl Capture<'_> {
    /// Captures a body that runs at a replay only if `flag` is set when the replay gets there. Bodies can be nested.
    /// The body's own stream is [`stream`](Self::stream) of its scope, and the thread's current one.
    ///
    /// A body may hold kernels, copies, fills and further conditional nodes, no callbacks and no events; no random
    /// numbers are drawn in it. If `body` fails, the whole capture does: [`GraphError::BodyFailed`] at its end,
    /// whatever becomes of the error here.
    pub fn if_node<R>(&mut self, flag: Flag, body: impl FnOnce(&mut Capture<'_>) -> Result<R>) -> Result<R> {
        self.conditional(flag, ConditionalKind::If, body)
    }

    /// The same with a body that runs while `flag` is set: it is read before the first run and after each. The body
    /// changes the memory that it is in, or it runs for ever.
    pub fn while_node<R>(&mut self, flag: Flag, body: impl FnOnce(&mut Capture<'_>) -> Result<R>) -> Result<R> {
        self.conditional(flag, ConditionalKind::While, body)
    }

    fn conditional<R>(
        &mut self,
        flag: Flag,
        kind: ConditionalKind,
        body: impl FnOnce(&mut Capture<'_>) -> Result<R>,
    ) -> Result<R> {
        let device = self.device().clone();
        if !device.properties().conditional_nodes {
            return Err(GraphError::NoConditionalNodes { device: device.id() }.into());
        }
        let value = self.under_way.buffers.address(flag.at, flag.bytes)?;
        // The device would fault when it reads it, and be of no use from then on.
        if !value.0.is_multiple_of(flag.bytes) {
            return Err(GraphError::FlagAlignment { offset: flag.at.offset }.into());
        }
        self.expect_in_capture(&self.stream)?;
        let set = device.state().kernels.get(device.driver(), &FLAGS, flag.kernel())?;
        let body_stream = self.under_way.body_streams.pop().map_or_else(|| device.lease_stream(), Ok)?;
        let node = device.driver().conditional_create(self.stream.id(), 0)?;
        // From here on the graph has a flag that must have a node, and then a node that must have a body.
        let mut left = LeftHalfDone { capture: self, why: Some(GraphError::BodyPanicked.into()) };
        let outcome = left.capture.capture_node(&NewNode { kind, node, value, set }, &body_stream, body);
        left.why = outcome.as_ref().err().cloned();
        drop(left);
        self.under_way.body_streams.push(body_stream);
        outcome
    }

    fn capture_node<R>(
        &mut self,
        node: &NewNode,
        stream: &Stream,
        body: impl FnOnce(&mut Capture<'_>) -> Result<R>,
    ) -> Result<R> {
        let driver = stream.driver();
        node.set_flag(&self.stream)?;
        driver.conditional_begin(self.stream.id(), node.node, node.kind, stream.id(), self.under_way.mode)?;
        // Ended whatever happens in it, also by a panic.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.capture_body(node, stream, body)));
        let ended = self.end_body(stream);
        match outcome {
            Ok(outcome) => outcome.and_then(|value| ended.map(|()| value)),
            Err(panic) => resume_unwind(panic),
        }
    }

    fn capture_body<R>(
        &mut self,
        node: &NewNode,
        stream: &Stream,
        body: impl FnOnce(&mut Capture<'_>) -> Result<R>,
    ) -> Result<R> {
        let id = match CaptureStatus::of_existing(stream.driver(), stream.id())? {
            CaptureStatus::Capturing(id) => id,
            _ => return Err(DriverError::new("conditional_begin", ErrorCode::StreamCaptureInvalidated).into()),
        };
        let site = Site { record: Arc::clone(&self.under_way.record), in_body: true };
        self.under_way.booking.register(id, site)?;
        let outcome = {
            let _current = stream.enter();
            let mut scope = Capture { under_way: &mut *self.under_way, stream: stream.clone(), in_body: true };
            catch_unwind(AssertUnwindSafe(|| body(&mut scope)))
        };
        let unregistered = self.under_way.booking.unregister(id);
        let value = outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
        unregistered?;
        if node.kind == ConditionalKind::While {
            node.set_flag(stream)?;
        }
        Ok(value)
    }

    fn end_body(&self, stream: &Stream) -> Result<()> {
        let shelf = &self.device().state().graphs;
        match shelf.end(stream.driver(), stream.id(), None) {
            // It belongs to the node; this only forgets its name.
            Ended::Graph(graph) => {
                shelf.destroy(stream.driver(), Doomed::Template(graph));
                Ok(())
            }
            // One that is still under way ends with the capture around it.
            Ended::Failed(error) | Ended::StillUnderWay(error) => Err(GraphError::CaptureFailed { error }.into()),
        }
    }
}

/// Notes, when dropped, that a capture can come to nothing any more, and why.
struct LeftHalfDone<'a, 'b> {
    capture: &'a mut Capture<'b>,
    why: Option<Error>,
}

impl Drop for LeftHalfDone<'_, '_> {
    fn drop(&mut self) {
        let broken = &mut self.capture.under_way.broken;
        *broken = broken.take().or_else(|| self.why.take());
    }
}

/// What a conditional node is made of.
struct NewNode {
    kind: ConditionalKind,
    node: ConditionalId,
    /// Where the caller's flag is.
    value: DevicePtr,
    /// The kernel that reads it.
    set: FunctionId,
}

impl NewNode {
    /// Captures that the node's flag is set from memory.
    fn set_flag(&self, stream: &Stream) -> Result<()> {
        Ok(launch::set_conditional(stream.driver(), self.set, self.node, self.value, stream.id())?)
    }
}
