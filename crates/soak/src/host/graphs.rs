//! Steps with graphs that use pinned memory: the content that a graph copies is written once, in the capture; every
//! replay must read it, even after the block was freed.

use std::sync::Arc;

use warpool::driver::{Copies as _, HostPtr};
use warpool::graph::{Capture, CaptureOptions, Graph, GraphOptions};
use warpool::memory::{DeviceAllocator, HostBlock};
use warpool::{Error, Result};

use super::blocks::{parts, write_tag};
use super::{Run, SCRATCH};
use crate::caught::caught;
use crate::machine::Outcome;

/// A range that a graph uses.
#[derive(Debug)]
pub struct GraphRange {
    graph: u32,
    pub start: u64,
    pub end: u64,
}

/// A graph that copies from pinned memory.
pub struct HostGraph {
    number: u32,
    graph: Graph,
    /// Pinned blocks that it owns or that the program left to it.
    kept: Vec<HostPtr>,
    /// Pinned blocks that the program still has.
    blocks: Vec<HostBlock>,
    /// The stream of the last replay.
    last: Option<usize>,
}

impl Run<'_> {
    /// Captures copies from pinned memory, while other memory is allocated and freed.
    pub fn capture(&mut self) {
        if self.graphs.len() >= 3 || self.context.skips("captures") {
            return;
        }
        let index = self.any_stream();
        let stream = self.streams[index].0.clone();
        self.context.step(format!("capture on stream {index}"));
        let memory: Arc<dyn DeviceAllocator> = self.memory.clone();
        let graph = Graph::new(&memory, &stream.device(), GraphOptions::default()).unwrap();
        let number = self.next_graph;
        self.next_graph += 1;
        let mut captured = HostGraph { number, graph, kept: Vec::new(), blocks: Vec::new(), last: None };
        let mut gave_up = false;
        let armed = self.machine.arm(self.context);
        let HostGraph { graph, kept, blocks, .. } = &mut captured;
        let outcome = caught(|| {
            graph.capture(&stream, CaptureOptions::default(), |capture| {
                self.machine.suspend();
                let outcome = self.body(capture, number, kept, blocks, &mut gave_up);
                self.machine.resume(&armed);
                outcome
            })
        });
        let outcome = self.machine.settle(self.context, armed, outcome, gave_up);
        self.context.step(format!("the capture ends: {}", captured.graph.is_captured()));
        assert_eq!(captured.graph.is_captured(), outcome == Outcome::Done(()), "whether the graph is captured");
        self.machine.expect_capture_ended(&mut captured.graph, &stream);
        if outcome == Outcome::Done(()) {
            self.context.counts.captures += 1;
            self.graphs.push(captured);
        } else {
            self.context.counts.captures_failed += 1;
            self.end(captured);
        }
    }

    fn body(
        &mut self,
        capture: &mut Capture<'_>,
        number: u32,
        kept: &mut Vec<HostPtr>,
        blocks: &mut Vec<HostBlock>,
        gave_up: &mut bool,
    ) -> Result<()> {
        let Outcome::Done(buffer) = self.machine.call(self.context, || capture.allocate(SCRATCH)) else {
            *gave_up = true;
            return Err(Error::NoDevice { driver: "none: the program gave up" });
        };
        let (scratch, stream) = (capture.buffer(buffer)?.ptr(), &capture.stream().clone());
        for _ in 0..1 + self.context.rng.below(6) {
            let bytes = self.bytes();
            match self.context.rng.below(6) {
                0..4 => {
                    let outcome = self.machine.call(self.context, || self.host.allocate_on(bytes, stream));
                    let Outcome::Done(block) = outcome else { continue };
                    self.context.counts.allocations += 1;
                    self.insert(&block, bytes);
                    let tag = self.tag();
                    self.context.step(format!("  {tag:#x}, {bytes} bytes, at {}", block.ptr()));
                    write_tag(&block, tag);
                    // Recorded before it is used: a use that cannot be recorded is not made.
                    if self.machine.call(self.context, || block.record_use(stream)) == Outcome::Done(()) {
                        let (start, end) = (block.ptr().0, block.ptr().0 + block.bytes_usable());
                        self.graph_ranges.push(GraphRange { graph: number, start, end });
                        for (offset, len) in parts(bytes) {
                            let from = HostPtr(block.ptr().0 + offset);
                            self.machine.sim.copy(scratch.into(), from.into(), len, stream.id()).unwrap();
                            self.machine.check_tag(scratch, len, tag, stream);
                        }
                    }
                    match self.context.rng.below(3) {
                        0 => {
                            kept.push(block.ptr());
                            capture.keep_host(block)?;
                        }
                        1 => {
                            // The graph keeps it; the address is not in use by the program any more.
                            self.context.step(format!("  {tag:#x} is freed in the capture"));
                            self.remove(block.ptr());
                            drop(block);
                        }
                        _ => blocks.push(block),
                    }
                }
                4 => self.allocate(),
                _ => self.process_pending(),
            }
        }
        Ok(())
    }

    /// Replays a graph on a stream of its device, after its last replay. The graph checks what it reads.
    pub fn replay(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.context.rng.below(self.graphs.len());
        let device = self.graphs[at].graph.device().id();
        let own: Vec<usize> =
            (0..self.streams.len()).filter(|&index| self.streams[index].0.device_id() == device).collect();
        let index = self.context.rng.pick(&own);
        self.context.step(format!("replay graph {at} on stream {index}"));
        let stream = &self.streams[index].0;
        if let Some(last) = self.graphs[at].last {
            self.machine.wait(stream, &self.streams[last].0);
        }
        let graph = &self.graphs[at].graph;
        if self.machine.call(self.context, || graph.replay(stream)) == Outcome::Done(()) {
            self.context.counts.replays += 1;
            self.graphs[at].last = Some(index);
        } else {
            // After a panic it is not known whether the graph was launched.
            self.machine.wait_for(stream);
        }
    }

    /// Drops a graph, mostly with replays still under way.
    pub fn drop_graph(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.context.rng.below(self.graphs.len());
        self.context.step(format!("drop graph {at}"));
        let captured = self.graphs.swap_remove(at);
        self.end(captured);
    }

    fn end(&mut self, captured: HostGraph) {
        let HostGraph { number, mut graph, kept, blocks, .. } = captured;
        if self.context.rng.one_in(2) {
            let _ = self.machine.call(self.context, || graph.reset());
        }
        drop(graph);
        self.graph_ranges.retain(|range| range.graph != number);
        for ptr in kept {
            self.remove(ptr);
        }
        for block in blocks {
            self.remove(block.ptr());
            let _ = self.machine.call(self.context, || block.free());
        }
    }
}
