//! Draws a section: work on several branches, with the waits that it needs and temporaries. Sections are correct by
//! construction. What they do is what their work does one after the other.

use std::collections::{BTreeMap, BTreeSet};

use super::work::{BYTES, Var, Work};
use crate::rng::Rng;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// What one graph does, or what is done without one.
#[derive(Clone, Debug)]
pub struct Section {
    /// Branches are streams; the first one is where a capture begins.
    pub branches: usize,
    pub ops: Vec<Op>,
}

#[derive(Clone, Debug)]
pub enum Op {
    Work {
        branch: usize,
        work: Work,
        scoped: bool,
    },
    Alloc {
        temp: usize,
        branch: usize,
        bytes: u64,
        owner: Owner,
    },
    RecordUse {
        temp: usize,
        branch: usize,
    },
    Free {
        temp: usize,
    },
    /// A branch begins, after the first, or after a mark.
    Fork {
        branch: usize,
        mark: Option<usize>,
    },
    Join {
        branch: usize,
    },
    Wait {
        branch: usize,
        on: usize,
    },
    Mark {
        mark: usize,
        branch: usize,
    },
    /// Done if, or as long as, the flag is set.
    Body {
        flag: Var,
        byte: bool,
        is_while: bool,
        ops: Vec<Op>,
    },
    /// Done by another thread, while this one waits.
    Elsewhere(Vec<Op>),
}

/// Who owns a temporary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Freed in the section.
    Section,
    /// The graph, which allocates it.
    Graph,
    /// The graph, to which it is moved.
    Moved,
    /// The same, allocated before the capture, from the default pool.
    Brought,
    /// The program, for a while after the capture.
    Program,
    /// The graph: later ones in its pool read the variable with this number.
    Left(usize),
}

/// The variables that are read and written, without temporaries.
pub fn touched(ops: &[Op], reads: &mut BTreeSet<Var>, writes: &mut BTreeSet<Var>) {
    for op in ops {
        match op {
            Op::Work { work, .. } => {
                reads.extend(work.reads());
                writes.insert(work.writes());
            }
            Op::Body { flag, ops, .. } => {
                reads.insert(*flag);
                touched(ops, reads, writes);
            }
            Op::Elsewhere(ops) => touched(ops, reads, writes),
            _ => {}
        }
    }
}

/// Which branches or streams used each variable last.
#[derive(Default)]
pub struct Uses(BTreeMap<Var, (Option<usize>, BTreeSet<usize>)>);

impl Uses {
    /// The others that `branch` has to wait for before it reads and writes these; after that it has used them.
    pub fn add<'a>(
        &mut self,
        branch: usize,
        reads: impl IntoIterator<Item = &'a Var>,
        writes: impl IntoIterator<Item = &'a Var>,
    ) -> BTreeSet<usize> {
        let mut waits = BTreeSet::new();
        for &var in reads {
            let (writer, readers) = self.0.entry(var).or_default();
            waits.extend(*writer);
            readers.insert(branch);
        }
        for &var in writes {
            let (writer, readers) = self.0.entry(var).or_default();
            waits.extend(readers.iter().copied().chain(*writer));
            *writer = Some(branch);
            readers.clear();
        }
        waits.remove(&branch);
        waits
    }
}

/// A temporary that was not freed yet.
struct Temp {
    temp: usize,
    branch: usize,
    owner: Owner,
    /// Branches with uses that were not recorded.
    unrecorded: BTreeSet<usize>,
}

/// The variables and generators that a section may use.
pub struct Known {
    pub outside: usize,
    pub left: Vec<usize>,
    pub generators: usize,
    /// The number of a variable that the section leaves to others.
    pub leaves: Option<usize>,
    /// Whether it is captured: then it may have bodies.
    pub captured: bool,
}

struct Writer<'a> {
    rng: &'a mut Rng,
    known: &'a Known,
    ops: Vec<Op>,
    uses: Uses,
    begun: Vec<bool>,
    temps: Vec<Temp>,
    next_temp: usize,
    marks: usize,
    /// How deep it is in bodies, and which flags must not be changed there.
    depth: usize,
    flags: Vec<Var>,
}

pub fn draw(rng: &mut Rng, known: &Known) -> Section {
    let branches = 1 + rng.below(4);
    let begun = (0..branches).map(|branch| branch == 0).collect();
    let (ops, temps, flags) = (Vec::new(), Vec::new(), Vec::new());
    let uses = Uses::default();
    let mut writer = Writer { rng, known, ops, uses, begun, temps, next_temp: 0, marks: 0, depth: 0, flags };
    writer.all();
    let ops = writer.ops;
    Section { branches, ops: move_to_threads(rng, ops) }
}

/// Moves some operations to another thread.
fn move_to_threads(rng: &mut Rng, ops: Vec<Op>) -> Vec<Op> {
    if !rng.one_in(4) {
        return ops;
    }
    let (mut result, mut ops) = (Vec::new(), ops.into_iter().peekable());
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

impl Writer<'_> {
    fn all(&mut self) {
        for _ in 0..3 + self.rng.below(14) {
            let branch = self.branch();
            self.step(branch);
        }
        if let Some(number) = self.known.leaves {
            let (branch, temp) = (self.branch(), self.next_temp);
            self.next_temp += 1;
            self.ops.push(Op::Alloc { temp, branch, bytes: BYTES, owner: Owner::Left(number) });
            let from = self.readable();
            self.work(branch, Work::Copy { to: Var::Left(number), from });
        }
        // At least one write.
        let (branch, to, a) = (self.branch(), Var::Outside(self.rng.below(self.known.outside)), self.readable());
        self.work(branch, Work::Mix { to, a, b: to });
        while let Some(at) = self.temps.iter().position(|temp| temp.owner == Owner::Section) {
            self.free(at);
        }
        for branch in (1..self.begun.len()).filter(|&branch| self.begun[branch]) {
            self.ops.push(Op::Join { branch });
        }
    }

    /// A branch for the next operation, which begins if it has not begun.
    fn branch(&mut self) -> usize {
        let branch = if self.depth > 0 { 0 } else { self.rng.below(self.begun.len()) };
        if !std::mem::replace(&mut self.begun[branch], true) {
            let mark = (self.marks > 0 && self.rng.one_in(2)).then(|| self.rng.below(self.marks));
            self.ops.push(Op::Fork { branch, mark });
        }
        branch
    }

    fn step(&mut self, branch: usize) {
        let is_outer = self.depth == 0;
        match self.rng.below(32) {
            0..14 => {
                let work = self.plain_work();
                self.work(branch, work);
            }
            14..18 => {
                let owners = [Owner::Section, Owner::Graph, Owner::Moved, Owner::Brought, Owner::Program];
                let owner = if is_outer && self.rng.one_in(2) { self.rng.pick(&owners) } else { Owner::Section };
                self.allocate(branch, owner);
            }
            18 | 19 => {
                let of_body = self.first_of_body();
                let may_free = |temp: &Temp| temp.owner == Owner::Section && temp.temp >= of_body;
                let all: Vec<usize> = (0..self.temps.len()).filter(|&at| may_free(&self.temps[at])).collect();
                if !all.is_empty() {
                    let at = self.rng.pick(&all);
                    self.free(at);
                }
            }
            20..23 => self.product(branch),
            23..26 if is_outer => {
                let (to, generator) = (self.writable(), self.rng.below(self.known.generators));
                let words = self.rng.pick(&[1, 3, 7, 16]);
                self.work(branch, Work::Draw { to, generator, words });
            }
            26 if is_outer => {
                let (to, generator) = (self.writable(), self.rng.below(self.known.generators));
                let increment = self.rng.u64_in(1..=9);
                self.work(branch, Work::Salt { to, generator, increment });
            }
            27 | 28 if is_outer => {
                self.ops.push(Op::Mark { mark: self.marks, branch });
                self.marks += 1;
            }
            // The scope's own stream is the first branch.
            29..32 if branch == 0 && self.depth < 2 && self.known.captured => self.body(),
            _ => {}
        }
    }

    fn plain_work(&mut self) -> Work {
        let (to, from) = (self.writable(), self.readable());
        match self.rng.below(6) {
            0 => Work::Fill { to, value: self.rng.u32(), width: self.rng.pick(&[1, 2, 4]) },
            1 | 2 if to != from => Work::Copy { to, from },
            _ => Work::Mix { to, a: from, b: self.readable() },
        }
    }

    fn variables(&self) -> Vec<Var> {
        let temps = self.temps.iter().map(|temp| Var::Temp(temp.temp));
        (0..self.known.outside).map(Var::Outside).chain(temps).collect()
    }

    fn readable(&mut self) -> Var {
        let mut all = self.variables();
        all.extend(self.known.left.iter().map(|&number| Var::Left(number)));
        self.rng.pick(&all)
    }

    fn writable(&mut self) -> Var {
        let mut all = self.variables();
        all.retain(|var| !self.flags.contains(var));
        self.rng.pick(&all)
    }

    fn work(&mut self, branch: usize, work: Work) {
        let scoped = self.rng.one_in(3);
        self.touch(branch, &work.reads(), &[work.writes()], Op::Work { branch, work, scoped });
    }

    /// Adds an operation, with the waits before it.
    fn touch(&mut self, branch: usize, reads: &[Var], writes: &[Var], op: Op) {
        for on in self.uses.add(branch, reads, writes) {
            self.ops.push(Op::Wait { branch, on });
        }
        self.ops.push(op);
        let record = self.rng.one_in(2);
        for Temp { temp, branch: owner, unrecorded, .. } in &mut self.temps {
            let var = Var::Temp(*temp);
            if *owner == branch || !(reads.contains(&var) || writes.contains(&var)) {
                continue;
            }
            if record {
                self.ops.push(Op::RecordUse { temp: *temp, branch });
            } else if self.depth == 0 {
                // In a body, its node counts as one operation.
                unrecorded.insert(branch);
            }
        }
    }

    /// A temporary with contents.
    fn allocate(&mut self, branch: usize, owner: Owner) -> Var {
        let bytes = match self.rng.below(8) {
            0..5 => BYTES,
            5 => BYTES + self.rng.u64_below(4 * KIB),
            6 => BYTES + self.rng.u64_below(MIB),
            _ => self.rng.pick(&[MIB, 3 * MIB, 12 * MIB]),
        };
        let (temp, from) = (self.next_temp, self.readable());
        self.next_temp += 1;
        self.ops.push(Op::Alloc { temp, branch, bytes, owner });
        self.temps.push(Temp { temp, branch, owner, unrecorded: BTreeSet::new() });
        let to = Var::Temp(temp);
        match self.rng.one_in(3) {
            true => {
                let value = self.rng.u32();
                self.work(branch, Work::Fill { to, value, width: 4 });
            }
            false => self.work(branch, Work::Copy { to, from }),
        }
        to
    }

    /// The first temporary of the current body.
    fn first_of_body(&self) -> usize {
        let first = self.ops.iter().find_map(|op| if let Op::Alloc { temp, .. } = op { Some(*temp) } else { None });
        if self.depth == 0 { 0 } else { first.unwrap_or(usize::MAX) }
    }

    fn free(&mut self, at: usize) {
        let Temp { temp, branch, unrecorded, .. } = self.temps.remove(at);
        self.ops.extend(unrecorded.into_iter().map(|on| Op::Wait { branch, on }));
        self.ops.push(Op::Free { temp });
    }

    /// A multiplication of small matrices.
    fn product(&mut self, branch: usize) {
        let sources = [self.readable(), self.readable(), self.readable()];
        let [a, b, to] = sources.map(|from| {
            let var = self.allocate(branch, Owner::Section);
            self.work(branch, Work::Tame { to: var, from });
            var
        });
        let size = [0; 3].map(|_| 1 + self.rng.below(4) as u32);
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

    fn body(&mut self) {
        let owned = |var: &Var| match var {
            Var::Outside(_) => true,
            Var::Temp(number) => self
                .temps
                .iter()
                .any(|temp| temp.temp == *number && matches!(temp.owner, Owner::Graph | Owner::Moved | Owner::Brought)),
            Var::Left(_) => false,
        };
        let flags: Vec<Var> =
            self.variables().into_iter().filter(|var| owned(var) && !self.flags.contains(var)).collect();
        if flags.is_empty() {
            return;
        }
        let (flag, is_while, from) = (self.rng.pick(&flags), self.rng.one_in(2), self.readable());
        self.work(0, Work::Limit { to: flag, from, most: if is_while { 4 } else { 2 } });
        let seen: BTreeSet<usize> = self.temps.iter().map(|temp| temp.temp).collect();
        // It is written on its own; what it uses counts for the node.
        let (ops, uses) = (std::mem::take(&mut self.ops), std::mem::take(&mut self.uses));
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
        self.uses = uses;
        if is_while {
            body.push(Op::Work { branch: 0, work: Work::CountDown { flag }, scoped: self.rng.one_in(2) });
        }
        let (mut reads, mut writes) = (BTreeSet::from([flag]), BTreeSet::new());
        touched(&body, &mut reads, &mut writes);
        let is_own = |var: &Var| matches!(var, Var::Temp(temp) if !seen.contains(temp));
        let visible = |vars: BTreeSet<Var>| vars.into_iter().filter(|var| !is_own(var)).collect::<Vec<_>>();
        let (reads, writes) = (visible(reads), visible(writes));
        let byte = !is_while && self.rng.one_in(2);
        self.touch(0, &reads, &writes, Op::Body { flag, byte, is_while, ops: body });
    }
}
