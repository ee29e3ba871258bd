//! A naive model: the order of operations, their conflicts, and the final contents of memory.
//!
//! Every step becomes nodes of an explicit graph with edges from earlier to later calls; each node has the whole set of
//! nodes before it. Two nodes conflict over bytes that both access, one of them writing, if neither is in the other's
//! set. The contents are those of running all nodes in the order of their calls, one of the orders that the edges
//! allow. No code of the simulated driver is used here.

use super::effects::{mix, unroll};
use super::program::{
    ARENA_BYTES, EVENTS, FIXED, GraphPlan, LEGACY, NON_BLOCKING, Operation, POOL_BYTES, STREAMS, Span, Step,
};

/// The maximal number of nodes of a program.
const NODES: usize = 1024;

#[derive(Clone, Copy)]
struct Set([u64; NODES / 64]);

impl Set {
    fn add(&mut self, node: usize) {
        self.0[node / 64] |= 1 << (node % 64);
    }

    fn has(&self, node: usize) -> bool {
        self.0[node / 64] & (1 << (node % 64)) != 0
    }

    fn join(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(mine, theirs)| *mine |= theirs);
    }
}

/// Names an operation: the step, and the node of a launched graph.
pub type Name = (usize, Option<u32>);

/// Outcomes that only the run shows.
#[derive(Clone, Copy, Default)]
pub struct Outcome {
    /// The call was refused.
    pub refused: bool,
    /// The result of a query.
    pub done: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConflictKind {
    /// Two unordered accesses.
    Order,
    /// An access that is not ordered before a free.
    Free,
    /// An access after an allocator freed the bytes; for a launch, also if the bytes were freed since its capture.
    Freed,
    /// An access that the work of the block's new owner is not ordered after.
    Reused,
}

/// A conflict of two operations, or of one with an allocator.
#[derive(Clone)]
pub struct Conflict {
    pub kind: ConflictKind,
    pub first: Name,
    pub second: Name,
    pub span: Span,
    /// The earlier one, for which a wait could be inserted.
    pub wait_for: Option<usize>,
    /// Its branch, within a graph.
    pub branch: Option<usize>,
    /// No wait would help.
    pub unfixable: bool,
}

#[derive(Clone)]
struct Node {
    name: Name,
    before: Set,
    accesses: Vec<(Span, bool)>,
    frees: bool,
    /// The stream and how often it had been replaced; none for the host.
    stream: Option<(usize, usize)>,
}

/// The program so far.
#[derive(Clone)]
pub struct Model {
    nodes: Vec<Node>,
    last: [Option<usize>; STREAMS],
    generations: [usize; STREAMS],
    /// Last nodes of streams that were replaced, and whether they were blocking.
    retired: Vec<(usize, bool)>,
    host: Option<usize>,
    events: [Option<usize>; EVENTS],
    /// Each with its last launch, and the step that captured it.
    graphs: Vec<(GraphPlan, Option<usize>, usize)>,
    /// The step that captured what is being launched.
    captured: Option<usize>,
    freed: Vec<bool>,
    freed_bytes: [bool; ARENA_BYTES as usize],
    /// The last return of each byte.
    last_free: [Option<usize>; ARENA_BYTES as usize],
    memory: Vec<Vec<u8>>,
    step: usize,
    pub conflicts: Vec<Conflict>,
    /// What the host read, by step.
    pub reads: Vec<(usize, Vec<u8>)>,
    /// A step that was refused without a reason.
    pub refused_without_reason: Option<usize>,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            last: [None; STREAMS],
            generations: [0; STREAMS],
            retired: Vec::new(),
            host: None,
            events: [None; EVENTS],
            graphs: Vec::new(),
            captured: None,
            freed: vec![false; FIXED],
            freed_bytes: [false; ARENA_BYTES as usize],
            last_free: [None; ARENA_BYTES as usize],
            memory: vec![vec![0; ARENA_BYTES as usize]; FIXED],
            step: 0,
            conflicts: Vec::new(),
            reads: Vec::new(),
            refused_without_reason: None,
        }
    }
}

impl Model {
    /// The model of a program that has run.
    pub fn of(steps: &[Step], outcomes: &[Outcome]) -> Self {
        let mut model = Self::default();
        for (step, &outcome) in steps.iter().zip(outcomes) {
            model.apply(step, outcome);
        }
        model
    }

    pub fn has_space(&self) -> bool {
        self.nodes.len() < NODES - 160
    }

    pub fn arenas(&self) -> usize {
        self.freed.len()
    }

    pub fn is_freed(&self, arena: usize) -> bool {
        self.freed[arena]
    }

    pub fn live_pools(&self) -> Vec<usize> {
        (FIXED..self.arenas()).filter(|&arena| !self.freed[arena]).collect()
    }

    pub fn graphs(&self) -> usize {
        self.graphs.len()
    }

    pub fn contents(&self, arena: usize) -> &[u8] {
        &self.memory[arena]
    }

    /// Whether the node exists already.
    pub fn has_node(&self, node: usize) -> bool {
        node < self.nodes.len()
    }

    /// The stream of a node, if it was not replaced since.
    pub fn stream_of(&self, node: usize) -> Option<usize> {
        self.nodes[node]
            .stream
            .filter(|&(stream, generation)| self.generations[stream] == generation)
            .map(|(stream, _)| stream)
    }

    pub fn apply(&mut self, step: &Step, outcome: Outcome) {
        match step {
            Step::Work(stream, operation) => self.work(*stream, operation, outcome),
            Step::Record { event, stream } => self.events[*event] = Some(self.queue(*stream, None, &[])),
            Step::Wait { stream, event } => {
                if let Some(recorded) = self.events[*event] {
                    self.queue(*stream, None, &[recorded]);
                }
            }
            Step::EventSync(event) => self.host_waits(self.events[*event]),
            Step::EventQuery(event) if outcome.done => self.host_waits(self.events[*event]),
            Step::StreamSync(stream) => self.host_waits(self.awaited(*stream)),
            Step::StreamQuery(stream) if outcome.done => self.host_waits(self.awaited(*stream)),
            Step::EventQuery(_) | Step::StreamQuery(_) => {}
            Step::DeviceSync => self.host_waits(
                self.last.into_iter().flatten().chain(self.retired.clone().into_iter().map(|(node, _)| node)),
            ),
            Step::HostRead(span) => {
                self.read(span);
                self.host_accesses(*span, false);
            }
            Step::HostWrite(span, value) => {
                self.host_accesses(*span, true);
                self.bytes(span).fill(*value);
            }
            Step::Upload(span, value) => {
                let operation = Operation::Fill { to: *span, value: *value };
                let node = self.queue(LEGACY, Some(&operation), &[]);
                self.host_waits(Some(node));
            }
            Step::Download(span) => {
                self.read(span);
                let node = self.queue(LEGACY, None, &[]);
                self.access(node, *span, false);
                self.host_waits(Some(node));
            }
            Step::PoolAlloc { stream, .. } => {
                let arena = self.arenas();
                self.freed.push(false);
                self.memory.push(vec![0; ARENA_BYTES as usize]);
                let node = self.queue(*stream, None, &[]);
                self.access(node, whole(arena), true);
            }
            Step::PoolFree { arena, stream } => {
                let node = self.queue(*stream, None, &[]);
                self.nodes[node].frees = true;
                self.access(node, whole(*arena), true);
                self.freed[*arena] = true;
            }
            Step::Capture(plan) => self.graphs.push((plan.clone(), None, self.step)),
            Step::Launch { graph, stream } => self.launch(*graph, *stream),
            Step::Suballocate(span, stream) => self.suballocate(*span, *stream),
            Step::FreeSuballocation(span) => {
                let bytes = span.start as usize..(span.start + span.len) as usize;
                self.freed_bytes[bytes.clone()].fill(true);
                self.last_free[bytes].fill(Some(self.step));
            }
            Step::Replace(stream) => {
                self.retired.extend(self.last[*stream].take().map(|node| (node, *stream < NON_BLOCKING)));
                self.generations[*stream] += 1;
            }
        }
        self.step += 1;
    }

    /// The first conflict among the nodes of one graph.
    pub fn within(plan: &GraphPlan) -> Option<Conflict> {
        let mut model = Self::default();
        model.freed.resize(64, false);
        model.memory.resize(64, vec![0; ARENA_BYTES as usize]);
        model.graphs.push((plan.clone(), None, 0));
        model.launch(0, LEGACY);
        let mut conflict = model.conflicts.first().cloned()?;
        // The first node is the begin of the launch, the second the first of the plan.
        let place = conflict.wait_for.expect("a conflict of two nodes") - 1;
        conflict.branch = Some(unroll(plan)[place].branch);
        Some(conflict)
    }

    fn work(&mut self, stream: usize, operation: &Operation, outcome: Outcome) {
        if !outcome.refused {
            self.queue(stream, Some(operation), &[]);
            return;
        }
        // Refused work is in no stream. It must have used memory whose free was queued before.
        let name = (self.step, None);
        let mut reason = false;
        for span in operation.spans() {
            let frees: Vec<usize> = self.frees_of(span).collect();
            for free in frees {
                self.conflict(ConflictKind::Free, free, name, span, true);
                reason = true;
            }
        }
        if !reason {
            self.refused_without_reason = Some(self.step);
        }
    }

    fn launch(&mut self, graph: usize, stream: usize) {
        let (plan, last, captured) = self.graphs[graph].clone();
        self.captured = Some(captured);
        let begin = self.queue(stream, None, last.as_slice());
        let mut places = Vec::new();
        for node in unroll(&plan) {
            let mut preds: Vec<usize> = node.deps.iter().map(|&dep| places[dep]).collect();
            preds.push(begin);
            places.push(self.node((self.step, Some(node.flat)), &preds, self.nodes[begin].stream));
            if let Some(operation) = &node.operation {
                self.perform(places[places.len() - 1], operation);
            }
        }
        places.push(begin);
        let end = self.node((self.step, None), &places, self.nodes[begin].stream);
        self.last[stream] = Some(end);
        self.graphs[graph].1 = Some(end);
        self.captured = None;
    }

    /// What a wait for `stream` waits for.
    fn awaited(&self, stream: usize) -> Vec<usize> {
        let mut nodes: Vec<usize> = self.last[stream].into_iter().collect();
        if stream == LEGACY {
            nodes.extend(self.last[1..NON_BLOCKING].iter().flatten());
            nodes.extend(self.retired.iter().filter(|(_, blocking)| *blocking).map(|(node, _)| node));
        }
        nodes
    }

    /// What work queued in `stream` now is ordered after.
    fn before(&self, stream: usize) -> Vec<usize> {
        let mut preds: Vec<usize> = self.last[stream].into_iter().chain(self.host).collect();
        match stream {
            LEGACY => {
                preds.extend(self.last[1..NON_BLOCKING].iter().flatten());
                preds.extend(self.retired.iter().filter(|(_, blocking)| *blocking).map(|(node, _)| node));
            }
            1..NON_BLOCKING => preds.extend(self.last[LEGACY]),
            _ => {}
        }
        preds
    }

    /// Queues something in a stream.
    fn queue(&mut self, stream: usize, operation: Option<&Operation>, waits: &[usize]) -> usize {
        let mut preds = self.before(stream);
        preds.extend(waits);
        let node = self.node((self.step, None), &preds, Some((stream, self.generations[stream])));
        self.last[stream] = Some(node);
        if let Some(operation) = operation {
            self.perform(node, operation);
        }
        node
    }

    fn host_waits(&mut self, nodes: impl IntoIterator<Item = usize>) {
        let preds: Vec<usize> = nodes.into_iter().chain(self.host).collect();
        self.host = Some(self.node((self.step, None), &preds, None));
    }

    fn host_accesses(&mut self, span: Span, write: bool) {
        self.host_waits([]);
        self.access(self.nodes.len() - 1, span, write);
    }

    fn node(&mut self, name: Name, preds: &[usize], stream: Option<(usize, usize)>) -> usize {
        let mut before = Set([0; NODES / 64]);
        for &pred in preds {
            before.add(pred);
            before.join(&self.nodes[pred].before);
        }
        self.nodes.push(Node { name, before, accesses: Vec::new(), frees: false, stream });
        self.nodes.len() - 1
    }

    fn perform(&mut self, node: usize, operation: &Operation) {
        match *operation {
            Operation::Fill { to, value } => {
                self.access(node, to, true);
                self.bytes(&to).fill(value);
            }
            Operation::Copy { to, from } => {
                self.access(node, from, false);
                self.access(node, to, true);
                let bytes = self.bytes(&from).to_vec();
                self.bytes(&to).copy_from_slice(&bytes);
            }
            Operation::Mix { to, from, salt } => {
                self.access(node, from, false);
                self.access(node, to, true);
                let source = self.bytes(&from).to_vec();
                mix(self.bytes(&to), &source, salt);
            }
        }
    }

    /// Records an access and its conflicts.
    fn access(&mut self, node: usize, span: Span, write: bool) {
        let before = self.nodes[node].before;
        let mut conflicts = Vec::new();
        for (other, earlier) in self.nodes[..node].iter().enumerate() {
            for (theirs, their_write) in &earlier.accesses {
                if theirs.overlaps(&span) && (write || *their_write) && (earlier.frees || !before.has(other)) {
                    let kind =
                        if earlier.frees || self.nodes[node].frees { ConflictKind::Free } else { ConflictKind::Order };
                    conflicts.push((kind, other, common(theirs, &span), earlier.frees));
                }
            }
        }
        let name = self.nodes[node].name;
        for (kind, other, bytes, unfixable) in conflicts {
            self.conflict(kind, other, name, bytes, unfixable);
        }
        let since_capture = |at: usize| self.captured.is_some_and(|captured| self.last_free[at] > Some(captured));
        let is_freed = |at: u64| self.freed_bytes[at as usize] || since_capture(at as usize);
        if span.arena == 0 && (span.start..span.start + span.len).any(is_freed) {
            self.conflicts.push(Conflict {
                kind: ConflictKind::Freed,
                first: name,
                second: name,
                span,
                wait_for: None,
                branch: None,
                unfixable: true,
            });
        }
        self.nodes[node].accesses.push((span, write));
    }

    /// The range is allocated for the next work of `stream`: its earlier users must be before that.
    fn suballocate(&mut self, span: Span, stream: usize) {
        let owner = self.node((self.step, None), &self.before(stream), None);
        let before = self.nodes[owner].before;
        for other in 0..owner {
            let accesses: Vec<Span> = self.nodes[other].accesses.iter().map(|&(theirs, _)| theirs).collect();
            for theirs in accesses.into_iter().filter(|theirs| theirs.overlaps(&span) && !before.has(other)) {
                self.conflict(ConflictKind::Reused, other, (self.step, None), common(&theirs, &span), false);
            }
        }
        self.freed_bytes[span.start as usize..(span.start + span.len) as usize].fill(false);
    }

    fn conflict(&mut self, kind: ConflictKind, first: usize, second: Name, span: Span, unfixable: bool) {
        let (wait_for, first) = (Some(first), self.nodes[first].name);
        self.conflicts.push(Conflict { kind, first, second, span, wait_for, branch: None, unfixable });
    }

    fn frees_of(&self, span: Span) -> impl Iterator<Item = usize> {
        let freed = move |node: &Node| node.frees && node.accesses.iter().any(|(theirs, _)| theirs.overlaps(&span));
        self.nodes.iter().enumerate().filter(move |(_, node)| freed(node)).map(|(at, _)| at)
    }

    fn read(&mut self, span: &Span) {
        let bytes = self.bytes(span).to_vec();
        self.reads.push((self.step, bytes));
    }

    fn bytes(&mut self, span: &Span) -> &mut [u8] {
        &mut self.memory[span.arena][span.start as usize..(span.start + span.len) as usize]
    }
}

/// A whole pool allocation.
fn whole(arena: usize) -> Span {
    Span { arena, view: 0, start: 0, len: POOL_BYTES }
}

fn common(a: &Span, b: &Span) -> Span {
    let (start, end) = (a.start.max(b.start), (a.start + a.len).min(b.start + b.len));
    Span { start, len: end - start, ..*b }
}
