//! Work that a [`GraphedCallable`](super::GraphedCallable) captures and replays: the trait for it, and the arguments of
//! a run.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use warpool_driver::DevicePtr;

use crate::memory::{DeviceAllocator, DeviceBlock};
use crate::{Result, Stream};

/// Work that can be captured.
pub trait Callable {
    /// The key that distinguishes one graph from another, such as a batch size or a pair of lengths.
    type Shape: Clone + Ord + fmt::Debug;

    /// The size of each input, in a call of that shape.
    fn input_bytes(&self, shape: &Self::Shape) -> Vec<u64>;

    /// Enqueues the work in `call.stream()`, which is the thread's current stream during the call, and returns its
    /// outputs, allocated for that stream from `call.allocator()`. It must do the same work each time for one shape,
    /// and must not wait on the host. It must [share](Call::share) other memory that it uses, such as weights.
    fn run(&self, call: &Call<'_, Self::Shape>) -> Result<Vec<DeviceBlock>>;

    /// Whether the graph of `captured` can be used for a call of `requested`. By default only for the same shape. A
    /// larger shape can be allowed if the work may read data of earlier calls after the end of a shorter input. A shape
    /// whose inputs are smaller than those of the call is never used.
    fn serves(&self, captured: &Self::Shape, requested: &Self::Shape) -> bool {
        captured == requested
    }
}

/// The arguments of [`Callable::run`].
#[derive(Debug)]
pub struct Call<'a, S> {
    pub(super) shape: &'a S,
    pub(super) stream: &'a Stream,
    pub(super) allocator: &'a Arc<dyn DeviceAllocator>,
    pub(super) inputs: &'a [Input],
    /// In a capture: the blocks that the graph shares.
    pub(super) shared: Option<&'a RefCell<Vec<Arc<DeviceBlock>>>>,
}

impl<'a, S> Call<'a, S> {
    /// The shape.
    #[must_use]
    pub fn shape(&self) -> &'a S {
        self.shape
    }

    /// The stream for the work.
    #[must_use]
    pub fn stream(&self) -> &'a Stream {
        self.stream
    }

    /// The allocator for outputs and temporary memory.
    #[must_use]
    pub fn allocator(&self) -> &'a Arc<dyn DeviceAllocator> {
        self.allocator
    }

    /// The inputs, in order.
    #[must_use]
    pub fn inputs(&self) -> &'a [Input] {
        self.inputs
    }

    /// Declares memory that the work uses besides its inputs, such as weights: a graph keeps it alive for its replays,
    /// and it is reused only after them. Without a graph, the use on the stream is recorded.
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

/// Where an input is. In a capture, this is memory of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its address.
    pub ptr: DevicePtr,
    /// Its size.
    pub bytes: u64,
}

impl From<&DeviceBlock> for Input {
    fn from(block: &DeviceBlock) -> Self {
        Self { ptr: block.ptr(), bytes: block.bytes() }
    }
}
