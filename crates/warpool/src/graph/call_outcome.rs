//! The result of a call of a [`GraphedCallable`](super::GraphedCallable): the outputs, and whether a graph was
//! replayed.

use std::fmt;

use super::callable::Input;
use super::graph::Graph;
use super::keys::BufferKey;
use crate::Error;
use crate::memory::DeviceBlock;

/// The graph of one shape.
pub(super) struct CapturedShape<S> {
    pub(super) shape: S,
    /// The size of each input.
    pub(super) input_bytes: Vec<u64>,
    pub(super) outputs: Vec<BufferKey>,
    pub(super) graph: Graph,
}

impl<S> CapturedShape<S> {
    /// Whether inputs of these sizes fit.
    pub(super) fn fits(&self, inputs: &[Input]) -> bool {
        inputs.len() == self.input_bytes.len()
            && inputs.iter().zip(&self.input_bytes).all(|(input, &bytes)| input.bytes <= bytes)
    }
}

/// The outputs of a call, and how it was executed.
pub struct CallOutcome<'a, S> {
    pub(super) execution: Execution<'a, S>,
}

pub(super) enum Execution<'a, S> {
    Replayed(&'a CapturedShape<S>),
    Eager { why: Fallback, outputs: Vec<DeviceBlock> },
}

/// Why a call ran without a graph.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Fallback {
    /// No captured shape can serve the call.
    NoSuchShape,
    /// The shape that could serve the call was not captured, because of this error.
    CaptureFailed(Error),
    /// The stream is capturing: a graph cannot be launched there, but the work itself can be captured.
    StreamCaptures,
    /// The stream of the previous call is capturing, and a wait for it would become part of the capture.
    LastStreamCaptures,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchShape => f.write_str("no captured shape can be used for it"),
            Self::CaptureFailed(error) => write!(f, "its shape could not be captured: {error}"),
            Self::StreamCaptures => f.write_str("the stream captures, and no graph can be launched there"),
            Self::LastStreamCaptures => {
                f.write_str("the stream of the call before captures, and its replay cannot be waited for")
            }
        }
    }
}

impl<S> CallOutcome<'_, S> {
    /// The shape of the graph that was replayed; `None` if the call ran without a graph.
    #[must_use]
    pub fn replayed(&self) -> Option<&S> {
        match &self.execution {
            Execution::Replayed(captured) => Some(&captured.shape),
            Execution::Eager { .. } => None,
        }
    }

    /// Why it ran without a graph, if it did.
    #[must_use]
    pub fn fallback(&self) -> Option<&Fallback> {
        match &self.execution {
            Execution::Replayed(_) => None,
            Execution::Eager { why, .. } => Some(why),
        }
    }

    /// Its outputs, in order.
    pub fn outputs(&self) -> impl ExactSizeIterator<Item = &DeviceBlock> {
        let count = match &self.execution {
            Execution::Replayed(captured) => captured.outputs.len(),
            Execution::Eager { outputs, .. } => outputs.len(),
        };
        (0..count).map(|index| match &self.execution {
            Execution::Replayed(captured) => {
                captured.graph.buffer(captured.outputs[index]).expect("the key is of this graph's capture")
            }
            Execution::Eager { outputs, .. } => &outputs[index],
        })
    }
}

impl<S: fmt::Debug> fmt::Debug for CallOutcome<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.execution {
            Execution::Replayed(captured) => write!(f, "replayed the graph of {:?}", captured.shape),
            Execution::Eager { why, .. } => write!(f, "ran without a graph: {why}"),
        }
    }
}
