//! A launched graph in execution: which nodes are done, which can start, how often bodies of conditional nodes run.
//!
//! It decides what happens next ([`LaunchAction`]); the scheduler does it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::exec_graph::{ExecGraph, ExecNode};
use super::item::{Template, Work};
use super::stream::StreamPoint;
use crate::sim::order::NodeInstance;
use crate::{ConditionalId, ConditionalKind, GraphExecId, StreamId};

/// Kernels whose arguments were replaced since the capture, by the indices of their nodes.
pub type ReplacedKernels = BTreeMap<u32, ReplacedKernel>;

/// A kernel with other arguments than it was captured with.
#[derive(Clone, Debug)]
pub struct ReplacedKernel {
    pub work: Work,
    pub nanos: u64,
    /// The number of the call that replaced the arguments.
    pub replaced_at: u64,
}

/// What happens next in a launch.
#[derive(Debug)]
pub enum LaunchAction {
    /// A node starts. `iterations` is the number of body runs so far.
    Start { node: u32, iterations: u32 },
    /// A conditional node of a loop tests its flag again.
    Retest { node: u32 },
    /// All nodes are done.
    End,
}

/// One launch of an executable graph.
#[derive(Debug)]
pub struct Launch {
    pub exec: GraphExecId,
    pub graph: Arc<ExecGraph>,
    /// Keeps the addresses that its nodes allocate, even if the executable is destroyed first.
    pub template: Arc<Template>,
    kernels: Arc<ReplacedKernels>,
    pub stream: StreamId,
    /// The point of the launch in its stream, shared by all its nodes.
    pub point: StreamPoint,
    pub queued_at: u64,
    pub flags: Vec<(ConditionalId, u32)>,
    /// Released from a paused stream: its nodes take no time.
    pub instant: bool,
    /// For each node, the number of predecessors that are not done.
    pending: Vec<u32>,
    /// For each body, the number of nodes that are not done.
    remaining: Vec<u32>,
    /// For each body, the number of its current run among all runs of bodies.
    iteration: Vec<u32>,
    iterations: u32,
}

impl Launch {
    pub fn new(
        exec: GraphExecId,
        (graph, template, kernels): (Arc<ExecGraph>, Arc<Template>, Arc<ReplacedKernels>),
        stream: StreamId,
        point: StreamPoint,
        queued_at: u64,
    ) -> Self {
        Self {
            exec,
            stream,
            point,
            queued_at,
            flags: graph.flags.clone(),
            pending: vec![0; graph.nodes.len()],
            remaining: vec![0; graph.bodies.len()],
            iteration: vec![0; graph.bodies.len()],
            iterations: 0,
            instant: false,
            graph,
            template,
            kernels,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.graph.nodes.is_empty()
    }

    /// What a node does, and how long that takes by the cost model.
    pub fn work(&self, node: u32) -> (&Work, u64) {
        let captured = self.node(node);
        self.kernels.get(&node).map_or((&captured.work, captured.nanos), |new| (&new.work, new.nanos))
    }

    /// The current execution of a node.
    pub fn instance(&self, node: u32) -> NodeInstance {
        let captured = self.node(node);
        let captured_at = self.kernels.get(&node).map_or(captured.captured_at, |new| new.replaced_at);
        NodeInstance { exec: self.exec, node, iteration: self.iteration[captured.body as usize], captured_at }
    }

    /// Starts the graph, which is not empty.
    pub fn start(&mut self, device_failed: bool) -> Vec<LaunchAction> {
        let mut actions = Vec::new();
        self.start_body(0, device_failed, &mut actions);
        actions
    }

    /// A conditional node has read its flag: its body runs, or it is done. On a failed device no body runs.
    pub fn run_conditional(&mut self, node: u32, flag: ConditionalId, device_failed: bool) -> Vec<LaunchAction> {
        let mut actions = Vec::new();
        let body = self.node(node).conditional_body.expect("a conditional node has a body");
        if self.is_set(flag) && !device_failed {
            self.start_body(body, device_failed, &mut actions);
        } else {
            self.complete_node(node, device_failed, &mut actions);
        }
        actions
    }

    /// A node is done: its successors may start.
    pub fn complete(&mut self, node: u32, device_failed: bool) -> Vec<LaunchAction> {
        let mut actions = Vec::new();
        self.complete_node(node, device_failed, &mut actions);
        actions
    }

    fn start_body(&mut self, body: u32, device_failed: bool, actions: &mut Vec<LaunchAction>) {
        let graph = Arc::clone(&self.graph);
        let nodes = &graph.bodies[body as usize];
        self.remaining[body as usize] = nodes.len() as u32;
        if body != 0 {
            self.iterations += 1;
            self.iteration[body as usize] = self.iterations;
        }
        for &node in nodes {
            self.pending[node as usize] = graph.nodes[node as usize].predecessors;
        }
        if nodes.is_empty() {
            self.finish_body(body, device_failed, actions);
            return;
        }
        let roots = nodes.iter().filter(|&&node| graph.nodes[node as usize].predecessors == 0);
        actions.extend(roots.map(|&node| LaunchAction::Start { node, iterations: self.iterations }));
    }

    fn complete_node(&mut self, node: u32, device_failed: bool, actions: &mut Vec<LaunchAction>) {
        let graph = Arc::clone(&self.graph);
        let ExecNode { body, successors, .. } = &graph.nodes[node as usize];
        let remaining = &mut self.remaining[*body as usize];
        *remaining -= 1;
        let is_body_done = *remaining == 0;
        for &next in successors {
            let pending = &mut self.pending[next as usize];
            *pending -= 1;
            if *pending == 0 {
                actions.push(LaunchAction::Start { node: next, iterations: self.iterations });
            }
        }
        if is_body_done {
            self.finish_body(*body, device_failed, actions);
        }
    }

    fn finish_body(&mut self, body: u32, device_failed: bool, actions: &mut Vec<LaunchAction>) {
        let Some(owner) = self.graph.owner[body as usize] else {
            actions.push(LaunchAction::End);
            return;
        };
        let is_repeated = match self.node(owner).work {
            Work::Conditional { flag, kind: ConditionalKind::While, .. } => self.is_set(flag) && !device_failed,
            _ => false,
        };
        if is_repeated {
            actions.push(LaunchAction::Retest { node: owner });
        } else {
            self.complete_node(owner, device_failed, actions);
        }
    }

    fn is_set(&self, flag: ConditionalId) -> bool {
        self.flags.iter().any(|&(id, value)| id == flag && value != 0)
    }

    fn node(&self, node: u32) -> &ExecNode {
        &self.graph.nodes[node as usize]
    }
}
