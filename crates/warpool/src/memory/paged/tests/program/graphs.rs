//! Steps with graphs: captures on one or two streams that allocate and free, launches on any stream, and destruction,
//! also while launches run.

use warpool_driver::{
    CaptureMode, CaptureState, Captures as _, GraphExecId, Graphs as _, InstantiateOptions, Streams as _,
};

use super::super::machine::DEVICE;
use super::blocks::Held;
use super::{Run, STREAMS};
use crate::Stream;
use crate::memory::{DeviceAllocator as _, MemPoolId, PrivatePools as _, Route};

#[derive(Default)]
pub struct Graphs {
    pub all: Vec<Graph>,
    /// The stream of the last launch of a graph, by pool: the next launch waits for it.
    last_launch: Vec<(MemPoolId, Stream)>,
    captured: u64,
}

impl Graphs {
    pub fn were_used(&self) -> bool {
        self.captured > 0
    }
}

/// A captured graph, with its pool and the blocks that it leaves allocated.
pub struct Graph {
    exec: GraphExecId,
    pool: MemPoolId,
    left: Vec<Held>,
    /// Blocks from outside that it reads.
    inputs: Vec<Held>,
}

impl Run<'_> {
    /// Captures a graph on one or two streams that allocates and frees, while other streams go on.
    pub fn capture(&mut self) {
        if self.graphs.all.len() >= 3 {
            return;
        }
        let root = self.machine.streams[self.rng.below(STREAMS)].clone();
        let branch = self.machine.streams[self.rng.below(STREAMS)].clone();
        let shared: Vec<MemPoolId> = self.graphs.all.iter().map(|graph| graph.pool).collect();
        let pool = if !shared.is_empty() && self.rng.one_in(2) {
            let pool = self.rng.pick(&shared);
            self.machine.paged.retain_pool(DEVICE, pool).unwrap();
            pool
        } else {
            self.machine.paged.create_graph_pool(DEVICE).unwrap()
        };
        // Its inputs are written before, in the order of any stream that it is launched on.
        let mut inputs = Vec::new();
        if self.rng.one_in(2)
            && let Some(input) = self.allocate_on(&root, None)
        {
            self.machine.sim.stream_synchronize(root.id()).unwrap();
            inputs.push(input);
        }
        let mode = self.rng.pick(&[CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]);
        self.failing.push(format!("capture on {} and {}, {mode:?}, pool {pool}", root.id(), branch.id()));
        self.machine.paged.capture_began(DEVICE).unwrap();
        self.machine.sim.capture_begin(root.id(), mode).unwrap();
        let CaptureState::Active(capture) = self.machine.sim.capture_state(root.id()).unwrap() else {
            panic!("the stream should capture");
        };
        self.machine.paged.begin_routing(DEVICE, pool, Route::Capture(capture)).unwrap();
        self.capturing = vec![root.clone()];
        if branch != root {
            self.machine.wait(&branch, &root);
            self.capturing.push(branch.clone());
        }
        self.graphs.captured += 1;
        let left = self.body(&inputs);
        self.machine.wait(&root, &branch);
        let graph = self.machine.sim.capture_end(root.id()).unwrap();
        self.failing.push("the capture ends".to_owned());
        self.capturing.clear();
        self.machine.paged.end_routing(DEVICE, pool).unwrap();
        self.machine.paged.capture_ended(DEVICE).unwrap();
        let exec = self.machine.sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
        self.machine.sim.graph_destroy(graph).unwrap();
        self.graphs.all.push(Graph { exec, pool, left, inputs });
        self.tally.captures += 1;
    }

    /// What is captured. Returns the blocks that are allocated at its end.
    fn body(&mut self, inputs: &[Held]) -> Vec<Held> {
        let mut left: Vec<Held> = Vec::new();
        for input in inputs {
            let reader = self.capturing_stream();
            self.machine.check_tag(&input.block, input.tag, &reader);
        }
        for _ in 0..4 + self.rng.below(24) {
            let stream = self.capturing_stream();
            match self.rng.below(12) {
                0..5 => left.extend(self.allocate_on(&stream, None)),
                5 if !left.is_empty() => {
                    let held = left.swap_remove(self.rng.below(left.len()));
                    left.push(if stream == held.stream {
                        self.machine.check_tag(&held.block, held.tag, &stream);
                        held
                    } else {
                        self.use_on(held, &stream)
                    });
                }
                6..9 if !left.is_empty() => {
                    let held = left.swap_remove(self.rng.below(left.len()));
                    self.machine.check_tag(&held.block, held.tag, &held.stream);
                    self.free_unchecked(&held);
                }
                9 => self.allocate(),
                10 => self.free(),
                11 => match self.rng.below(4) {
                    0 => self.trim(),
                    1 => self.use_elsewhere(),
                    _ => self.free(),
                },
                _ => {}
            }
            self.model.check(&self.machine.paged);
        }
        left
    }

    /// One of the streams that capture.
    fn capturing_stream(&mut self) -> Stream {
        self.capturing[self.rng.below(self.capturing.len())].clone()
    }

    /// Launches a graph after the last launch with the same pool, and checks the blocks that it leaves.
    pub fn launch(&mut self) {
        if self.graphs.all.is_empty() {
            return;
        }
        let at = self.rng.below(self.graphs.all.len());
        let stream = self.machine.streams[self.rng.below(STREAMS)].clone();
        let graph = &self.graphs.all[at];
        self.failing.push(format!("launch the graph of pool {} on {}", graph.pool, stream.id()));
        if let Some((_, last)) = self.graphs.last_launch.iter().find(|(pool, _)| *pool == graph.pool) {
            self.machine.wait(&stream, last);
        }
        self.machine.paged.record_pool_uses(DEVICE, graph.pool, &[stream.id()]).unwrap();
        self.machine.sim.graph_launch(graph.exec, stream.id()).unwrap();
        for held in &graph.left {
            self.machine.check_tag(&held.block, held.tag, &stream);
        }
        for input in &graph.inputs {
            self.machine.paged.record_use_raw(input.block.ptr, stream.id()).unwrap();
        }
        let pool = graph.pool;
        self.graphs.last_launch.retain(|(other, _)| *other != pool);
        self.graphs.last_launch.push((pool, stream));
        self.tally.launches += 1;
    }

    /// Destroys a graph, frees its blocks and releases its pool. Its last launch may still run.
    pub fn destroy_graph(&mut self) {
        if self.graphs.all.is_empty() {
            return;
        }
        let graph = self.graphs.all.swap_remove(self.rng.below(self.graphs.all.len()));
        self.failing.push(format!("the graph of pool {} is destroyed", graph.pool));
        if self.rng.one_in(2)
            && let Some((_, last)) = self.graphs.last_launch.iter().find(|(pool, _)| *pool == graph.pool)
        {
            self.machine.sim.stream_synchronize(last.id()).unwrap();
        }
        self.machine.sim.graph_exec_destroy(graph.exec).unwrap();
        for held in graph.inputs {
            self.free_held(held);
        }
        for held in graph.left {
            // Another graph of the same pool may have run since: the contents are unknown.
            self.free_unchecked(&held);
        }
        self.release_pool(graph.pool);
    }
}
