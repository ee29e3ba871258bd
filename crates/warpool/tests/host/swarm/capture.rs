//! Graphs that own pinned memory: captured, replayed on any stream, given up while replays may be under way.
//!
//! What a graph copies from is written once, in the capture. Every replay must find it there, whoever gave the block
//! back meanwhile.

use std::collections::BTreeSet;

use warpool::driver::{Copies as _, DevicePtr, HostPtr, Memory as _};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::DeviceAllocator;
use warpool::{Error, Result};

use super::machine::{parts, pattern};
use super::model::{Held, OfGraph};
use super::program::{Run, write};

const SLOT: u64 = 128;
const SLOTS: u64 = 32;

/// A graph, where it copies to, and what must be there after a replay.
pub struct Captured {
    number: u32,
    graph: Graph,
    buffer: DevicePtr,
    expected: Vec<(u64, u32, u64)>,
    /// Streams that it was replayed on, the last one at the end: the next replay comes behind that.
    replayed_on: Vec<usize>,
}

impl Run<'_> {
    /// Captures copies from pinned memory, old and new, while other memory comes and goes.
    pub fn capture(&mut self) {
        let quiet: Vec<usize> = (0..self.machine.streams.len()).filter(|&index| !self.machine.is_held(index)).collect();
        if quiet.is_empty() || self.graphs.len() >= 4 {
            return;
        }
        let index = self.rng.pick(&quiet);
        let (stream, number) = (self.stream(index), self.next_graph);
        self.next_graph += 1;
        self.failing.push(format!("capture graph {number} on stream {index}"));
        let buffer = self.machine.sim.mem_alloc(stream.device_id(), SLOT * SLOTS).unwrap();
        let memory: std::sync::Arc<dyn DeviceAllocator> = self.device_memory.clone();
        let mut graph = Graph::new(&memory, &stream.device(), GraphOptions::default()).unwrap();
        let mut expected = Vec::new();
        let outcome = graph.capture(&stream, CaptureOptions::default(), |_| {
            for _ in 0..2 + self.rng.below(6) {
                self.step_in_capture(index, number, buffer, &mut expected)?;
            }
            Ok(())
        });
        outcome.unwrap();
        self.failing.push(format!("graph {number} is captured"));
        self.model.look_at_suspects(&self.machine);
        self.graphs.push(Captured { number, graph, buffer, expected, replayed_on: Vec::new() });
        self.tally.captures += 1;
    }

    fn step_in_capture(
        &mut self,
        index: usize,
        number: u32,
        buffer: DevicePtr,
        expected: &mut Vec<(u64, u32, u64)>,
    ) -> Result<()> {
        match self.rng.below(8) {
            0..4 => {
                let bytes = self.bytes();
                self.failing.push(format!("  allocate {bytes} in the capture"));
                let block = match self.host.allocate_on(bytes, &self.stream(index)) {
                    Ok(block) => block,
                    Err(Error::PinnedCap(_)) => return Ok(()),
                    Err(error) => return Err(error),
                };
                self.model.gave(&self.machine, &block, bytes, true);
                let mut held = Held::new(block, self.tag());
                self.failing.push(format!("  {:#x} at {:x?}", held.tag, held.range()));
                // Legal in a capture, and done at once.
                write(&held);
                if self.rng.below(4) < 3 && expected.len() as u64 + 2 <= SLOTS {
                    self.failing.push(format!("  the graph reads {:#x}", held.tag));
                    self.copy_in_capture(&held, index, buffer, expected)?;
                    held.block.record_use(&self.stream(index))?;
                    held.graph = Some(number);
                    self.model.of_graphs.push(OfGraph { graph: number, range: held.range(), marks: Vec::new() });
                }
                if self.rng.one_in(2) {
                    self.give_back(held, false);
                } else {
                    self.model.held.push(held);
                }
            }
            4 | 5 => {
                // Past the capture: for somebody else.
                let bytes = self.bytes();
                self.failing.push(format!("  allocate {bytes} beside the capture"));
                let block = match self.host.allocate(bytes) {
                    Ok(block) => block,
                    Err(Error::PinnedCap(_)) => return Ok(()),
                    Err(error) => return Err(error),
                };
                self.model.gave(&self.machine, &block, bytes, true);
                let held = Held::new(block, self.tag());
                write(&held);
                self.model.held.push(held);
            }
            6 => {
                // Something from before the capture goes, with marks in other streams. A mark in this one would be
                // captured.
                let at =
                    self.model.held.iter().position(|held| held.graph.is_none() && !held.recorded.contains(&index));
                if let Some(at) = at {
                    let held = self.model.held.swap_remove(at);
                    self.failing.push(format!("  {:#x} goes, recorded {:?}", held.tag, held.recorded));
                    let (range, drops) = (held.range(), self.rng.one_in(2));
                    let recorded = held.recorded.clone();
                    let marks = self.model.mark(&self.machine, &recorded);
                    if drops {
                        drop(held.block);
                    } else {
                        held.block.free()?;
                    }
                    let behind = self.model.mark(&self.machine, &recorded);
                    self.model.went(range, marks, behind, drops);
                }
            }
            _ => {
                self.failing.push("  reap in the capture".into());
                self.host.process_pending()?;
            }
        }
        Ok(())
    }

    fn copy_in_capture(
        &self,
        held: &Held,
        index: usize,
        buffer: DevicePtr,
        expected: &mut Vec<(u64, u32, u64)>,
    ) -> Result<()> {
        for (offset, len) in parts(held.block.bytes()) {
            let slot = SLOT * expected.len() as u64;
            let from = HostPtr(held.block.ptr().0 + offset);
            self.machine.sim.copy(buffer.offset(slot).into(), from.into(), len, self.machine.streams[index].id())?;
            expected.push((slot, held.tag, len));
        }
        Ok(())
    }

    /// Replays a graph on a stream of its device, behind the last replay.
    pub fn replay(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.rng.below(self.graphs.len());
        let device = self.graphs[at].graph.device().id();
        let of_device = |&index: &usize| self.machine.streams[index].device_id() == device;
        let own: Vec<usize> = (0..self.machine.streams.len()).filter(of_device).collect();
        let index = self.rng.pick(&own);
        let stream = self.stream(index);
        let captured = &mut self.graphs[at];
        self.failing.push(format!("replay graph {} on stream {index}", captured.number));
        if let Some(&last) = captured.replayed_on.last() {
            stream.wait_stream(&self.machine.streams[last]).unwrap();
        }
        captured.graph.replay(&stream).unwrap();
        captured.replayed_on.retain(|&other| other != index);
        captured.replayed_on.push(index);
        self.tally.replays += 1;
        if !self.machine.is_held(index) && self.rng.one_in(2) {
            self.look_at_replay(at);
        }
    }

    /// Waits for the last replay, and looks at what it copied.
    fn look_at_replay(&mut self, at: usize) {
        let captured = &self.graphs[at];
        let Some(&last) = captured.replayed_on.last() else { return };
        self.machine.streams[last].synchronize().unwrap();
        for &(slot, tag, len) in &captured.expected {
            let mut seen = vec![0; usize::try_from(len).expect("a few")];
            self.machine.sim.download(captured.graph.device().id(), captured.buffer.offset(slot), &mut seen).unwrap();
            assert_eq!(
                seen,
                pattern(tag, len),
                "what graph {} copied from the block with tag {tag:#x}",
                captured.number
            );
        }
    }

    /// Gives a graph up: with it goes what it has of pinned memory, once the replays are done.
    pub fn drop_graph(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.rng.below(self.graphs.len());
        let number = self.graphs[at].number;
        // What the program has of its memory goes first. What was freed stays the graph's.
        while let Some(at) = self.model.held.iter().position(|held| held.graph == Some(number)) {
            let mut held = self.model.held.swap_remove(at);
            for stream in std::mem::take(&mut held.readers) {
                self.machine.wait_for(stream);
            }
            self.give_back(held, false);
        }
        if self.rng.one_in(2) {
            self.look_at_replay(at);
        }
        let Captured { mut graph, buffer, replayed_on, .. } = self.graphs.swap_remove(at);
        self.failing.push(format!("graph {number} goes"));
        let streams: BTreeSet<usize> = replayed_on.iter().copied().collect();
        let marks = self.model.mark(&self.machine, &streams);
        self.model.graph_went(number, &marks);
        if self.rng.one_in(2) {
            drop(graph);
        } else {
            graph.reset().unwrap();
        }
        // Waits for the device, and so for the replays, but only now.
        self.machine.sim.mem_free(buffer).unwrap();
    }
}
