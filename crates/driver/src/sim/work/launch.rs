//! A launched graph on its way: its nodes run in the order of their edges, bodies of conditional nodes as often as
//! their flags say.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::sim::cost;
use crate::sim::order::{Frontier, Point, Stamp};
use crate::sim::work::{Callback, ExecGraph, Runner, Scene, Template, Work};
use crate::sim::world::World;
use crate::{ConditionalId, ConditionalKind, GraphExecId, StreamId};

/// Kernels that run instead of those that were captured, by the places of their nodes.
pub type Kernels = BTreeMap<u32, NewKernel>;

/// A kernel with other arguments than it was captured with.
#[derive(Clone, Debug)]
pub struct NewKernel {
    pub work: Work,
    pub nanos: u64,
    /// The number of the call that gave it its arguments.
    pub at: u64,
}

/// One launch of an executable.
#[derive(Debug)]
pub struct Launch {
    pub exec: GraphExecId,
    pub graph: Arc<ExecGraph>,
    /// Keeps the addresses that its nodes allocate, also if the executable goes first.
    pub template: Arc<Template>,
    kernels: Arc<Kernels>,
    pub stream: StreamId,
    /// The place of the launch in its stream: all its nodes share it.
    pub stamp: Stamp,
    pub at: u64,
    pub base: Arc<Frontier>,
    pub flags: Vec<(ConditionalId, u32)>,
    /// For each node, how many before it are not done.
    preds: Vec<u32>,
    /// For each body, how many nodes are not done.
    left: Vec<u32>,
    /// For each body, the number of its current run.
    run: Vec<u32>,
    runs: u32,
    /// Let through by hand: its nodes take no time.
    pub hurried: bool,
}

impl Launch {
    pub fn new(
        exec: GraphExecId,
        (graph, template, kernels): (&Arc<ExecGraph>, Arc<Template>, Arc<Kernels>),
        stream: StreamId,
        stamp: Stamp,
        at: u64,
        base: Arc<Frontier>,
    ) -> Self {
        Self {
            exec,
            stream,
            stamp,
            at,
            base,
            flags: graph.flags.clone(),
            preds: vec![0; graph.nodes.len()],
            left: vec![0; graph.bodies.len()],
            run: vec![0; graph.bodies.len()],
            runs: 0,
            hurried: false,
            graph: Arc::clone(graph),
            template,
            kernels,
        }
    }

    fn flag(&self, flag: ConditionalId) -> bool {
        self.flags.iter().any(|&(id, value)| id == flag && value != 0)
    }
}

impl World {
    /// The launch is the first of its stream: it begins.
    pub fn start_launch(&mut self, launch: u64, now: u64) {
        self.start_body(launch, 0, now);
    }

    /// Whether a launch has nothing to do.
    pub fn is_empty_launch(&self, launch: u64) -> bool {
        self.launches.get(&launch).is_none_or(|state| state.graph.nodes.is_empty())
    }

    /// A launch is over. Returns its stream.
    pub fn end_launch(&mut self, launch: u64) -> StreamId {
        let Launch { stream, template, .. } = self.launches.remove(&launch).expect("a launch under way");
        self.release_template(template);
        stream
    }

    fn launch(&mut self, launch: u64) -> &mut Launch {
        self.launches.get_mut(&launch).expect("a launch under way")
    }

    fn start_body(&mut self, launch: u64, body: u32, now: u64) {
        let state = self.launch(launch);
        let graph = Arc::clone(&state.graph);
        let nodes = &graph.bodies[body as usize];
        state.left[body as usize] = nodes.len() as u32;
        if body != 0 {
            state.runs += 1;
            state.run[body as usize] = state.runs;
        }
        for &node in nodes {
            state.preds[node as usize] = graph.nodes[node as usize].preds;
        }
        if nodes.is_empty() {
            self.finish_body(launch, body, now);
            return;
        }
        for &node in nodes.iter().filter(|&&node| graph.nodes[node as usize].preds == 0) {
            self.start_node(launch, node, now);
        }
    }

    fn start_node(&mut self, launch: u64, node: u32, now: u64) {
        let seed = self.config.seed;
        let state = self.launch(launch);
        let graph = Arc::clone(&state.graph);
        let Stamp { lane, seq } = state.stamp;
        // The number of the run is part of the draw, so that the rounds of a loop differ.
        let place = (u64::from(state.runs) << 32) + u64::from(node) + 2;
        let luck = cost::draw(seed, u64::from(lane), seq, place);
        let this = &graph.nodes[node as usize];
        let kernels = Arc::clone(&state.kernels);
        let (work, nanos) = kernels.get(&node).map_or((&this.work, this.nanos), |new| (&new.work, new.nanos));
        let nanos = if state.hurried { 0 } else { self.lasting(work, nanos, luck) };
        self.run(Runner::Node(launch, node), now.saturating_add(nanos), luck);
    }

    /// A node has ended: it takes effect.
    pub fn finish_node(&mut self, launch: u64, node: u32, now: u64) {
        let state = self.launches.get_mut(&launch).expect("a launch under way");
        let graph = Arc::clone(&state.graph);
        let this = &graph.nodes[node as usize];
        let kernels = Arc::clone(&state.kernels);
        let (work, captured_at) = kernels.get(&node).map_or((&this.work, this.at), |new| (&new.work, new.at));
        match work {
            Work::Callback(run) => {
                let runner = Runner::Node(launch, node);
                self.callbacks.push_back(Callback { run: Arc::clone(run), runner, time: now });
            }
            Work::Conditional { flag, .. } => {
                let body = this.runs.expect("a conditional has a body");
                let broken = self.devices[graph.device.0 as usize].broken.is_some();
                if self.launch(launch).flag(*flag) && !broken {
                    self.start_body(launch, body, now);
                } else {
                    self.complete_node(launch, node, now);
                }
            }
            work => {
                let point = Point { exec: state.exec, node, run: state.run[this.body as usize], captured_at };
                let base = Arc::clone(&state.base);
                let scene = Scene {
                    device: graph.device,
                    stream: state.stream,
                    stamp: state.stamp,
                    at: state.at,
                    base: &base,
                    graph: Some((&graph, point)),
                    now,
                };
                let mut flags = std::mem::take(&mut state.flags);
                self.perform(work, &scene, &mut flags);
                self.launch(launch).flags = flags;
                self.complete_node(launch, node, now);
            }
        }
    }

    /// A node is done: those behind it may go on.
    pub fn complete_node(&mut self, launch: u64, node: u32, now: u64) {
        let state = self.launch(launch);
        let graph = Arc::clone(&state.graph);
        let this = &graph.nodes[node as usize];
        state.left[this.body as usize] -= 1;
        let body_done = state.left[this.body as usize] == 0;
        let mut ready = Vec::new();
        for &next in &this.succs {
            let preds = &mut state.preds[next as usize];
            *preds -= 1;
            if *preds == 0 {
                ready.push(next);
            }
        }
        for next in ready {
            self.start_node(launch, next, now);
        }
        if body_done {
            self.finish_body(launch, this.body, now);
        }
    }

    /// All nodes of a body are done.
    fn finish_body(&mut self, launch: u64, body: u32, now: u64) {
        let graph = Arc::clone(&self.launch(launch).graph);
        let Some(owner) = graph.owner[body as usize] else {
            let stream = self.end_launch(launch);
            self.stream_mut(stream).queue.pop_front();
            self.complete(stream, now);
            return;
        };
        let again = match graph.nodes[owner as usize].work {
            Work::Conditional { flag, kind: ConditionalKind::While, .. } => {
                self.launch(launch).flag(flag) && self.devices[graph.device.0 as usize].broken.is_none()
            }
            _ => false,
        };
        if again {
            // Through the heap, so that an empty body that never ends does not hold up the host for ever within one
            // call.
            self.run(Runner::Node(launch, owner), now.saturating_add(self.config.work.conditional), 0);
        } else {
            self.complete_node(launch, owner, now);
        }
    }
}
