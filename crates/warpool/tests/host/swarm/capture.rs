//! Graphs that use pinned memory: captured, replayed on any stream, dropped while replays may be under way.
//!
//! The content that a graph copies is written once, in the capture. Every replay must read it, even after the block was
//! freed.

use std::collections::BTreeSet;

use warpool::driver::{Copies as _, DevicePtr, HostPtr, Memory as _};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::DeviceAllocator;
use warpool::{Error, Result};

use super::devices::{parts, pattern};
use super::model::{GraphMemory, LiveBlock};
use super::program::{Run, write_tag};

const SLOT: u64 = 128;
const SLOTS: u64 = 32;

/// A graph, the buffer that it copies to, and its expected content after a replay.
pub struct Captured {
    number: u32,
    graph: Graph,
    buffer: DevicePtr,
    expected: Vec<(u64, u32, u64)>,
    /// Streams that it was replayed on. The next replay waits for the last one.
    replayed_on: Vec<usize>,
}

impl Run<'_> {
    /// Captures copies from pinned memory, while other memory is allocated and freed.
    pub fn capture(&mut self) {
        let running: Vec<usize> =
            (0..self.devices.streams.len()).filter(|&index| !self.devices.is_paused(index)).collect();
        if running.is_empty() || self.graphs.len() >= 4 {
            return;
        }
        let index = self.rng.pick(&running);
        let (stream, number) = (self.stream(index), self.next_graph);
        self.next_graph += 1;
        self.failing.push(format!("capture graph {number} on stream {index}"));
        let buffer = self.devices.sim.mem_alloc(stream.device_id(), SLOT * SLOTS).unwrap();
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
        self.model.check_deferred(&self.devices);
        self.graphs.push(Captured { number, graph, buffer, expected, replayed_on: Vec::new() });
        self.counts.captures += 1;
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
                self.model.allocated(&self.devices, &block, bytes, true);
                let mut live = LiveBlock::new(block, self.tag());
                self.failing.push(format!("  {:#x} at {:x?}", live.tag, live.range()));
                // Host writes are allowed in a capture.
                write_tag(&live);
                if self.rng.below(4) < 3 && expected.len() as u64 + 2 <= SLOTS {
                    self.failing.push(format!("  the graph reads {:#x}", live.tag));
                    self.copy_in_capture(&live, index, buffer, expected)?;
                    live.block.record_use(&self.stream(index))?;
                    live.graph = Some(number);
                    self.model.graph_memory.push(GraphMemory {
                        graph: number,
                        range: live.range(),
                        events: Vec::new(),
                    });
                }
                if self.rng.one_in(2) {
                    self.free(live, false);
                } else {
                    self.model.live.push(live);
                }
            }
            4 | 5 => {
                // Outside of the capture.
                let bytes = self.bytes();
                self.failing.push(format!("  allocate {bytes} outside of the capture"));
                let block = match self.host.allocate(bytes) {
                    Ok(block) => block,
                    Err(Error::PinnedCap(_)) => return Ok(()),
                    Err(error) => return Err(error),
                };
                self.model.allocated(&self.devices, &block, bytes, true);
                let live = LiveBlock::new(block, self.tag());
                write_tag(&live);
                self.model.live.push(live);
            }
            6 => {
                // A block from before the capture is freed, with events in other streams. One in this stream would be
                // captured.
                let at =
                    self.model.live.iter().position(|live| live.graph.is_none() && !live.recorded.contains(&index));
                if let Some(at) = at {
                    let live = self.model.live.swap_remove(at);
                    self.failing.push(format!("  free {:#x}, recorded {:?}", live.tag, live.recorded));
                    let (range, drops) = (live.range(), self.rng.one_in(2));
                    let recorded = live.recorded.clone();
                    let events = self.model.record_events(&self.devices, &recorded);
                    if drops {
                        drop(live.block);
                    } else {
                        live.block.free()?;
                    }
                    let later_events = self.model.record_events(&self.devices, &recorded);
                    self.model.freed(range, events, later_events, drops);
                }
            }
            _ => {
                self.failing.push("  process pending frees in the capture".into());
                self.host.process_pending()?;
            }
        }
        Ok(())
    }

    fn copy_in_capture(
        &self,
        live: &LiveBlock,
        index: usize,
        buffer: DevicePtr,
        expected: &mut Vec<(u64, u32, u64)>,
    ) -> Result<()> {
        for (offset, len) in parts(live.block.bytes()) {
            let slot = SLOT * expected.len() as u64;
            let from = HostPtr(live.block.ptr().0 + offset);
            self.devices.sim.copy(buffer.offset(slot).into(), from.into(), len, self.devices.streams[index].id())?;
            expected.push((slot, live.tag, len));
        }
        Ok(())
    }

    /// Replays a graph on a stream of its device, after the last replay.
    pub fn replay(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.rng.below(self.graphs.len());
        let device = self.graphs[at].graph.device().id();
        let of_device = |&index: &usize| self.devices.streams[index].device_id() == device;
        let own: Vec<usize> = (0..self.devices.streams.len()).filter(of_device).collect();
        let index = self.rng.pick(&own);
        let stream = self.stream(index);
        let captured = &mut self.graphs[at];
        self.failing.push(format!("replay graph {} on stream {index}", captured.number));
        if let Some(&last) = captured.replayed_on.last() {
            stream.wait_stream(&self.devices.streams[last]).unwrap();
        }
        captured.graph.replay(&stream).unwrap();
        captured.replayed_on.retain(|&other| other != index);
        captured.replayed_on.push(index);
        self.counts.replays += 1;
        if !self.devices.is_paused(index) && self.rng.one_in(2) {
            self.check_replay(at);
        }
    }

    /// Waits for the last replay, and checks what it copied.
    fn check_replay(&mut self, at: usize) {
        let captured = &self.graphs[at];
        let Some(&last) = captured.replayed_on.last() else { return };
        self.devices.streams[last].synchronize().unwrap();
        for &(slot, tag, len) in &captured.expected {
            let mut read = vec![0; usize::try_from(len).expect("a small number")];
            self.devices.sim.download(captured.graph.device().id(), captured.buffer.offset(slot), &mut read).unwrap();
            assert_eq!(
                read,
                pattern(tag, len),
                "what graph {} copied from the block with tag {tag:#x}",
                captured.number
            );
        }
    }

    /// Drops a graph. Its pinned memory is reclaimed once the replays are done.
    pub fn drop_graph(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.rng.below(self.graphs.len());
        let number = self.graphs[at].number;
        // Live blocks of its memory are freed first.
        while let Some(at) = self.model.live.iter().position(|live| live.graph == Some(number)) {
            let mut live = self.model.live.swap_remove(at);
            for stream in std::mem::take(&mut live.readers) {
                self.devices.wait_for(stream);
            }
            self.free(live, false);
        }
        if self.rng.one_in(2) {
            self.check_replay(at);
        }
        let Captured { mut graph, buffer, replayed_on, .. } = self.graphs.swap_remove(at);
        self.failing.push(format!("drop graph {number}"));
        let streams: BTreeSet<usize> = replayed_on.iter().copied().collect();
        let events = self.model.record_events(&self.devices, &streams);
        self.model.graph_dropped(number, &events);
        if self.rng.one_in(2) {
            drop(graph);
        } else {
            graph.reset().unwrap();
        }
        // This waits for the device, and so for the replays.
        self.devices.sim.mem_free(buffer).unwrap();
    }
}
