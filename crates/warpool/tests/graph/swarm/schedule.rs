//! Draws the steps between captures: replays on any stream, eager work, new seeds, resets. Steps that access the same
//! memory, or share a pool, are ordered; all others are not.

use std::collections::BTreeSet;

use super::draw::{self, STREAMS};
use super::order::{Order, WorkPoint};
use super::program::{Op, Program, Section, Step, Var};
use crate::common::rng::Rng;

/// All variables that are read and written.
pub fn touched(ops: &[Op], reads: &mut BTreeSet<Var>, writes: &mut BTreeSet<Var>) {
    for op in ops {
        match op {
            Op::Work { work, .. } => {
                reads.extend(work.reads());
                writes.insert(work.writes());
            }
            Op::If { flag, body, .. } | Op::While { flag, body } => {
                reads.insert(*flag);
                touched(body, reads, writes);
            }
            Op::Elsewhere(ops) => touched(ops, reads, writes),
            _ => {}
        }
    }
}

/// The section whose graph used a pool last, and its runs.
#[derive(Default)]
struct Users {
    section: Option<usize>,
    runs: Vec<WorkPoint>,
}

/// Writes the steps between captures.
pub struct Schedule {
    order: Order<Var>,
    /// For each group, the users of its pool: graphs that share one must not overlap.
    pools: Vec<Users>,
}

impl Schedule {
    pub fn new(program: &Program) -> Self {
        Self { order: Order::new(STREAMS), pools: program.groups.iter().map(|_| Users::default()).collect() }
    }

    pub fn round(&mut self, rng: &mut Rng, program: &Program) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut groups: Vec<usize> = (0..program.groups.len()).collect();
        while !groups.is_empty() {
            let index = groups.swap_remove(rng.below(groups.len()));
            let group = &program.groups[index];
            let sections = group.first..group.first + group.count;
            for section in sections {
                for _ in 0..rng.below(3) {
                    self.between(rng, program, &mut steps);
                }
                if !group.linked && rng.one_in(6) {
                    continue;
                }
                let again = if group.linked { 1 } else { 1 + rng.below(3) / 2 };
                for _ in 0..again {
                    let stream = rng.below(STREAMS);
                    self.run(program, section, stream, &mut steps);
                }
            }
            // Mostly with replays still under way; their memory may be trimmed at once.
            if rng.one_in(2) {
                self.resets(rng, program, &mut steps);
            }
            if rng.one_in(4) {
                steps.push(Step::Trim);
            }
        }
        steps
    }

    fn resets(&mut self, rng: &mut Rng, program: &Program, steps: &mut Vec<Step>) {
        for (group, pool) in program.groups.iter().zip(&mut self.pools) {
            if !rng.one_in(3) {
                continue;
            }
            let all: Vec<usize> = (group.first..group.first + group.count).collect();
            let sections = if group.linked || rng.one_in(2) { all } else { vec![rng.pick(&all)] };
            // The next graph in a pool that stays must not overlap with replays that still run.
            pool.section = None;
            if sections.len() == group.count && !group.mem_pool {
                pool.runs.clear();
            }
            steps.push(Step::Reset { sections, by_drop: rng.one_in(2) });
        }
    }

    fn between(&mut self, rng: &mut Rng, program: &Program, steps: &mut Vec<Step>) {
        let generator = rng.below(program.generators);
        let step = match rng.below(10) {
            0 => Step::Seed { generator, seed: rng.u64() },
            1 => Step::Offset { generator, offset: 4 * (rng.u64() % 1000) },
            2 => Step::Trim,
            3 => Step::ClearWorkspaces,
            4 => Step::DropHeld,
            5 | 6 => {
                let (branches, forks, stream) = (1 + rng.below(3), rng.one_in(2), rng.below(STREAMS));
                let ops = draw::ops(rng, branches, forks, program);
                let section = Section { group: 0, branches, forks, ops };
                self.touch(&section, stream, steps);
                Step::Eager { section, stream }
            }
            _ => return,
        };
        steps.push(step);
    }

    fn run(&mut self, program: &Program, section: usize, stream: usize, steps: &mut Vec<Step>) {
        let group = program.sections[section].group;
        if self.pools[group].section != Some(section) {
            while let Some(on) = self.order.not_after(stream, &self.pools[group].runs) {
                self.wait(stream, on, steps);
            }
            self.pools[group] = Users { section: Some(section), runs: Vec::new() };
        }
        let point = self.touch(&program.sections[section], stream, steps);
        self.pools[group].runs.push(point);
        steps.push(Step::Run { section, stream });
    }

    fn wait(&mut self, stream: usize, on: usize, steps: &mut Vec<Step>) {
        self.order.wait(stream, on);
        steps.push(Step::Wait { stream, on });
    }

    fn touch(&mut self, section: &Section, stream: usize, steps: &mut Vec<Step>) -> WorkPoint {
        let (mut reads, mut writes) = (BTreeSet::new(), BTreeSet::new());
        touched(&section.ops, &mut reads, &mut writes);
        let lasting =
            |vars: BTreeSet<Var>| -> Vec<Var> { vars.into_iter().filter(|var| !matches!(var, Var::Temp(_))).collect() };
        let (reads, writes) = (lasting(reads), lasting(writes));
        while let Some(on) = self.order.missing(stream, &reads, &writes) {
            self.wait(stream, on, steps);
        }
        self.order.work(stream, &reads, &writes)
    }
}
