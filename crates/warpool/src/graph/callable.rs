//! What a [`GraphedCallable`](super::GraphedCallable) is made of, and what its calls answer: the work, its inputs, its
//! outputs, and why it ran without a graph.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use warpool_driver::DevicePtr;

use super::graphed::Captured;
use crate::memory::{DeviceAllocator, DeviceBlock};
use crate::{Error, Result, Stream};

/// Work that can be captured.
pub trait Callable {
    /// What distinguishes one graph from another: a batch size, a pair of lengths.
    type Shape: Clone + Ord + fmt::Debug;

    /// How many bytes each input has, in a call of that shape.
    fn input_bytes(&self, shape: &Self::Shape) -> Vec<u64>;

    /// Puts the work into `call.stream()`, which is the thread's current stream meanwhile, and returns its outputs,
    /// allocated for that stream from `call.allocator()`. It must do the same work each time for one shape, and wait
    /// for nothing on the host. Other memory that it needs, such as weights, it [shares](Call::share).
    fn run(&self, call: &Call<'_, Self::Shape>) -> Result<Vec<DeviceBlock>>;

    /// Whether the graph of `captured` can serve a call of `asked`. Only the same shape, unless you say otherwise: a
    /// larger one may do, with its inputs filled in part, if the work does not mind what lies behind: that is what
    /// earlier calls have left. One with less room for an input than the call has is never taken.
    fn serves(&self, captured: &Self::Shape, asked: &Self::Shape) -> bool {
        captured == asked
    }
}

/// What a [`Callable`] works with.
#[derive(Debug)]
pub struct Call<'a, S> {
    pub(super) shape: &'a S,
    pub(super) stream: &'a Stream,
    pub(super) allocator: &'a Arc<dyn DeviceAllocator>,
    pub(super) inputs: &'a [Input],
    /// In a capture: what the graph is to keep.
    pub(super) shared: Option<&'a RefCell<Vec<Arc<DeviceBlock>>>>,
}

impl<'a, S> Call<'a, S> {
    /// Of which shape it is.
    #[must_use]
    pub fn shape(&self) -> &'a S {
        self.shape
    }

    /// Where the work goes.
    #[must_use]
    pub fn stream(&self) -> &'a Stream {
        self.stream
    }

    /// Where memory comes from.
    #[must_use]
    pub fn allocator(&self) -> &'a Arc<dyn DeviceAllocator> {
        self.allocator
    }

    /// The inputs, in their order.
    #[must_use]
    pub fn inputs(&self) -> &'a [Input] {
        self.inputs
    }

    /// Announces memory that the work uses besides its inputs, such as weights: a graph keeps it for its replays, and
    /// whoever gets it after that waits for them. Without a graph, a use on the stream is noted.
    pub fn share(&self, block: &Arc<DeviceBlock>) -> Result<()> {
        match self.shared {
            Some(shared) => {
                shared.borrow_mut().push(Arc::clone(block));
                Ok(())
            }
            None => block.record_use(self.stream),
        }
    }
}

/// Where an input lies. In a capture, this is memory of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its first byte.
    pub ptr: DevicePtr,
    /// How many it has.
    pub bytes: u64,
}

impl From<&DeviceBlock> for Input {
    fn from(block: &DeviceBlock) -> Self {
        Self { ptr: block.ptr(), bytes: block.bytes() }
    }
}

/// The outputs of a call, and how it was done.
pub struct Answer<'a, S> {
    pub(super) how: How<'a, S>,
}

pub(super) enum How<'a, S> {
    Replayed(&'a Captured<S>),
    Eager { why: Fallback, outputs: Vec<DeviceBlock> },
}

/// Why a call ran without a graph.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Fallback {
    /// No captured shape serves it.
    NoSuchShape,
    /// The shape that serves it could not be captured.
    CaptureFailed(Error),
    /// The stream captures: a graph cannot be launched there, but the work itself can be captured.
    StreamCaptures,
    /// The stream of the call before captures, so it cannot be waited for: that would become part of the capture.
    LastStreamCaptures,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchShape => f.write_str("no captured shape serves it"),
            Self::CaptureFailed(error) => write!(f, "its shape could not be captured: {error}"),
            Self::StreamCaptures => f.write_str("the stream captures, and no graph can be launched there"),
            Self::LastStreamCaptures => {
                f.write_str("the stream of the call before captures, and its replay cannot be waited for")
            }
        }
    }
}

impl<S> Answer<'_, S> {
    /// The shape of the graph that was replayed; `None` if it ran without one.
    #[must_use]
    pub fn replayed(&self) -> Option<&S> {
        match &self.how {
            How::Replayed(captured) => Some(&captured.shape),
            How::Eager { .. } => None,
        }
    }

    /// Why it ran without a graph, if it did.
    #[must_use]
    pub fn fallback(&self) -> Option<&Fallback> {
        match &self.how {
            How::Replayed(_) => None,
            How::Eager { why, .. } => Some(why),
        }
    }

    /// Its outputs, in their order.
    pub fn outputs(&self) -> impl ExactSizeIterator<Item = &DeviceBlock> {
        let count = match &self.how {
            How::Replayed(captured) => captured.outputs.len(),
            How::Eager { outputs, .. } => outputs.len(),
        };
        (0..count).map(|index| match &self.how {
            How::Replayed(captured) => {
                captured.graph.buffer(captured.outputs[index]).expect("the key is of this graph's capture")
            }
            How::Eager { outputs, .. } => &outputs[index],
        })
    }
}

impl<S: fmt::Debug> fmt::Debug for Answer<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.how {
            How::Replayed(captured) => write!(f, "replayed the graph of {:?}", captured.shape),
            How::Eager { why, .. } => write!(f, "ran without a graph: {why}"),
        }
    }
}
