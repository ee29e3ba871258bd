//! Draws the program of a seed, section by section. Programs are correct by construction, so a failure is a bug in the
//! code under test.

use std::collections::BTreeSet;

use super::order::{Order, WorkPoint};
use super::program::{Group, Op, Ownership, Program, Section, Var, Work};
use super::schedule::{Schedule, touched};
use crate::common::rng::Rng;

/// Streams that steps happen on; the first is the default stream.
pub const STREAMS: usize = 6;
const LANES: usize = 4;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const SETTINGS: [&str; 5] = [
    "",
    "expandable_segments:True",
    "graph_capture_record_stream_reuse:True",
    "expandable_segments:True,graph_capture_record_stream_reuse:True",
    "max_split_size_mb:20,garbage_collection_threshold:0.3",
];

/// The program of a seed.
pub fn program(seed: u64) -> Program {
    let mut rng = Rng::new(seed);
    // At least three: two may be flags of nested bodies.
    let outside = 3 + rng.below(3);
    let generators = 1 + rng.below(3);
    let (mut sections, mut groups) = (Vec::new(), Vec::new());
    for group in 0..1 + rng.below(3) {
        let (first, count) = (sections.len(), 1 + rng.below(3));
        let linked = count > 1 && rng.one_in(2);
        for index in 0..count {
            let left = if linked { (first..first + index).collect() } else { Vec::new() };
            let leaves = (linked && index + 1 < count).then_some(first + index);
            sections.push(section(&mut rng, group, outside, generators, left, leaves));
        }
        groups.push(Group { first, count, linked, mem_pool: rng.one_in(4) });
    }
    let mut program = Program {
        settings: rng.pick(&SETTINGS),
        workspace_bytes: rng.pick(&[None, Some(0), Some(4 * KIB), Some(3 * MIB)]),
        outside,
        generators,
        shared_state: generators > 1 && rng.one_in(3),
        sections,
        groups,
        rounds: Vec::new(),
    };
    let mut schedule = Schedule::new(&program);
    program.rounds = (0..2 + rng.below(3)).map(|_| schedule.round(&mut rng, &program)).collect();
    program
}

fn section(
    rng: &mut Rng,
    group: usize,
    outside: usize,
    generators: usize,
    left: Vec<usize>,
    leaves: Option<usize>,
) -> Section {
    let (branches, forks) = (1 + rng.below(LANES), rng.one_in(3));
    let mut writer = Writer::new(rng, branches, forks, outside, generators);
    writer.left = left.into_iter().map(Var::Left).collect();
    writer.all(leaves);
    let ops = writer.ops;
    Section { group, branches, forks, ops: move_to_thread(rng, ops) }
}

/// A section that is only run eagerly.
pub fn ops(rng: &mut Rng, branches: usize, forks: bool, program: &Program) -> Vec<Op> {
    let mut writer = Writer::new(rng, branches, forks, program.outside, program.generators);
    writer.all(None);
    writer.ops
}

/// Moves some of the operations to another thread.
fn move_to_thread(rng: &mut Rng, ops: Vec<Op>) -> Vec<Op> {
    if !rng.one_in(4) {
        return ops;
    }
    let mut result = Vec::new();
    let mut ops = ops.into_iter().peekable();
    while ops.peek().is_some() {
        let own = rng.below(8);
        result.extend(ops.by_ref().take(own));
        let other: Vec<Op> = ops.by_ref().take(1 + rng.below(12)).collect();
        if !other.is_empty() {
            result.push(Op::Elsewhere(other));
        }
    }
    result
}

/// A live temporary.
struct Temp {
    temp: usize,
    branch: usize,
    how: Ownership,
    /// Uses of other branches that were not recorded.
    unrecorded: Vec<WorkPoint>,
}

/// Writes one section.
struct Writer<'a> {
    rng: &'a mut Rng,
    forks: bool,
    outside: usize,
    generators: usize,
    left: Vec<Var>,
    ops: Vec<Op>,
    order: Order<Var>,
    is_in: Vec<bool>,
    temps: Vec<Temp>,
    next_temp: usize,
    /// Recorded points that can be waited for.
    clocks: Vec<(usize, Vec<u32>)>,
    next_event: usize,
    /// How deep it is in bodies, and which flags must not be changed there.
    depth: usize,
    flags: Vec<Var>,
}

impl<'a> Writer<'a> {
    fn new(rng: &'a mut Rng, branches: usize, forks: bool, outside: usize, generators: usize) -> Self {
        let mut is_in = vec![false; branches];
        is_in[0] = true;
        Self {
            rng,
            forks,
            outside,
            generators,
            left: Vec::new(),
            ops: Vec::new(),
            order: Order::new(branches),
            is_in,
            temps: Vec::new(),
            next_temp: 0,
            clocks: Vec::new(),
            next_event: 0,
            depth: 0,
            flags: Vec::new(),
        }
    }

    fn all(&mut self, leaves: Option<usize>) {
        for _ in 0..3 + self.rng.below(14) {
            let branch = self.branch();
            self.step(branch);
        }
        if let Some(section) = leaves {
            let branch = self.branch();
            let (temp, var) = (self.next_temp, Var::Left(section));
            self.next_temp += 1;
            self.ops.push(Op::Alloc { temp, branch, bytes: 64, how: Ownership::Left(section) });
            let from = self.readable();
            self.work(branch, Work::Sums { to: var, from });
        }
        // At least one write.
        let (branch, to, a) = (self.branch(), Var::Outside(self.rng.below(self.outside)), self.readable());
        self.work(branch, Work::Mix { to, a, b: to });
        while let Some(at) = self.temps.iter().position(|temp| temp.how == Ownership::Freed) {
            self.free(at);
        }
        for branch in 1..self.is_in.len() {
            if self.is_in[branch] {
                self.order.wait(0, branch);
                self.ops.push(Op::Join { branch });
            }
        }
    }

    /// A branch for the next operation, forked if it is not open.
    fn branch(&mut self) -> usize {
        if self.depth > 0 {
            return 0;
        }
        let branch = self.rng.below(self.is_in.len());
        if !self.is_in[branch] {
            let inside: Vec<usize> = (0..self.is_in.len()).filter(|&branch| self.is_in[branch]).collect();
            if !self.forks && !self.clocks.is_empty() && self.rng.one_in(2) {
                let (event, clock) = self.clocks[self.rng.below(self.clocks.len())].clone();
                self.order.wait_for(branch, &clock);
                self.ops.push(Op::Await { event, branch });
            } else {
                let from = if self.forks { 0 } else { self.rng.pick(&inside) };
                self.order.wait(branch, from);
                self.ops.push(Op::Fork { branch, from });
            }
            self.is_in[branch] = true;
        }
        branch
    }

    fn step(&mut self, branch: usize) {
        match self.rng.below(32) {
            0..14 => {
                let work = self.plain_work();
                self.work(branch, work);
            }
            14..18 => {
                let how = match self.rng.below(8) {
                    _ if self.depth > 0 => Ownership::Freed,
                    0..4 => Ownership::Freed,
                    4 => Ownership::Allocated,
                    5 => Ownership::Moved,
                    _ => Ownership::Held,
                };
                self.allocate(branch, how);
            }
            18 | 19 => {
                let mine: Vec<usize> = (0..self.temps.len()).filter(|&at| self.may_free(at)).collect();
                if !mine.is_empty() {
                    let at = self.rng.pick(&mine);
                    self.free(at);
                }
            }
            20..23 => self.product(branch),
            23..26 if self.depth == 0 => {
                let (to, generator) = (self.writable(), self.rng.below(self.generators));
                let words = self.rng.pick(&[1, 3, 7, 16]);
                self.work(branch, Work::Draw { to, generator, words });
            }
            26 if self.depth == 0 => {
                let (to, generator) = (self.writable(), self.rng.below(self.generators));
                let increment = 1 + self.rng.below(9) as u64;
                self.work(branch, Work::Salt { to, generator, increment });
            }
            27 | 28 if self.depth == 0 => {
                let event = self.next_event;
                self.next_event += 1;
                self.clocks.push((event, self.order.now(branch)));
                self.ops.push(Op::Mark { event, branch });
            }
            29 if self.depth == 0 && !self.clocks.is_empty() => {
                let (event, clock) = self.clocks[self.rng.below(self.clocks.len())].clone();
                self.order.wait_for(branch, &clock);
                self.ops.push(Op::Await { event, branch });
            }
            // The scope's own stream is the first branch.
            30 | 31 if branch == 0 && self.depth < 2 => self.conditional(),
            _ => {}
        }
    }

    fn plain_work(&mut self) -> Work {
        let (to, from) = (self.writable(), self.readable());
        match self.rng.below(8) {
            0 => Work::Fill { to, value: self.rng.u32(), width: self.rng.pick(&[1, 2, 4]) },
            1 | 2 if to != from => Work::Copy { to, from },
            3 | 4 => Work::Add { to, value: self.rng.u32() },
            5 => Work::Sums { to, from },
            _ => Work::Mix { to, a: from, b: self.readable() },
        }
    }

    fn variables(&self) -> Vec<Var> {
        (0..self.outside).map(Var::Outside).chain(self.temps.iter().map(|temp| Var::Temp(temp.temp))).collect()
    }

    fn readable(&mut self) -> Var {
        let mut all = self.variables();
        all.extend(&self.left);
        self.rng.pick(&all)
    }

    fn writable(&mut self) -> Var {
        let mut all = self.variables();
        all.retain(|var| !self.flags.contains(var));
        self.rng.pick(&all)
    }

    /// Adds the waits that it needs, and the work.
    fn work(&mut self, branch: usize, work: Work) {
        let (reads, writes) = (work.reads(), [work.writes()]);
        let scoped = self.rng.one_in(3);
        self.touch(branch, &reads, &writes, |ops| ops.push(Op::Work { branch, work, scoped }));
    }

    fn touch(&mut self, branch: usize, reads: &[Var], writes: &[Var], push: impl FnOnce(&mut Vec<Op>)) {
        while let Some(on) = self.order.missing(branch, reads, writes) {
            self.order.wait(branch, on);
            self.ops.push(Op::Wait { branch, on });
        }
        let point = self.order.work(branch, reads, writes);
        push(&mut self.ops);
        let record = self.rng.one_in(2);
        for temp in &mut self.temps {
            let var = Var::Temp(temp.temp);
            if temp.branch == branch || !(reads.contains(&var) || writes.contains(&var)) {
                continue;
            }
            if record {
                self.ops.push(Op::RecordUse { temp: temp.temp, branch });
            } else if self.depth == 0 {
                // Outside of a body, its node counts as one operation.
                temp.unrecorded.push(point);
            }
        }
    }

    /// A temporary, initialized.
    fn allocate(&mut self, branch: usize, how: Ownership) -> Var {
        let bytes = match self.rng.below(8) {
            0..5 => 64,
            5 => 64 + self.rng.u64() % (4 * KIB),
            6 => 64 + self.rng.u64() % MIB,
            _ => self.rng.pick(&[MIB, 3 * MIB, 12 * MIB]),
        };
        let temp = self.next_temp;
        self.next_temp += 1;
        self.ops.push(Op::Alloc { temp, branch, bytes, how });
        let (to, from) = (Var::Temp(temp), self.readable());
        self.temps.push(Temp { temp, branch, how, unrecorded: Vec::new() });
        if self.rng.one_in(3) {
            let value = self.rng.u32();
            self.work(branch, Work::Fill { to, value, width: 4 });
        } else {
            self.work(branch, Work::Copy { to, from });
        }
        to
    }

    /// Whether a temporary is freed in the section, and belongs to the current body.
    fn may_free(&self, at: usize) -> bool {
        self.temps[at].how == Ownership::Freed && (self.depth == 0 || self.temps[at].temp >= self.first_of_body())
    }

    fn first_of_body(&self) -> usize {
        self.ops
            .iter()
            .find_map(|op| match op {
                Op::Alloc { temp, .. } => Some(*temp),
                _ => None,
            })
            .unwrap_or(usize::MAX)
    }

    fn free(&mut self, at: usize) {
        let Temp { temp, branch, unrecorded, .. } = self.temps.remove(at);
        while let Some(on) = self.order.not_after(branch, &unrecorded) {
            self.order.wait(branch, on);
            self.ops.push(Op::Wait { branch, on });
        }
        self.ops.push(Op::Free { temp });
    }

    /// A multiplication of small matrices, with temporaries for inputs and output.
    fn product(&mut self, branch: usize) {
        let sources = [self.readable(), self.readable(), self.readable()];
        let [a, b, to] = sources.map(|from| {
            let var = self.allocate(branch, Ownership::Freed);
            self.work(branch, Work::Tame { to: var, from });
            var
        });
        let size = [1, 2, 3, 4];
        let size = [self.rng.pick(&size), self.rng.pick(&size), self.rng.pick(&size)];
        let transposed = [self.rng.one_in(2), self.rng.one_in(2)];
        let beta = self.rng.pick(&[0.0, 1.0]);
        self.work(branch, Work::Multiply { to, a, b, size, transposed, beta });
        let into = self.writable();
        self.work(branch, Work::Mix { to: into, a: to, b: into });
        if self.rng.one_in(2) {
            for var in [a, b, to] {
                let at = self.temps.iter().position(|temp| Var::Temp(temp.temp) == var).expect("made just now");
                self.free(at);
            }
        }
    }

    fn conditional(&mut self) {
        let flag = if self.rng.one_in(2) || self.depth > 0 {
            self.writable_with_key()
        } else {
            self.allocate(0, Ownership::Allocated)
        };
        let Some(flag) = self.has_key(flag).then_some(flag) else { return };
        let is_while = self.rng.one_in(2);
        let (from, most) = (self.readable(), if is_while { 4 } else { 2 });
        self.work(0, Work::Limit { to: flag, from, most });
        // The body is written separately, on its own branch; its accesses count for the node.
        let ops = std::mem::take(&mut self.ops);
        let order = std::mem::replace(&mut self.order, Order::new(self.is_in.len()));
        let seen: BTreeSet<usize> = self.temps.iter().map(|temp| temp.temp).collect();
        self.depth += 1;
        self.flags.push(flag);
        for _ in 0..1 + self.rng.below(4) {
            self.step(0);
        }
        while let Some(at) = self.temps.iter().position(|temp| !seen.contains(&temp.temp)) {
            self.free(at);
        }
        self.flags.pop();
        self.depth -= 1;
        let mut body = std::mem::replace(&mut self.ops, ops);
        self.order = order;
        if is_while {
            body.push(Op::Work { branch: 0, work: Work::CountDown { flag }, scoped: self.rng.one_in(2) });
        }
        let (mut reads, mut writes) = (BTreeSet::from([flag]), BTreeSet::new());
        touched(&body, &mut reads, &mut writes);
        // Its own temporaries are not visible outside.
        let ours = |var: &Var| !matches!(var, Var::Temp(temp) if !seen.contains(temp));
        let reads: Vec<Var> = reads.into_iter().filter(ours).collect();
        let writes: Vec<Var> = writes.into_iter().filter(ours).collect();
        let byte = self.rng.one_in(2);
        self.touch(0, &reads, &writes, |ops| {
            ops.push(if is_while { Op::While { flag, body } } else { Op::If { flag, byte, body } });
        });
    }

    /// A variable that has a key in the graph.
    fn writable_with_key(&mut self) -> Var {
        let mut all = self.variables();
        all.retain(|&var| self.has_key(var) && !self.flags.contains(&var));
        self.rng.pick(&all)
    }

    fn has_key(&self, var: Var) -> bool {
        match var {
            Var::Outside(_) => true,
            Var::Temp(temp) => self
                .temps
                .iter()
                .any(|known| known.temp == temp && matches!(known.how, Ownership::Allocated | Ownership::Moved)),
            Var::Left(_) => false,
        }
    }
}
