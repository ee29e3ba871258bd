//! A function on device memory that is captured once per shape, and replayed from then on.
//!
//! Launching many small kernels one by one costs more than running them; a graph launches them all at once, but has its
//! addresses and sizes built in. So a [`GraphedCallable`] captures one graph for each shape that its user expects,
//! copies the inputs of a call to where that graph reads them, and replays. A shape that nobody expected runs as if
//! there were no graphs, and the answer says why.
//!
//! The graphs share one pool and the memory of their inputs: only one of them runs at a time. Shapes are captured from
//! the largest to the smallest, so that the smaller find room in what the larger have left.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use warpool_driver::{Address, CaptureMode, Pattern, StreamId};

use super::callable::How;
use super::{Answer, BufferKey, Call, Callable, CaptureOptions, Fallback, Graph, GraphError, GraphOptions, Input};
use crate::memory::{Allocate, DeviceAllocator, DeviceBlock, MemPoolId};
use crate::{Device, Error, Result, Stream, StreamLease};

/// How graphs are made of a [`Callable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphedOptions {
    /// How often each shape runs before it is captured, on a stream aside: libraries choose their algorithms and load
    /// their code at first use.
    pub warmups: u32,
    /// How strict the captures are.
    pub mode: CaptureMode,
}

impl Default for GraphedOptions {
    fn default() -> Self {
        Self { warmups: 3, mode: CaptureMode::default() }
    }
}

/// What came of one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphReport<S> {
    /// Which.
    pub shape: S,
    /// How much the graphs' pool grew when it was captured; 0 for a shape that found room in what others had left.
    pub bytes_added: u64,
    /// How much of the pool's memory its outputs take for good.
    pub bytes_outputs: u64,
    /// Why there is no graph of it, if there is none: calls of it run without.
    pub failed: Option<Error>,
}

/// A [`Callable`] with its graphs.
pub struct GraphedCallable<C: Callable> {
    callable: C,
    allocator: Arc<dyn DeviceAllocator>,
    device: Device,
    /// From the largest to the smallest.
    reports: Vec<GraphReport<C::Shape>>,
    captured: Vec<Captured<C::Shape>>,
    /// Where the graphs read: one block per input, as large as the largest shape needs.
    inputs: Vec<Arc<DeviceBlock>>,
    bytes_inputs: u64,
    /// Where the last replay went: the next, on another stream, comes behind it.
    last: Option<Stream>,
    /// The streams that the allocator knows to use the inputs.
    seen: Vec<StreamId>,
    /// The side stream is ours as long as memory of it is in use.
    aside: StreamLease,
}

/// The graph of one shape.
pub(super) struct Captured<S> {
    pub(super) shape: S,
    /// For each input, how much room there is.
    input_bytes: Vec<u64>,
    pub(super) outputs: Vec<BufferKey>,
    pub(super) graph: Graph,
}

impl<C: Callable> GraphedCallable<C> {
    /// Warms up and captures each of `shapes`. One that cannot be captured is [reported](Self::reports), and its calls
    /// run without a graph; an error is what fails before that: memory for the inputs, or the work itself when it runs
    /// without a graph.
    pub fn new(
        allocator: &Arc<dyn DeviceAllocator>,
        device: &Device,
        callable: C,
        shapes: impl IntoIterator<Item = C::Shape>,
        options: GraphedOptions,
    ) -> Result<Self> {
        allocator.instance().expect_same(device.instance(), "the device")?;
        let aside = device.lease_stream()?;
        let shapes = largest_first(&callable, shapes);
        let inputs = shared_inputs(allocator, &aside, shapes.iter().map(|(_, bytes)| bytes.as_slice()))?;
        let bytes_inputs = inputs.iter().map(|block| block.bytes_usable()).sum();
        let mut this = Self {
            callable,
            allocator: Arc::clone(allocator),
            device: device.clone(),
            reports: Vec::new(),
            captured: Vec::new(),
            inputs,
            bytes_inputs,
            last: None,
            seen: Vec::new(),
            aside,
        };
        for (shape, input_bytes) in &shapes {
            this.warm_up(shape, input_bytes, options.warmups)?;
        }
        if options.warmups > 0 && !shapes.is_empty() {
            // What the warm-ups worked with is of no use to the graphs, which have a pool of their own; in a capture it
            // could not go back any more.
            this.allocator.trim(this.device.id(), MemPoolId::DEFAULT)?;
        }
        for (shape, input_bytes) in shapes {
            this.capture(shape, input_bytes, options.mode)?;
        }
        Ok(this)
    }

    /// What came of each shape, from the largest to the smallest.
    #[must_use]
    pub fn reports(&self) -> &[GraphReport<C::Shape>] {
        &self.reports
    }

    /// How much memory the inputs take that all graphs share.
    #[must_use]
    pub fn bytes_inputs(&self) -> u64 {
        self.bytes_inputs
    }

    /// The pool that the graphs share, if there are any.
    #[must_use]
    pub fn pool(&self) -> Option<MemPoolId> {
        self.captured.first().and_then(|captured| captured.graph.pool().ok())
    }

    /// The work itself.
    #[must_use]
    pub fn callable(&self) -> &C {
        &self.callable
    }

    /// Does the work for `inputs`, in the order of `stream`: by the graph of the smallest shape that serves, or without
    /// one.
    ///
    /// Outputs of a replay are the graph's memory, good until the next call: work that reads them must be in `stream`,
    /// or be waited for by it, before that. An input that already lies where the graph reads it
    /// ([`input`](Self::input)) is not copied. Calls on several streams come one after another on the device. An error
    /// leaves everything usable.
    pub fn call(&mut self, shape: &C::Shape, inputs: &[Input], stream: &Stream) -> Result<Answer<'_, C::Shape>> {
        self.check(shape, inputs, stream)?;
        match self.choose(shape, inputs, stream)? {
            Ok(index) => {
                self.replay(index, inputs, stream)?;
                Ok(Answer { how: How::Replayed(&self.captured[index]) })
            }
            Err(why) => {
                let captures = matches!(why, Fallback::StreamCaptures | Fallback::LastStreamCaptures);
                if !captures && self.reads_shared(inputs) {
                    self.come_behind_the_last(stream)?;
                }
                let _current = stream.enter();
                let call = Call { shape, stream, allocator: &self.allocator, inputs, shared: None };
                let outputs = self.callable.run(&call)?;
                Ok(Answer { how: How::Eager { why, outputs } })
            }
        }
    }

    /// Where the graphs read input `index`: who writes it there spares the copy. Write it in the order of the stream of
    /// the last call, or behind that, and call in the order of the writing.
    #[must_use]
    pub fn input(&self, index: usize) -> Option<&DeviceBlock> {
        self.inputs.get(index).map(|block| &**block)
    }

    /// Gives up the graphs and what they hold. Returns the work itself.
    pub fn close(mut self) -> Result<C> {
        // All of them are reset, also behind one that fails.
        let mut outcome = Ok(());
        for captured in &mut self.captured {
            outcome = outcome.and(captured.graph.reset());
        }
        outcome.map(|()| self.callable)
    }

    fn check(&self, shape: &C::Shape, inputs: &[Input], stream: &Stream) -> Result<()> {
        self.device.instance().expect_same(stream.instance(), "the stream")?;
        if stream.device_id() != self.device.id() {
            let (graph, owner) = (self.device.id(), stream.device_id());
            return Err(GraphError::StreamDevice { graph, stream: stream.id(), owner }.into());
        }
        let wanted = self.callable.input_bytes(shape);
        let given = inputs.iter().map(|input| input.bytes);
        if given.clone().eq(wanted.iter().copied()) {
            return Ok(());
        }
        Err(GraphError::CallInputs { given: given.collect(), wanted }.into())
    }

    /// The graph that serves, or why none does.
    fn choose(
        &self,
        shape: &C::Shape,
        inputs: &[Input],
        stream: &Stream,
    ) -> Result<std::result::Result<usize, Fallback>> {
        if stream.is_capturing()? {
            return Ok(Err(Fallback::StreamCaptures));
        }
        if let Some(last) = self.last.as_ref().filter(|&last| last != stream)
            && last.is_capturing()?
        {
            return Ok(Err(Fallback::LastStreamCaptures));
        }
        // The smallest are at the end.
        let serves =
            |captured: &Captured<C::Shape>| captured.has_room(inputs) && self.callable.serves(&captured.shape, shape);
        if let Some(index) = self.captured.iter().rposition(serves) {
            return Ok(Ok(index));
        }
        let failed =
            |report: &&GraphReport<C::Shape>| report.failed.is_some() && self.callable.serves(&report.shape, shape);
        let error = self.reports.iter().rev().find(failed).and_then(|report| report.failed.clone());
        Ok(Err(error.map_or(Fallback::NoSuchShape, Fallback::CaptureFailed)))
    }

    /// Whether a call reads where the graphs do.
    fn reads_shared(&self, inputs: &[Input]) -> bool {
        inputs.iter().any(|input| self.inputs.iter().any(|block| block.ptr() == input.ptr))
    }

    /// Puts what `stream` does next behind the last call that used the graphs' memory, and is the last itself.
    fn come_behind_the_last(&mut self, stream: &Stream) -> Result<()> {
        if let Some(last) = self.last.as_ref().filter(|&last| last != stream) {
            stream.wait_stream(last)?;
        }
        if !self.seen.contains(&stream.id()) {
            // Before the copies: what could not be noted must not be used.
            self.inputs.iter().try_for_each(|block| block.record_use(stream))?;
            self.seen.push(stream.id());
        }
        if self.last.as_ref() != Some(stream) {
            self.last = Some(stream.clone());
        }
        Ok(())
    }

    fn replay(&mut self, index: usize, inputs: &[Input], stream: &Stream) -> Result<()> {
        self.come_behind_the_last(stream)?;
        for (input, block) in inputs.iter().zip(&self.inputs) {
            if input.bytes > 0 && input.ptr != block.ptr() {
                let (from, to) = (Address::Device(input.ptr), Address::Device(block.ptr()));
                stream.driver().copy(to, from, input.bytes, stream.id())?;
            }
        }
        self.captured[index].graph.replay(stream)
    }

    fn warm_up(&self, shape: &C::Shape, input_bytes: &[u64], times: u32) -> Result<()> {
        let inputs = self.inputs_of(input_bytes);
        let call = Call { shape, stream: &self.aside, allocator: &self.allocator, inputs: &inputs, shared: None };
        let _current = self.aside.enter();
        for _ in 0..times {
            drop(self.callable.run(&call)?);
        }
        self.aside.synchronize()
    }

    fn capture(&mut self, shape: C::Shape, input_bytes: Vec<u64>, mode: CaptureMode) -> Result<()> {
        let before = self.bytes_in(self.pool())?;
        let mut graph = Graph::new(&self.allocator, &self.device, GraphOptions::default())?;
        let options = CaptureOptions { pool: self.pool(), mode, ..CaptureOptions::default() };
        let (inputs, shared) = (self.inputs_of(&input_bytes), RefCell::default());
        let outputs = graph.capture(&self.aside, options, |capture| {
            let (allocator, shared) = (&self.allocator, &shared);
            let call = Call { shape: &shape, stream: &self.aside, allocator, inputs: &inputs, shared: Some(shared) };
            let outputs = self.callable.run(&call)?;
            for block in self.inputs.iter().cloned().chain(shared.take()) {
                capture.share(block)?;
            }
            outputs.into_iter().map(|output| capture.keep(output)).collect::<Result<Vec<_>>>()
        });
        let mut report = GraphReport { shape: shape.clone(), bytes_added: 0, bytes_outputs: 0, failed: None };
        match outputs {
            Ok(outputs) => {
                for &key in &outputs {
                    report.bytes_outputs += graph.buffer(key)?.bytes_usable();
                }
                self.captured.push(Captured { shape: shape.clone(), input_bytes, outputs, graph });
            }
            Err(error) => {
                tracing::warn!(?shape, %error, "cannot be captured; its calls will run without a graph");
                report.failed = Some(error);
            }
        }
        report.bytes_added = self.bytes_in(self.pool())?.saturating_sub(before);
        tracing::debug!(
            ?shape,
            bytes_added = report.bytes_added,
            is_captured = report.failed.is_none(),
            "capture ended"
        );
        self.reports.push(report);
        Ok(())
    }

    /// The shared inputs, as far as a shape uses them.
    fn inputs_of(&self, input_bytes: &[u64]) -> Vec<Input> {
        let part = |(block, &bytes): (&Arc<DeviceBlock>, &u64)| Input { ptr: block.ptr(), bytes };
        self.inputs.iter().zip(input_bytes).map(part).collect()
    }

    /// What the graphs' pool holds of the device, so that what others allocate meanwhile does not count.
    fn bytes_in(&self, pool: Option<MemPoolId>) -> Result<u64> {
        let Some(pool) = pool else { return Ok(0) };
        let stats = self.allocator.stats(self.device.id())?;
        Ok(stats.reserved_bytes_by_private_pools.get(&pool).map_or(0, |held| held.all.current))
    }
}

impl<S> Captured<S> {
    /// Whether inputs of these sizes fit.
    fn has_room(&self, inputs: &[Input]) -> bool {
        inputs.len() == self.input_bytes.len()
            && inputs.iter().zip(&self.input_bytes).all(|(input, &room)| input.bytes <= room)
    }
}

impl<C: Callable> fmt::Debug for GraphedCallable<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shapes: Vec<&C::Shape> = self.captured.iter().map(|captured| &captured.shape).collect();
        f.debug_struct("GraphedCallable")
            .field("device", &self.device)
            .field("captured", &shapes)
            .finish_non_exhaustive()
    }
}

/// Shapes with their inputs, each once, the largest first.
fn largest_first<C: Callable>(callable: &C, shapes: impl IntoIterator<Item = C::Shape>) -> Vec<(C::Shape, Vec<u64>)> {
    let mut shapes: Vec<C::Shape> = shapes.into_iter().collect();
    shapes.sort();
    shapes.dedup();
    let mut sized: Vec<(C::Shape, Vec<u64>)> = shapes
        .into_iter()
        .rev()
        .map(|shape| {
            let bytes = callable.input_bytes(&shape);
            (shape, bytes)
        })
        .collect();
    sized.sort_by_key(|(_, bytes)| std::cmp::Reverse(bytes.iter().copied().map(u128::from).sum::<u128>()));
    sized
}

/// One block per input, as large as the largest shape needs, and zeroed: warm-ups read them.
fn shared_inputs<'a>(
    allocator: &Arc<dyn DeviceAllocator>,
    stream: &Stream,
    shapes: impl Iterator<Item = &'a [u64]>,
) -> Result<Vec<Arc<DeviceBlock>>> {
    let mut largest: Vec<u64> = Vec::new();
    for shape in shapes {
        largest.resize(largest.len().max(shape.len()), 0);
        for (most, &bytes) in largest.iter_mut().zip(shape) {
            *most = bytes.max(*most);
        }
    }
    let make = |bytes: u64| -> Result<Arc<DeviceBlock>> {
        let block = allocator.allocate(bytes, stream)?;
        if bytes > 0 {
            stream.driver().fill(block.ptr(), Pattern::U8(0), bytes, stream.id())?;
        }
        Ok(Arc::new(block))
    };
    largest.into_iter().map(make).collect()
}
