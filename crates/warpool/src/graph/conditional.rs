//! Conditional nodes: `if` and `while` bodies that run depending on a flag in device memory.
//!
//! A conditional node has a condition value that only kernels can set. So before the node, and at the end of a `while`
//! body, a kernel of one thread reads the caller's flag from memory and sets the condition. The body is captured on its
//! own stream, leased until the whole capture ends: bodies are captured one after another, so the number of streams is
//! the nesting depth.
//!
//! The node is added to the graph before its body is captured, and cannot be removed. So a failure after that fails the
//! whole capture.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use warpool_driver::{
    CaptureId, ConditionalId, ConditionalKind, DevicePtr, FunctionId, HostKernel, KernelFault, KernelScope,
    KernelSource,
};

use super::capture::Capture;
use super::keys::BufferOffset;
use super::retired::{EndOutcome, GraphObject, RetiredGraphs};
use crate::defect::Defect;
use crate::error::GraphError;
use crate::{Error, Result, Stream, launch};

/// The kernels that set a node's condition from memory.
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
    host_kernels: &[
        HostKernel::new("flag_from_byte", flag_from_byte),
        HostKernel::new("flag_from_word", flag_from_word),
    ],
};

type KernelResult = std::result::Result<(), KernelFault>;

fn flag_from_byte(scope: &mut KernelScope<'_>) -> KernelResult {
    let (flag, ptr) = (scope.arg_conditional(0)?, scope.arg_ptr(1)?);
    let mut value = [0];
    scope.memory.read(ptr, &mut value)?;
    scope.memory.set_conditional(flag, u32::from(value[0] != 0))
}

fn flag_from_word(scope: &mut KernelScope<'_>) -> KernelResult {
    let (flag, ptr) = (scope.arg_conditional(0)?, scope.arg_ptr(1)?);
    let value = scope.read_u32(ptr, 1)?[0];
    scope.memory.set_conditional(flag, u32::from(value != 0))
}

/// A flag in device memory: true if it is not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    at: BufferOffset,
    bytes: u64,
}

impl Flag {
    /// One byte, such as a boolean.
    #[must_use]
    pub fn byte(at: impl Into<BufferOffset>) -> Self {
        Self { at: at.into(), bytes: 1 }
    }

    /// Four bytes, at an address that is a multiple of four.
    #[must_use]
    pub fn word(at: impl Into<BufferOffset>) -> Self {
        Self { at: at.into(), bytes: 4 }
    }

    fn kernel(self) -> &'static str {
        if self.bytes == 1 { "flag_from_byte" } else { "flag_from_word" }
    }
}

impl Capture<'_> {
    /// Captures a body that runs at a replay only if `flag` is true when the replay reaches it. Bodies can be nested.
    /// The body's own stream is [`stream`](Self::stream) of its scope, and the thread's current stream during the call.
    ///
    /// A body may contain kernels, copies, fills and further conditional nodes, but no callbacks, no events, and no
    /// random numbers. If `body` fails, the whole capture fails with [`GraphError::BodyFailed`] when it ends, even if
    /// the caller ignores the error here.
    pub fn if_node<R>(&mut self, flag: Flag, body: impl FnOnce(&mut Capture<'_>) -> Result<R>) -> Result<R> {
        self.conditional(flag, ConditionalKind::If, body)
    }

    /// Captures a body that runs while `flag` is true. The flag is read before the first run and after each run. The
    /// body must change the flag, or it runs forever. Otherwise as [`if_node`](Self::if_node).
    pub fn while_node<R>(&mut self, flag: Flag, body: impl FnOnce(&mut Capture<'_>) -> Result<R>) -> Result<R> {
        let kind = if Defect::WhileRunsOnce.is_on() { ConditionalKind::If } else { ConditionalKind::While };
        self.conditional(flag, kind, body)
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
        let value = self.open.buffers.address(flag.at, flag.bytes)?;
        // A misaligned read would fault and make the device unusable.
        if !value.0.is_multiple_of(flag.bytes) {
            return Err(GraphError::FlagAlignment { offset: flag.at.offset }.into());
        }
        device.instance().expect_no_typed_call()?;
        self.expect_in_capture(&self.stream)?;
        let kernel = device.kernel(&FLAGS, flag.kernel())?;
        let body_stream = self.open.body_streams.pop().map_or_else(|| device.lease_stream(), Ok)?;
        let node = device.driver().conditional_create(self.stream.id(), 0)?;
        // From now on the graph has a condition that needs a node, and later a node that needs a body.
        let mut guard = FailOnDrop { capture: self, error: Some(GraphError::BodyPanicked.into()) };
        let outcome = guard.capture.capture_node(&NewNode { kind, node, value, kernel }, &body_stream, body);
        guard.error = outcome.as_ref().err().cloned();
        drop(guard);
        self.open.body_streams.push(body_stream);
        outcome
    }

    fn capture_node<R>(
        &mut self,
        node: &NewNode,
        stream: &Stream,
        body: impl FnOnce(&mut Capture<'_>) -> Result<R>,
    ) -> Result<R> {
        let driver = stream.driver();
        node.set_condition(&self.stream)?;
        let begun = {
            let instance = stream.instance();
            let _change = instance.change_captures()?;
            driver.conditional_begin(self.stream.id(), node.node, node.kind, stream.id(), self.open.mode)?;
            instance.captures().add(stream, &self.open.record, true)
        };
        // The body's capture is ended even after an error or a panic.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.capture_body(begun?, node, stream, body)));
        let ended = self.end_body(stream);
        match outcome {
            Ok(outcome) => outcome.and_then(|value| ended.map(|()| value)),
            Err(panic) => resume_unwind(panic),
        }
    }

    fn capture_body<R>(
        &mut self,
        id: CaptureId,
        node: &NewNode,
        stream: &Stream,
        body: impl FnOnce(&mut Capture<'_>) -> Result<R>,
    ) -> Result<R> {
        self.open.registration.register(id)?;
        let outcome = {
            let _current = stream.enter();
            let mut scope = Capture { open: &mut *self.open, stream: stream.clone(), in_body: true };
            catch_unwind(AssertUnwindSafe(|| body(&mut scope)))
        };
        let unregistered = self.open.registration.unregister(id);
        let value = outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
        unregistered?;
        if node.kind == ConditionalKind::While {
            node.set_condition(stream)?;
        }
        Ok(value)
    }

    fn end_body(&self, stream: &Stream) -> Result<()> {
        let retired = RetiredGraphs::of(self.device());
        match retired.end(stream, None)? {
            // The body belongs to the node; this only releases its id.
            EndOutcome::Graph(graph) => {
                retired.destroy(stream.driver(), GraphObject::Template(graph));
                Ok(())
            }
            // A capture that is still active ends with the enclosing one.
            EndOutcome::Failed(error) | EndOutcome::StillUnderWay(error) => {
                Err(GraphError::CaptureFailed { error }.into())
            }
        }
    }
}

/// Fails the whole capture when dropped with an error.
struct FailOnDrop<'a, 'b> {
    capture: &'a mut Capture<'b>,
    error: Option<Error>,
}

impl Drop for FailOnDrop<'_, '_> {
    fn drop(&mut self) {
        let failed = &mut self.capture.open.failed;
        *failed = failed.take().or_else(|| self.error.take());
    }
}

/// A conditional node to be captured.
struct NewNode {
    kind: ConditionalKind,
    node: ConditionalId,
    /// The caller's flag.
    value: DevicePtr,
    /// The kernel that reads it.
    kernel: FunctionId,
}

impl NewNode {
    /// Captures the kernel that sets the node's condition from the flag.
    fn set_condition(&self, stream: &Stream) -> Result<()> {
        Ok(launch::set_conditional(stream.driver(), self.kernel, self.node, self.value, stream.id())?)
    }
}
