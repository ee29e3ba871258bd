//! Graphs over memory that sleeps: each checks the contents of one block and writes those of another, and has memory of
//! its own in the pool of a tag.

use warpool::Error;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::raw::Allocation;
use warpool::memory::{Allocate as _, DeviceBlock};

use super::{Block, GRAPHS, MIB, Run, STREAMS, TAGS};

pub struct Captured {
    graph: Graph,
    /// The block that it reads, and what that contained.
    input: (u32, u32),
    output: u32,
    /// What it writes.
    value: u32,
    /// Whether it owns memory in the pool of the tag.
    has_memory: bool,
}

impl Captured {
    pub fn uses(&self, number: u32) -> bool {
        self.input.0 == number || self.output == number
    }
}

impl Run<'_> {
    pub fn capture(&mut self) {
        let (Some(input), Some(output)) = (self.any_block(), self.any_block()) else { return };
        let Some(contents) = self.blocks[&input].value else { return };
        if self.graphs.len() >= 3 || self.sleeps(Some(GRAPHS)) || input == output {
            return;
        }
        self.next_value += 1;
        let (value, stream) = (self.next_value, self.machine.stream(0, self.context.rng.below(STREAMS)));
        self.context.step(format!("capture: reads block {input}, writes block {output}"));
        // All that the graph uses was written before, in the order of any stream.
        self.machine.synchronize();
        let device = self.machine.device(0);
        let mut graph = Graph::new(&self.allocator, &device, GraphOptions::default()).unwrap();
        let tag = self.tags.tag(&device, TAGS[GRAPHS]).unwrap();
        let options = CaptureOptions { pool: Some(tag.pool()), ..CaptureOptions::default() };
        let range = |block: &Block| {
            let Allocation { ptr, bytes_requested, .. } = block.allocation;
            (ptr, bytes_requested)
        };
        let ((from, read), (to, written)) = (range(&self.blocks[&input]), range(&self.blocks[&output]));
        let machine = &self.machine;
        let has_memory = graph.capture(stream, options, |capture| {
            machine.check_pages(from, read, contents, stream);
            machine.write_pages(to, written, value, stream);
            let (scratch, own) = (self.allocator.allocate(MIB, stream), capture.allocate(MIB));
            // The graph continues to use what its capture frees.
            let of_graph = own.as_ref().ok().map(|&key| capture.buffer(key).map(DeviceBlock::ptr)).transpose()?;
            for ptr in scratch.as_ref().ok().map(DeviceBlock::ptr).into_iter().chain(of_graph) {
                machine.write_pages(ptr, MIB, value, stream);
                machine.check_pages(ptr, MIB, value, stream);
            }
            for error in [scratch.err(), own.err()].into_iter().flatten() {
                assert!(matches!(error, Error::OutOfMemory(_)), "an error without a fault: {error}");
            }
            Ok(of_graph.is_some())
        });
        let has_memory = has_memory.unwrap();
        self.context.counts.captures += 1;
        self.graphs.push(Captured { graph, input: (input, contents), output, value, has_memory });
    }

    /// Replays a graph, if what it uses is awake, or drops it.
    pub fn replay(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.context.rng.below(self.graphs.len());
        let stream = self.machine.stream(0, self.context.rng.below(STREAMS));
        let Captured { graph, input: (input, contents), output, value, has_memory } = &self.graphs[at];
        if self.context.rng.one_in(6) {
            self.context.step(format!("the graph that writes block {output} is dropped"));
            self.graphs.swap_remove(at);
            return;
        }
        if self.sleeps(Some(GRAPHS)) && *has_memory {
            let refused = graph.replay(stream);
            assert!(matches!(refused, Err(Error::MemoryAsleep { .. })), "memory of the graph sleeps: {refused:?}");
            self.context.made("replay refused");
            return;
        }
        let is_asleep = [input, output].iter().any(|number| self.is_asleep(&self.blocks[number]));
        if is_asleep || self.sleeps(Some(GRAPHS)) || self.blocks[input].value != Some(*contents) {
            return;
        }
        self.context.step(format!("replay: reads block {input}, writes block {output}"));
        self.machine.synchronize();
        graph.replay(stream).unwrap();
        self.machine.synchronize();
        self.context.counts.replays += 1;
        self.blocks.get_mut(output).expect("a graph uses it").value = Some(*value);
    }
}
