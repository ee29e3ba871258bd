//! The judge: a naive account of who comes before whom, who clashes with whom, and what memory holds in the end.
//!
//! Every step becomes nodes of an explicit graph whose edges lead from earlier to later calls; each node carries the
//! whole set of nodes before it. Two nodes clash over bytes that both touch, one of them writing, if neither is in the
//! other's set. Contents are those of running all nodes in the order of their calls, which is one of the orders that
//! the edges allow. Nothing of the simulated device is used here.

use super::effect::{mix, unroll};
use super::program::{
    ARENA_BYTES, Act, EVENTS, FIXED, GraphPlan, LEGACY, NON_BLOCKING, POOL_BYTES, STREAMS, Span, Step,
};

/// The most nodes of a program.
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

/// What only the run itself shows.
#[derive(Clone, Copy, Default)]
pub struct Outcome {
    /// The call was refused.
    pub refused: bool,
    /// What a query answered.
    pub done: bool,
}

/// What a quarrel is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// Two accesses without order.
    Order,
    /// An access and a free that it is not before.
    Free,
    /// An access behind the return to an allocator: of a launch also if it was captured before, whoever has the bytes
    /// now.
    Returned,
    /// An access that a new owner is not behind.
    HandedOut,
}

/// Two that clash, or one with an allocator.
#[derive(Clone)]
pub struct Quarrel {
    pub about: About,
    pub first: Name,
    pub second: Name,
    pub span: Span,
    /// The earlier one, which could be waited for.
    pub wait_for: Option<usize>,
    /// Its branch, within a graph.
    pub branch: Option<usize>,
    /// No wait would help.
    pub hopeless: bool,
}

#[derive(Clone)]
struct Node {
    name: Name,
    before: Set,
    touches: Vec<(Span, bool)>,
    frees: bool,
    /// The stream and how often it had been replaced; none for the host.
    stream: Option<(usize, usize)>,
}

/// The state of a program so far.
#[derive(Clone)]
pub struct Judge {
    nodes: Vec<Node>,
    last: [Option<usize>; STREAMS],
    lives: [usize; STREAMS],
    /// Last nodes of streams that were replaced, and whether they were blocking.
    orphans: Vec<(usize, bool)>,
    host: Option<usize>,
    events: [Option<usize>; EVENTS],
    /// Each with its last launch, and the step that captured it.
    graphs: Vec<(GraphPlan, Option<usize>, usize)>,
    /// The step that captured what is being launched.
    captured: Option<usize>,
    freed: Vec<bool>,
    returned: [bool; ARENA_BYTES as usize],
    /// The last return of each byte.
    last_return: [Option<usize>; ARENA_BYTES as usize],
    memory: Vec<Vec<u8>>,
    step: usize,
    pub quarrels: Vec<Quarrel>,
    /// What the host read, by step.
    pub reads: Vec<(usize, Vec<u8>)>,
    /// A step was refused that should not have been.
    pub wrongly_refused: Option<usize>,
}

impl Default for Judge {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            last: [None; STREAMS],
            lives: [0; STREAMS],
            orphans: Vec::new(),
            host: None,
            events: [None; EVENTS],
            graphs: Vec::new(),
            captured: None,
            freed: vec![false; FIXED],
            returned: [false; ARENA_BYTES as usize],
            last_return: [None; ARENA_BYTES as usize],
            memory: vec![vec![0; ARENA_BYTES as usize]; FIXED],
            step: 0,
            quarrels: Vec::new(),
            reads: Vec::new(),
            wrongly_refused: None,
        }
    }
}

impl Judge {
    /// The whole account of a program that has run.
    pub fn of(steps: &[Step], outcomes: &[Outcome]) -> Self {
        let mut judge = Self::default();
        for (step, &outcome) in steps.iter().zip(outcomes) {
            judge.apply(step, outcome);
        }
        judge
    }

    pub fn has_room(&self) -> bool {
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

    /// Whether there is such a node already.
    pub fn knows(&self, node: usize) -> bool {
        node < self.nodes.len()
    }

    /// The stream of a node, if it is still the same.
    pub fn stream_of(&self, node: usize) -> Option<usize> {
        self.nodes[node].stream.filter(|&(stream, life)| self.lives[stream] == life).map(|(stream, _)| stream)
    }

    pub fn apply(&mut self, step: &Step, outcome: Outcome) {
        match step {
            Step::Work(stream, act) => self.work(*stream, act, outcome),
            Step::Record { event, stream } => self.events[*event] = Some(self.queue(*stream, None, &[])),
            Step::Wait { stream, event } => {
                if let Some(mark) = self.events[*event] {
                    self.queue(*stream, None, &[mark]);
                }
            }
            Step::EventSync(event) => self.host_learns(self.events[*event]),
            Step::EventQuery(event) if outcome.done => self.host_learns(self.events[*event]),
            Step::StreamSync(stream) => self.host_learns(self.awaited(*stream)),
            Step::StreamQuery(stream) if outcome.done => self.host_learns(self.awaited(*stream)),
            Step::EventQuery(_) | Step::StreamQuery(_) => {}
            Step::DeviceSync => self.host_learns(
                self.last.into_iter().flatten().chain(self.orphans.clone().into_iter().map(|(node, _)| node)),
            ),
            Step::HostRead(span) => {
                self.read(span);
                self.host_touches(*span, false);
            }
            Step::HostWrite(span, value) => {
                self.host_touches(*span, true);
                self.bytes(span).fill(*value);
            }
            Step::Upload(span, value) => {
                let act = Act::Fill { to: *span, value: *value };
                let node = self.queue(LEGACY, Some(&act), &[]);
                self.host_learns(Some(node));
            }
            Step::Download(span) => {
                self.read(span);
                let node = self.queue(LEGACY, None, &[]);
                self.touch(node, *span, false);
                self.host_learns(Some(node));
            }
            Step::PoolAlloc { stream, .. } => {
                let arena = self.arenas();
                self.freed.push(false);
                self.memory.push(vec![0; ARENA_BYTES as usize]);
                let node = self.queue(*stream, None, &[]);
                self.touch(node, whole(arena), true);
            }
            Step::PoolFree { arena, stream } => {
                let node = self.queue(*stream, None, &[]);
                self.nodes[node].frees = true;
                self.touch(node, whole(*arena), true);
                self.freed[*arena] = true;
            }
            Step::Capture(plan) => self.graphs.push((plan.clone(), None, self.step)),
            Step::Launch { graph, stream } => self.launch(*graph, *stream),
            Step::HandOut(span, stream) => self.hand_out(*span, *stream),
            Step::Return(span) => {
                let bytes = span.start as usize..(span.start + span.len) as usize;
                self.returned[bytes.clone()].fill(true);
                self.last_return[bytes].fill(Some(self.step));
            }
            Step::Replace(stream) => {
                self.orphans.extend(self.last[*stream].take().map(|node| (node, *stream < NON_BLOCKING)));
                self.lives[*stream] += 1;
            }
        }
        self.step += 1;
    }

    /// The first clash among the nodes of one graph.
    pub fn within(plan: &GraphPlan) -> Option<Quarrel> {
        let mut judge = Self::default();
        judge.freed.resize(64, false);
        judge.memory.resize(64, vec![0; ARENA_BYTES as usize]);
        judge.graphs.push((plan.clone(), None, 0));
        judge.launch(0, LEGACY);
        let mut quarrel = judge.quarrels.first().cloned()?;
        // The first two nodes of the launch's account are its beginning and the first of the plan.
        let place = quarrel.wait_for.expect("a clash of two nodes") - 1;
        quarrel.branch = Some(unroll(plan)[place].branch);
        Some(quarrel)
    }

    fn work(&mut self, stream: usize, act: &Act, outcome: Outcome) {
        if !outcome.refused {
            self.queue(stream, Some(act), &[]);
            return;
        }
        // Refused work is in no stream; it must have been for memory whose free was queued before.
        let name = (self.step, None);
        let mut reason = false;
        for span in act.spans() {
            let frees: Vec<usize> = self.frees_of(span).collect();
            for free in frees {
                self.quarrel(About::Free, free, name, span, true);
                reason = true;
            }
        }
        if !reason {
            self.wrongly_refused = Some(self.step);
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
            if let Some(act) = &node.act {
                self.perform(places[places.len() - 1], act);
            }
        }
        places.push(begin);
        let end = self.node((self.step, None), &places, self.nodes[begin].stream);
        self.last[stream] = Some(end);
        self.graphs[graph].1 = Some(end);
        self.captured = None;
    }

    /// What waiting for `stream` waits for.
    fn awaited(&self, stream: usize) -> Vec<usize> {
        let mut nodes: Vec<usize> = self.last[stream].into_iter().collect();
        if stream == LEGACY {
            nodes.extend(self.last[1..NON_BLOCKING].iter().flatten());
            nodes.extend(self.orphans.iter().filter(|(_, blocking)| *blocking).map(|(node, _)| node));
        }
        nodes
    }

    /// What work queued in `stream` now would come after.
    fn before(&self, stream: usize) -> Vec<usize> {
        let mut preds: Vec<usize> = self.last[stream].into_iter().chain(self.host).collect();
        match stream {
            LEGACY => {
                preds.extend(self.last[1..NON_BLOCKING].iter().flatten());
                preds.extend(self.orphans.iter().filter(|(_, blocking)| *blocking).map(|(node, _)| node));
            }
            1..NON_BLOCKING => preds.extend(self.last[LEGACY]),
            _ => {}
        }
        preds
    }

    /// Queues something in a stream.
    fn queue(&mut self, stream: usize, act: Option<&Act>, waits: &[usize]) -> usize {
        let mut preds = self.before(stream);
        preds.extend(waits);
        let node = self.node((self.step, None), &preds, Some((stream, self.lives[stream])));
        self.last[stream] = Some(node);
        if let Some(act) = act {
            self.perform(node, act);
        }
        node
    }

    fn host_learns(&mut self, nodes: impl IntoIterator<Item = usize>) {
        let preds: Vec<usize> = nodes.into_iter().chain(self.host).collect();
        self.host = Some(self.node((self.step, None), &preds, None));
    }

    fn host_touches(&mut self, span: Span, write: bool) {
        self.host_learns([]);
        self.touch(self.nodes.len() - 1, span, write);
    }

    fn node(&mut self, name: Name, preds: &[usize], stream: Option<(usize, usize)>) -> usize {
        let mut before = Set([0; NODES / 64]);
        for &pred in preds {
            before.add(pred);
            before.join(&self.nodes[pred].before);
        }
        self.nodes.push(Node { name, before, touches: Vec::new(), frees: false, stream });
        self.nodes.len() - 1
    }

    fn perform(&mut self, node: usize, act: &Act) {
        match *act {
            Act::Fill { to, value } => {
                self.touch(node, to, true);
                self.bytes(&to).fill(value);
            }
            Act::Copy { to, from } => {
                self.touch(node, from, false);
                self.touch(node, to, true);
                let bytes = self.bytes(&from).to_vec();
                self.bytes(&to).copy_from_slice(&bytes);
            }
            Act::Mix { to, from, salt } => {
                self.touch(node, from, false);
                self.touch(node, to, true);
                let source = self.bytes(&from).to_vec();
                mix(self.bytes(&to), &source, salt);
            }
        }
    }

    /// Notes an access, and whom it clashes with.
    fn touch(&mut self, node: usize, span: Span, write: bool) {
        let before = self.nodes[node].before;
        let mut clashes = Vec::new();
        for (other, earlier) in self.nodes[..node].iter().enumerate() {
            for (theirs, their_write) in &earlier.touches {
                if theirs.overlaps(&span) && (write || *their_write) && (earlier.frees || !before.has(other)) {
                    let about = if earlier.frees || self.nodes[node].frees { About::Free } else { About::Order };
                    clashes.push((about, other, common(theirs, &span), earlier.frees));
                }
            }
        }
        let name = self.nodes[node].name;
        for (about, other, bytes, hopeless) in clashes {
            self.quarrel(about, other, name, bytes, hopeless);
        }
        let since_capture = |at: usize| self.captured.is_some_and(|captured| self.last_return[at] > Some(captured));
        let gone = |at: u64| self.returned[at as usize] || since_capture(at as usize);
        if span.arena == 0 && (span.start..span.start + span.len).any(gone) {
            self.quarrels.push(Quarrel {
                about: About::Returned,
                first: name,
                second: name,
                span,
                wait_for: None,
                branch: None,
                hopeless: true,
            });
        }
        self.nodes[node].touches.push((span, write));
    }

    /// The range belongs to `stream`'s next work: who used it before must be before that.
    fn hand_out(&mut self, span: Span, stream: usize) {
        let owner = self.node((self.step, None), &self.before(stream), None);
        let before = self.nodes[owner].before;
        for other in 0..owner {
            let touches: Vec<Span> = self.nodes[other].touches.iter().map(|&(theirs, _)| theirs).collect();
            for theirs in touches.into_iter().filter(|theirs| theirs.overlaps(&span) && !before.has(other)) {
                self.quarrel(About::HandedOut, other, (self.step, None), common(&theirs, &span), false);
            }
        }
        self.returned[span.start as usize..(span.start + span.len) as usize].fill(false);
    }

    fn quarrel(&mut self, about: About, first: usize, second: Name, span: Span, hopeless: bool) {
        let (wait_for, first) = (Some(first), self.nodes[first].name);
        self.quarrels.push(Quarrel { about, first, second, span, wait_for, branch: None, hopeless });
    }

    fn frees_of(&self, span: Span) -> impl Iterator<Item = usize> {
        let freed = move |node: &Node| node.frees && node.touches.iter().any(|(theirs, _)| theirs.overlaps(&span));
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

/// All of a pool's allocation.
fn whole(arena: usize) -> Span {
    Span { arena, view: 0, start: 0, len: POOL_BYTES }
}

fn common(a: &Span, b: &Span) -> Span {
    let (start, end) = (a.start.max(b.start), (a.start + a.len).min(b.start + b.len));
    Span { start, len: end - start, ..*b }
}
