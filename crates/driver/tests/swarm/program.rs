//! Random programs: what they are made of, and how they are drawn. How they read in a message is in `listing.rs`.
//!
//! A program is drawn step by step. Before a step that would clash with earlier work, waits are put in: always in a
//! careful program, so that it is correct by construction, and only now and then in a careless one. The judge says
//! where they are missing.

use super::judge::{Judge, Outcome, Quarrel};

/// The legacy default stream, the thread's own, and where the non-blocking ones begin; those before are blocking.
pub const LEGACY: usize = 0;
pub const PER_THREAD: usize = 1;
pub const NON_BLOCKING: usize = 4;
pub const STREAMS: usize = 8;
pub const EVENTS: usize = 4;
/// Memory: one plain allocation, one mapped at two addresses, one pinned; behind them what pools give.
pub const PLAIN: usize = 0;
pub const MAPPED: usize = 1;
pub const PINNED: usize = 2;
pub const FIXED: usize = 3;
pub const ARENA_BYTES: u64 = 48;
/// What an allocation of a pool takes; only its first [`ARENA_BYTES`] are used.
pub const POOL_BYTES: u64 = 512;

/// Luck for programs, apart from that of the machine.
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn roll(&mut self, sides: usize) -> usize {
        (self.next() % sides as u64) as usize
    }

    pub fn percent(&mut self, chance: usize) -> bool {
        self.roll(100) < chance
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len())]
    }
}

/// Bytes of an arena, seen through one of its addresses.
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

/// What a piece of work does.
#[derive(Clone, Copy)]
pub enum Act {
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

/// One call while a graph is captured. Branches are streams; the first is where the capture began.
#[derive(Clone)]
pub enum GraphStep {
    Work(usize, Act),
    Record {
        event: usize,
        branch: usize,
    },
    Wait {
        branch: usize,
        event: usize,
    },
    /// A fill of the counter, then a conditional node; the body counts down and does its acts one after the other.
    Conditional {
        branch: usize,
        is_while: bool,
        runs: u32,
        body: Vec<Act>,
    },
}

/// A graph as it is captured.
#[derive(Clone)]
pub struct GraphPlan {
    pub branches: Vec<usize>,
    pub mode: usize,
    pub steps: Vec<GraphStep>,
}

/// One step of a program: one call, but for captures and streams that are replaced.
#[derive(Clone)]
pub enum Step {
    Work(usize, Act),
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
    HandOut(Span, usize),
    Return(Span),
    /// Destroys the stream with whatever is in it, and puts a new one in its place.
    Replace(usize),
}

/// A whole program.
pub struct Program {
    pub seed: u64,
    /// How many of a hundred missing waits are put in.
    pub care: usize,
    pub steps: Vec<Step>,
    /// How many arenas there are in the end.
    pub arenas: usize,
}

impl Program {
    pub fn draw(seed: u64) -> Self {
        Writer::new(seed).write()
    }
}

struct Writer {
    dice: Dice,
    seed: u64,
    care: usize,
    notes: bool,
    judge: Judge,
    steps: Vec<Step>,
    streams: Vec<usize>,
}

impl Writer {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let care = if dice.percent(50) { 100 } else { dice.pick(&[0, 50, 80, 95]) };
        let notes = dice.percent(25);
        // Few streams meet more often.
        let count = 2 + dice.roll(5);
        let streams = (0..count).map(|_| dice.roll(STREAMS)).collect();
        Self { dice, seed, care, notes, judge: Judge::default(), steps: Vec::new(), streams }
    }

    fn write(mut self) -> Program {
        let length = 5 + self.dice.roll(30);
        while self.steps.len() < length && self.judge.has_room() {
            let step = self.step();
            self.add(step);
        }
        let Self { seed, care, steps, judge, .. } = self;
        assert!(care < 100 || judge.quarrels.is_empty(), "seed {seed}: a careful program must be correct");
        Program { seed, care, steps, arenas: judge.arenas() }
    }

    fn stream(&mut self) -> usize {
        let streams = self.streams.clone();
        self.dice.pick(&streams)
    }

    fn step(&mut self) -> Step {
        let (stream, event) = (self.stream(), self.dice.roll(EVENTS));
        match self.dice.roll(100) {
            0..45 => Step::Work(stream, self.act()),
            45..50 => Step::Record { event, stream },
            50..55 => Step::Wait { stream, event },
            55..57 => Step::EventSync(event),
            57..59 => Step::EventQuery(event),
            59..61 => Step::StreamSync(stream),
            61..63 => Step::StreamQuery(stream),
            63 => Step::DeviceSync,
            64..67 => Step::HostRead(self.span_of(PINNED)),
            67..70 => Step::HostWrite(self.span_of(PINNED), self.dice.next() as u8),
            70..72 => Step::Upload(self.span_of(PLAIN), self.dice.next() as u8),
            72..74 => Step::Download(self.span_of(MAPPED)),
            74..77 => Step::PoolAlloc { arena: self.judge.arenas(), stream },
            77..80 => match self.judge.live_pools().as_slice() {
                [] => Step::DeviceSync,
                live => Step::PoolFree { arena: self.dice.pick(live), stream },
            },
            80..84 => Step::Capture(self.graph()),
            84..93 => match self.judge.graphs() {
                0 => Step::Work(stream, self.act()),
                graphs => Step::Launch { graph: self.dice.roll(graphs), stream },
            },
            93..96 if self.notes => Step::HandOut(self.span_of(PLAIN), stream),
            96..98 if self.notes => Step::Return(self.span_of(PLAIN)),
            98 if stream > PER_THREAD => Step::Replace(stream),
            _ => Step::Work(stream, self.act()),
        }
    }

    /// Adds a step, behind the waits that it needs as far as the program takes care.
    fn add(&mut self, step: Step) {
        for _ in 0..64 {
            let mut trial = self.judge.clone();
            trial.apply(&step, Outcome::default());
            let Some(quarrel) = trial.quarrels.get(self.judge.quarrels.len()).cloned() else { break };
            let own = quarrel.wait_for.is_some_and(|node| !self.judge.knows(node));
            if own || !self.dice.percent(self.care) {
                break;
            }
            match quarrel.wait_for.filter(|_| !quarrel.hopeless) {
                Some(node) => self.put_behind(node, &step),
                // Nothing makes it right: it is left out.
                None => return,
            }
        }
        self.keep(step);
    }

    fn keep(&mut self, step: Step) {
        self.judge.apply(&step, Outcome::default());
        self.steps.push(step);
    }

    /// Puts `step` behind an earlier piece of work, in one of the ways there are.
    fn put_behind(&mut self, node: usize, step: &Step) {
        let event = self.dice.roll(EVENTS);
        let Some(from) = self.judge.stream_of(node) else { return self.keep(Step::DeviceSync) };
        let to = match step {
            Step::Work(to, _) | Step::Launch { stream: to, .. } | Step::HandOut(_, to) => Some(*to),
            Step::PoolAlloc { stream: to, .. } | Step::PoolFree { stream: to, .. } => Some(*to),
            Step::Upload(..) | Step::Download(_) => Some(LEGACY),
            _ => None,
        };
        match (to, self.dice.roll(10)) {
            (Some(to), 0..6) => {
                self.keep(Step::Record { event, stream: from });
                self.keep(Step::Wait { stream: to, event });
            }
            (_, 0..3) | (Some(_), 6) => {
                self.keep(Step::Record { event, stream: from });
                self.keep(Step::EventSync(event));
            }
            (_, 9) => self.keep(Step::DeviceSync),
            _ => self.keep(Step::StreamSync(from)),
        }
    }

    fn span_of(&mut self, arena: usize) -> Span {
        let len = self.dice.pick(&[1, 4, 4, 7, 8, 16, 20, ARENA_BYTES]);
        let start = self.dice.roll((ARENA_BYTES - len) as usize + 1) as u64;
        let view = if arena == MAPPED { self.dice.roll(2) } else { 0 };
        Span { arena, view, start, len }
    }

    fn span(&mut self) -> Span {
        let mut arenas = vec![PLAIN, PLAIN, MAPPED, MAPPED, PINNED];
        arenas.extend(self.judge.live_pools());
        if self.dice.percent(5) {
            // Perhaps one that is freed already.
            arenas.extend(FIXED..self.judge.arenas());
        }
        let arena = self.dice.pick(&arenas);
        self.span_of(arena)
    }

    fn act(&mut self) -> Act {
        let (to, from) = (self.span(), self.span());
        match self.dice.roll(3) {
            0 => Act::Fill { to, value: self.dice.next() as u8 },
            1 => {
                let len = to.len.min(from.len);
                let (to, from) = (Span { len, ..to }, Span { len, ..from });
                // Source and target of a copy must not overlap.
                if to.overlaps(&from) { Act::Fill { to, value: 1 } } else { Act::Copy { to, from } }
            }
            _ => Act::Mix { to, from, salt: self.dice.next() as u32 },
        }
    }

    /// An act that no node of a graph is refused for.
    fn graph_act(&mut self) -> Act {
        loop {
            let act = self.act();
            if act.spans().all(|span| !self.judge.is_freed(span.arena)) {
                return act;
            }
        }
    }

    fn graph(&mut self) -> GraphPlan {
        let mut branches: Vec<usize> = Vec::new();
        for _ in 0..1 + self.dice.roll(3) {
            let branch = 1 + self.dice.roll(STREAMS - 1);
            if !branches.contains(&branch) {
                branches.push(branch);
            }
        }
        let mut plan = GraphPlan { branches, mode: self.dice.roll(3), steps: Vec::new() };
        let mut joined = vec![0];
        for branch in 1..plan.branches.len() {
            if self.dice.percent(50) {
                self.graph_work(&mut plan, &joined);
            }
            let from = self.dice.pick(&joined);
            plan.steps.push(GraphStep::Record { event: 0, branch: from });
            plan.steps.push(GraphStep::Wait { branch, event: 0 });
            joined.push(branch);
        }
        for _ in 0..self.dice.roll(5) {
            self.graph_work(&mut plan, &joined);
        }
        for &branch in &joined[1..] {
            plan.steps.push(GraphStep::Record { event: 1, branch });
            plan.steps.push(GraphStep::Wait { branch: 0, event: 1 });
        }
        plan
    }

    fn graph_work(&mut self, plan: &mut GraphPlan, joined: &[usize]) {
        let branch = self.dice.pick(joined);
        let step = if self.dice.percent(85) {
            GraphStep::Work(branch, self.graph_act())
        } else {
            let is_while = self.dice.percent(50);
            let runs = if is_while { 1 + self.dice.roll(3) } else { self.dice.roll(2) } as u32;
            let body = (0..1 + self.dice.roll(2)).map(|_| self.graph_act()).collect();
            GraphStep::Conditional { branch, is_while, runs, body }
        };
        plan.steps.push(step.clone());
        // A careless graph may keep an old clash for good, hence the bound.
        for _ in 0..16 {
            let Some(Quarrel { branch: Some(other), .. }) = Judge::within(plan) else { return };
            if !self.dice.percent(self.care) {
                return;
            }
            plan.steps.pop();
            plan.steps.push(GraphStep::Record { event: 2, branch: other });
            plan.steps.push(GraphStep::Wait { branch, event: 2 });
            plan.steps.push(step.clone());
        }
    }
}

impl Act {
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        let (first, second) = match *self {
            Self::Fill { to, .. } => (to, None),
            Self::Copy { to, from } | Self::Mix { to, from, .. } => (to, Some(from)),
        };
        std::iter::once(first).chain(second)
    }
}
