//! A function on device memory that is captured once per shape, and then replayed.
//!
//! Launching many small kernels one by one costs more than running them; a graph launches them all at once, but its
//! addresses and sizes are fixed. So a [`GraphedCallable`] captures one graph for each shape that its user lists,
//! copies the inputs of a call to where that graph reads them, and replays it. Any other shape runs without a graph,
//! and the outcome tells why.
//!
//! The graphs share one pool and the memory of their inputs: only one of them runs at a time. Shapes are captured from
//! the largest to the smallest, so that the smaller ones fit into memory that the larger ones have freed.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use warpool_driver::{Address, CaptureMode, Pattern, StreamId};

use super::call_outcome::{CallOutcome, CapturedShape, Execution, Fallback};
use super::callable::{Call, Callable, Input};
use super::graph::Graph;
use super::options::{CaptureOptions, GraphOptions};
use crate::error::GraphError;
use crate::memory::{Allocate, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, SharedAllocator};
use crate::{Device, Error, Result, Stream, StreamLease};

/// Options of a [`GraphedCallable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphedOptions {
    /// How often each shape runs before it is captured, on a side stream: libraries choose their algorithms and load
    /// their code at first use.
    pub warmups: u32,
    /// The mode of the captures.
    pub mode: CaptureMode,
}

impl Default for GraphedOptions {
    fn default() -> Self {
        Self { warmups: 3, mode: CaptureMode::default() }
    }
}

/// The capture of one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphReport<S> {
    /// The shape.
    pub shape: S,
    /// How much the graphs' pool grew when it was captured; 0 for a shape that fitted into freed memory.
    pub bytes_added: u64,
    /// How much of the pool's memory its outputs occupy.
    pub bytes_outputs: u64,
    /// The error, if it could not be captured: its calls run without a graph then.
    pub failed: Option<Error>,
}

/// A [`Callable`] with its graphs.
pub struct GraphedCallable<C: Callable> {
    callable: C,
    allocator: Arc<dyn DeviceAllocator>,
    device: Device,
    /// From the largest to the smallest.
    reports: Vec<GraphReport<C::Shape>>,
    captured: Vec<CapturedShape<C::Shape>>,
    /// The graphs' inputs: one block per input, as large as the largest shape needs.
    inputs: Vec<Arc<DeviceBlock>>,
    bytes_inputs: u64,
    /// The stream of the last call that used the graphs' memory. The next call waits for it.
    last: Option<Stream>,
    /// The streams whose use of the inputs is recorded.
    recorded: Vec<StreamId>,
    /// For warm-ups and captures. The lease is kept as long as memory that was allocated for it is in use.
    side_stream: StreamLease,
}

impl<C: Callable> GraphedCallable<C> {
    /// Warms up and captures each of `shapes`. A shape that cannot be captured is [reported](Self::reports), and its
    /// calls run without a graph. An error is returned only for an earlier failure: allocating the inputs, or a
    /// warm-up.
    pub fn new(
        allocator: &impl SharedAllocator,
        device: &Device,
        callable: C,
        shapes: impl IntoIterator<Item = C::Shape>,
        options: GraphedOptions,
    ) -> Result<Self> {
        let allocator = allocator.to_dyn();
        allocator.instance().expect_same(device.instance(), "the device")?;
        let side_stream = device.lease_stream()?;
        let shapes = largest_first(&callable, shapes);
        let inputs = shared_inputs(&allocator, &side_stream, shapes.iter().map(|(_, bytes)| bytes.as_slice()))?;
        let bytes_inputs = inputs.iter().map(|block| block.bytes_usable()).sum();
        let mut this = Self {
            callable,
            allocator,
            device: device.clone(),
            reports: Vec::new(),
            captured: Vec::new(),
            inputs,
            bytes_inputs,
            last: None,
            recorded: Vec::new(),
            side_stream,
        };
        for (shape, input_bytes) in &shapes {
            this.warm_up(shape, input_bytes, options.warmups)?;
        }
        if options.warmups > 0 && !shapes.is_empty() {
            // The graphs have their own pool, so they cannot use memory of the warm-ups, which cannot be reclaimed
            // during a capture.
            this.allocator.trim(this.device.id(), MemPoolId::DEFAULT)?;
        }
        for (shape, input_bytes) in shapes {
            this.capture(shape, input_bytes, options.mode)?;
        }
        Ok(this)
    }

    /// The capture of each shape, from the largest to the smallest.
    #[must_use]
    pub fn reports(&self) -> &[GraphReport<C::Shape>] {
        &self.reports
    }

    /// The memory of the inputs, which all graphs share.
    #[must_use]
    pub fn bytes_inputs(&self) -> u64 {
        self.bytes_inputs
    }

    /// The pool that the graphs share, if there are any.
    #[must_use]
    pub fn pool(&self) -> Option<&MemPool> {
        self.captured.first().and_then(|captured| captured.graph.pool().ok())
    }

    /// The callable.
    #[must_use]
    pub fn callable(&self) -> &C {
        &self.callable
    }

    /// Does the work for `inputs` in `stream`: with the graph of the smallest shape that can serve the call, or without
    /// a graph.
    ///
    /// Outputs of a replay are the graph's memory and valid until the next call: before that, work that reads them must
    /// be enqueued in `stream`, or `stream` must wait for it. An input that is already where the graph reads it
    /// ([`input`](Self::input)) is not copied. Calls on several streams run one after another on the device. After an
    /// error everything is still usable.
    pub fn call(&mut self, shape: &C::Shape, inputs: &[Input], stream: &Stream) -> Result<CallOutcome<'_, C::Shape>> {
        self.check(shape, inputs, stream)?;
        match self.choose(shape, inputs, stream)? {
            Ok(index) => {
                self.replay(index, inputs, stream)?;
                Ok(CallOutcome { execution: Execution::Replayed(&self.captured[index]) })
            }
            Err(why) => {
                let captures = matches!(why, Fallback::StreamCaptures | Fallback::LastStreamCaptures);
                if !captures && self.reads_shared(inputs) {
                    self.wait_for_last(stream)?;
                }
                let _current = stream.enter();
                let call = Call { shape, stream, allocator: &self.allocator, inputs, shared: None };
                let outputs = self.callable.run(&call)?;
                Ok(CallOutcome { execution: Execution::Eager { why, outputs } })
            }
        }
    }

    /// The memory where the graphs read input `index`: an input that is written there need not be copied. In stream
    /// order, the write must come after the last call and before the next one.
    #[must_use]
    pub fn input(&self, index: usize) -> Option<&DeviceBlock> {
        self.inputs.get(index).map(|block| &**block)
    }

    /// Frees the graphs and everything that they hold. Returns the callable.
    pub fn close(mut self) -> Result<C> {
        // All of them are reset, even after a failure.
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

    /// The graph to replay, or the reason why there is none.
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
            |captured: &CapturedShape<C::Shape>| captured.fits(inputs) && self.callable.serves(&captured.shape, shape);
        if let Some(index) = self.captured.iter().rposition(serves) {
            return Ok(Ok(index));
        }
        let failed =
            |report: &&GraphReport<C::Shape>| report.failed.is_some() && self.callable.serves(&report.shape, shape);
        let error = self.reports.iter().rev().find(failed).and_then(|report| report.failed.clone());
        Ok(Err(error.map_or(Fallback::NoSuchShape, Fallback::CaptureFailed)))
    }

    /// Whether an input is in the graphs' memory.
    fn reads_shared(&self, inputs: &[Input]) -> bool {
        inputs.iter().any(|input| self.inputs.iter().any(|block| block.ptr() == input.ptr))
    }

    /// Orders later work of `stream` after the last call that used the graphs' memory, and makes this call the last.
    fn wait_for_last(&mut self, stream: &Stream) -> Result<()> {
        if let Some(last) = self.last.as_ref().filter(|&last| last != stream) {
            stream.wait_stream(last)?;
        }
        if !self.recorded.contains(&stream.id()) {
            // Recorded before the copies: memory whose use could not be recorded must not be used.
            self.inputs.iter().try_for_each(|block| block.record_use(stream))?;
            self.recorded.push(stream.id());
        }
        if self.last.as_ref() != Some(stream) {
            self.last = Some(stream.clone());
        }
        Ok(())
    }

    fn replay(&mut self, index: usize, inputs: &[Input], stream: &Stream) -> Result<()> {
        self.wait_for_last(stream)?;
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
        let call = Call { shape, stream: &self.side_stream, allocator: &self.allocator, inputs: &inputs, shared: None };
        let _current = self.side_stream.enter();
        for _ in 0..times {
            drop(self.callable.run(&call)?);
        }
        self.side_stream.synchronize()
    }

    fn capture(&mut self, shape: C::Shape, input_bytes: Vec<u64>, mode: CaptureMode) -> Result<()> {
        let before = self.bytes_in(self.pool())?;
        let mut graph = Graph::new(&self.allocator, &self.device, GraphOptions::default())?;
        let options = CaptureOptions { pool: self.pool(), mode, ..CaptureOptions::default() };
        let (inputs, shared) = (self.inputs_of(&input_bytes), RefCell::default());
        let outputs = graph.capture(&self.side_stream, options, |capture| {
            let (allocator, shared) = (&self.allocator, &shared);
            let call =
                Call { shape: &shape, stream: &self.side_stream, allocator, inputs: &inputs, shared: Some(shared) };
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
                self.captured.push(CapturedShape { shape: shape.clone(), input_bytes, outputs, graph });
            }
            Err(error) => {
                tracing::warn!(?shape, %error, "a shape cannot be captured; its calls will run without a graph");
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

    /// The shared inputs, in the sizes of a shape.
    fn inputs_of(&self, input_bytes: &[u64]) -> Vec<Input> {
        let part = |(block, &bytes): (&Arc<DeviceBlock>, &u64)| Input { ptr: block.ptr(), bytes };
        self.inputs.iter().zip(input_bytes).map(part).collect()
    }

    /// The bytes that the graphs' pool has reserved; memory that others allocate meanwhile does not count.
    fn bytes_in(&self, pool: Option<&MemPool>) -> Result<u64> {
        let Some(pool) = pool else { return Ok(0) };
        let stats = self.allocator.stats(self.device.id())?;
        Ok(stats.reserved_bytes_by_private_pools.get(&pool.id()).map_or(0, |reserved| reserved.all.current))
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

/// Shapes with the sizes of their inputs, without duplicates, the largest first.
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

/// One block per input, as large as the largest shape needs, and zeroed, as warm-ups read them.
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
