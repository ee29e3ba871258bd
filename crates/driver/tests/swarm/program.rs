//! Random programs and their generation. `display.rs` prints them.
//!
//! A program is generated step by step. Before a step that would conflict with earlier work, waits are inserted: always
//! in a careful program, so that it is correct by construction, and only sometimes in a careless one. The model says
//! where they are missing.

use super::model::{Conflict, Model, Outcome};
use fastrand::Rng;

/// The legacy default stream, the per-thread one, and the first non-blocking one; those before it are blocking.
pub const LEGACY: usize = 0;
pub const PER_THREAD: usize = 1;
pub const NON_BLOCKING: usize = 4;
pub const STREAMS: usize = 8;
pub const EVENTS: usize = 4;
/// Memory: a plain allocation, one mapped at two addresses, a pinned one; after these, allocations of pools.
pub const PLAIN: usize = 0;
pub const MAPPED: usize = 1;
pub const PINNED: usize = 2;
pub const FIXED: usize = 3;
pub const ARENA_BYTES: u64 = 48;
/// The size of a pool allocation; only its first [`ARENA_BYTES`] are used.
pub const POOL_BYTES: u64 = 512;

/// A random condition with the given probability.
fn percent(rng: &mut Rng, chance: usize) -> bool {
    rng.usize(..100) < chance
}

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.usize(..from.len())]
}

/// Bytes of an arena, through one of its addresses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub arena: usize,
    pub view: usize,
    pub start: u64,
    pub len: u64,
}

impl Span {
    pub fn overlaps(&self, other: &Self) -> bool {
        self.arena == other.arena && self.start < other.start + other.len && other.start < self.start + self.len
    }
}

/// The effect of a step on memory.
#[derive(Clone, Copy)]
pub enum Operation {
    Fill {
        to: Span,
        value: u8,
    },
    Copy {
        to: Span,
        from: Span,
    },
    /// A kernel that reads both and writes the first.
    Mix {
        to: Span,
        from: Span,
        salt: u32,
    },
}

/// One call of a capture. Branches are streams; the capture begins on the first.
#[derive(Clone)]
pub enum GraphStep {
    Work(usize, Operation),
    Record {
        event: usize,
        branch: usize,
    },
    Wait {
        branch: usize,
        event: usize,
    },
    /// A fill of the counter, then a conditional node; its body counts down and does its operations in order.
    Conditional {
        branch: usize,
        is_while: bool,
        runs: u32,
        body: Vec<Operation>,
    },
}

/// The capture of a graph.
#[derive(Clone)]
pub struct GraphPlan {
    pub branches: Vec<usize>,
    pub mode: usize,
    pub steps: Vec<GraphStep>,
}

/// One step of a program: one call, except for captures and replaced streams.
#[derive(Clone)]
pub enum Step {
    Work(usize, Operation),
    Record {
        event: usize,
        stream: usize,
    },
    Wait {
        stream: usize,
        event: usize,
    },
    EventSync(usize),
    EventQuery(usize),
    StreamSync(usize),
    StreamQuery(usize),
    DeviceSync,
    HostRead(Span),
    HostWrite(Span, u8),
    Upload(Span, u8),
    Download(Span),
    PoolAlloc {
        arena: usize,
        stream: usize,
    },
    PoolFree {
        arena: usize,
        stream: usize,
    },
    Capture(GraphPlan),
    Launch {
        graph: usize,
        stream: usize,
    },
    Suballocate(Span, usize),
    FreeSuballocation(Span),
    /// Destroys the stream with its work, and creates a new one.
    Replace(usize),
}

/// A whole program.
pub struct Program {
    pub seed: u64,
    /// The percentage of missing waits that are inserted.
    pub care: usize,
    pub steps: Vec<Step>,
    /// How many arenas there are in the end.
    pub arenas: usize,
}

impl Program {
    pub fn generate(seed: u64) -> Self {
        Generator::new(seed).generate()
    }
}

struct Generator {
    rng: Rng,
    seed: u64,
    care: usize,
    suballocates: bool,
    model: Model,
    steps: Vec<Step>,
    streams: Vec<usize>,
}

impl Generator {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let care = if percent(&mut rng, 50) { 100 } else { pick(&mut rng, &[0, 50, 80, 95]) };
        let suballocates = percent(&mut rng, 25);
        // With few streams, conflicts are more frequent.
        let count = 2 + rng.usize(..5);
        let streams = (0..count).map(|_| rng.usize(..STREAMS)).collect();
        Self { rng, seed, care, suballocates, model: Model::default(), steps: Vec::new(), streams }
    }

    fn generate(mut self) -> Program {
        let length = 5 + self.rng.usize(..30);
        while self.steps.len() < length && self.model.has_space() {
            let step = self.step();
            self.add(step);
        }
        let Self { seed, care, steps, model, .. } = self;
        assert!(care < 100 || model.conflicts.is_empty(), "seed {seed}: a careful program is correct");
        Program { seed, care, steps, arenas: model.arenas() }
    }

    fn stream(&mut self) -> usize {
        let streams = self.streams.clone();
        pick(&mut self.rng, &streams)
    }

    fn step(&mut self) -> Step {
        let (stream, event) = (self.stream(), self.rng.usize(..EVENTS));
        match self.rng.usize(..100) {
            0..45 => Step::Work(stream, self.operation()),
            45..50 => Step::Record { event, stream },
            50..55 => Step::Wait { stream, event },
            55..57 => Step::EventSync(event),
            57..59 => Step::EventQuery(event),
            59..61 => Step::StreamSync(stream),
            61..63 => Step::StreamQuery(stream),
            63 => Step::DeviceSync,
            64..67 => Step::HostRead(self.span_of(PINNED)),
            67..70 => Step::HostWrite(self.span_of(PINNED), self.rng.u64(..) as u8),
            70..72 => Step::Upload(self.span_of(PLAIN), self.rng.u64(..) as u8),
            72..74 => Step::Download(self.span_of(MAPPED)),
            74..77 => Step::PoolAlloc { arena: self.model.arenas(), stream },
            77..80 => match self.model.live_pools().as_slice() {
                [] => Step::DeviceSync,
                live => Step::PoolFree { arena: pick(&mut self.rng, live), stream },
            },
            80..84 => Step::Capture(self.graph()),
            84..93 => match self.model.graphs() {
                0 => Step::Work(stream, self.operation()),
                graphs => Step::Launch { graph: self.rng.usize(..graphs), stream },
            },
            93..96 if self.suballocates => Step::Suballocate(self.span_of(PLAIN), stream),
            96..98 if self.suballocates => Step::FreeSuballocation(self.span_of(PLAIN)),
            98 if stream > PER_THREAD => Step::Replace(stream),
            _ => Step::Work(stream, self.operation()),
        }
    }

    /// Adds a step, after the waits that it needs, if the program is careful.
    fn add(&mut self, step: Step) {
        for _ in 0..64 {
            let mut trial = self.model.clone();
            trial.apply(&step, Outcome::default());
            let Some(conflict) = trial.conflicts.get(self.model.conflicts.len()).cloned() else { break };
            let is_own = conflict.wait_for.is_some_and(|node| !self.model.has_node(node));
            if is_own || !percent(&mut self.rng, self.care) {
                break;
            }
            match conflict.wait_for.filter(|_| !conflict.unfixable) {
                Some(node) => self.order_after(node, &step),
                // No wait would help: the step is omitted.
                None => return,
            }
        }
        self.push(step);
    }

    fn push(&mut self, step: Step) {
        self.model.apply(&step, Outcome::default());
        self.steps.push(step);
    }

    /// Orders `step` after earlier work, in one of several ways.
    fn order_after(&mut self, node: usize, step: &Step) {
        let event = self.rng.usize(..EVENTS);
        let Some(from) = self.model.stream_of(node) else { return self.push(Step::DeviceSync) };
        let to = match step {
            Step::Work(to, _) | Step::Launch { stream: to, .. } | Step::Suballocate(_, to) => Some(*to),
            Step::PoolAlloc { stream: to, .. } | Step::PoolFree { stream: to, .. } => Some(*to),
            Step::Upload(..) | Step::Download(_) => Some(LEGACY),
            _ => None,
        };
        match (to, self.rng.usize(..10)) {
            (Some(to), 0..6) => {
                self.push(Step::Record { event, stream: from });
                self.push(Step::Wait { stream: to, event });
            }
            (_, 0..3) | (Some(_), 6) => {
                self.push(Step::Record { event, stream: from });
                self.push(Step::EventSync(event));
            }
            (_, 9) => self.push(Step::DeviceSync),
            _ => self.push(Step::StreamSync(from)),
        }
    }

    fn span_of(&mut self, arena: usize) -> Span {
        let len = pick(&mut self.rng, &[1, 4, 4, 7, 8, 16, 20, ARENA_BYTES]);
        let start = self.rng.usize(..(ARENA_BYTES - len) as usize + 1) as u64;
        let view = if arena == MAPPED { self.rng.usize(..2) } else { 0 };
        Span { arena, view, start, len }
    }

    fn span(&mut self) -> Span {
        let mut arenas = vec![PLAIN, PLAIN, MAPPED, MAPPED, PINNED];
        arenas.extend(self.model.live_pools());
        if percent(&mut self.rng, 5) {
            // Perhaps one that was freed.
            arenas.extend(FIXED..self.model.arenas());
        }
        let arena = pick(&mut self.rng, &arenas);
        self.span_of(arena)
    }

    fn operation(&mut self) -> Operation {
        let (to, from) = (self.span(), self.span());
        match self.rng.usize(..3) {
            0 => Operation::Fill { to, value: self.rng.u64(..) as u8 },
            1 => {
                let len = to.len.min(from.len);
                let (to, from) = (Span { len, ..to }, Span { len, ..from });
                // Source and target of a copy must not overlap.
                if to.overlaps(&from) { Operation::Fill { to, value: 1 } } else { Operation::Copy { to, from } }
            }
            _ => Operation::Mix { to, from, salt: self.rng.u64(..) as u32 },
        }
    }

    /// An operation that is not refused as a node of a graph.
    fn graph_operation(&mut self) -> Operation {
        loop {
            let operation = self.operation();
            if operation.spans().all(|span| !self.model.is_freed(span.arena)) {
                return operation;
            }
        }
    }

    fn graph(&mut self) -> GraphPlan {
        let mut branches: Vec<usize> = Vec::new();
        for _ in 0..1 + self.rng.usize(..3) {
            let branch = 1 + self.rng.usize(..STREAMS - 1);
            if !branches.contains(&branch) {
                branches.push(branch);
            }
        }
        let mut plan = GraphPlan { branches, mode: self.rng.usize(..3), steps: Vec::new() };
        let mut joined = vec![0];
        for branch in 1..plan.branches.len() {
            if percent(&mut self.rng, 50) {
                self.graph_work(&mut plan, &joined);
            }
            let from = pick(&mut self.rng, &joined);
            plan.steps.push(GraphStep::Record { event: 0, branch: from });
            plan.steps.push(GraphStep::Wait { branch, event: 0 });
            joined.push(branch);
        }
        for _ in 0..self.rng.usize(..5) {
            self.graph_work(&mut plan, &joined);
        }
        for &branch in &joined[1..] {
            plan.steps.push(GraphStep::Record { event: 1, branch });
            plan.steps.push(GraphStep::Wait { branch: 0, event: 1 });
        }
        plan
    }

    fn graph_work(&mut self, plan: &mut GraphPlan, joined: &[usize]) {
        let branch = pick(&mut self.rng, joined);
        let step = if percent(&mut self.rng, 85) {
            GraphStep::Work(branch, self.graph_operation())
        } else {
            let is_while = percent(&mut self.rng, 50);
            let runs = if is_while { 1 + self.rng.usize(..3) } else { self.rng.usize(..2) } as u32;
            let body = (0..1 + self.rng.usize(..2)).map(|_| self.graph_operation()).collect();
            GraphStep::Conditional { branch, is_while, runs, body }
        };
        plan.steps.push(step.clone());
        // A careless graph may keep an old conflict, hence the limit.
        for _ in 0..16 {
            let Some(Conflict { branch: Some(other), .. }) = Model::within(plan) else { return };
            if !percent(&mut self.rng, self.care) {
                return;
            }
            plan.steps.pop();
            plan.steps.push(GraphStep::Record { event: 2, branch: other });
            plan.steps.push(GraphStep::Wait { branch, event: 2 });
            plan.steps.push(step.clone());
        }
    }
}

impl Operation {
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        let (first, second) = match *self {
            Self::Fill { to, .. } => (to, None),
            Self::Copy { to, from } | Self::Mix { to, from, .. } => (to, Some(from)),
        };
        std::iter::once(first).chain(second)
    }
}
