//! Random programs over several streams and threads, with temporaries, products, random numbers and conditional bodies:
//! captured into graphs and replayed they leave the same memory, and the same generators, as when they are just done.
//!
//! - `program` is what a program is, `draw` and `schedule` draw one from a seed, with the waits that it needs
//!   (`order`), `kernels` has what it is made of.
//! - `machine` is a simulated machine, `play` does a section on it, into streams that work or that capture; `replayed`
//!   has the graphs.
//! - `threads`: real threads that capture, replay, allocate and poll at the same time.
//! - `found`: what the programs found, made small.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed, and prints it if it fails; `WARPOOL_SWARM_COUNT=n` that
//! many, from `WARPOOL_SWARM_FIRST` on.

mod draw;
mod failing_program;
mod found;
mod kernels;
mod machine;
mod order;
mod play;
mod program;
mod replayed;
mod schedule;
mod threads;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool::driver::DevicePtr;
use warpool::memory::{Allocate as _, DeviceBlock};

use crate::common::rng::seeds;
use failing_program::FailingProgram;
use machine::Machine;
use program::{How, Op, Program, Step};
use replayed::Replayed;

/// How often each thing happened.
#[derive(Debug, Default)]
struct Tally {
    captures: u64,
    replays: u64,
    spoiled: u64,
    resets: u64,
    products: u64,
    draws: u64,
    bodies: u64,
    handed_over: u64,
}

impl Tally {
    fn count(&mut self, ops: &[Op]) {
        for op in ops {
            match op {
                Op::Work { work: program::Work::Multiply { .. }, .. } => self.products += 1,
                Op::Work { work: program::Work::Draw { .. } | program::Work::Salt { .. }, .. } => self.draws += 1,
                Op::If { body, .. } | Op::While { body, .. } => {
                    self.bodies += 1;
                    self.count(body);
                }
                Op::Elsewhere(ops) => {
                    self.handed_over += 1;
                    self.count(ops);
                }
                _ => {}
            }
        }
    }

    fn add(&mut self, other: &Self) {
        self.captures += other.captures;
        self.replays += other.replays;
        self.spoiled += other.spoiled;
        self.resets += other.resets;
        self.products += other.products;
        self.draws += other.draws;
        self.bodies += other.bodies;
        self.handed_over += other.handed_over;
    }
}

/// The program of one seed, on both machines.
fn run(seed: u64, tally: &mut Tally) {
    let program = draw::program(seed);
    let _failing = FailingProgram { seed, program: &program };
    program.sections.iter().for_each(|section| tally.count(&section.ops));
    let (plain, graphed) = (Machine::new(seed, &program), Machine::new(seed, &program));
    let left = left_by(&program, &plain);
    let mut replayed = Replayed::new(seed, &graphed, &program);
    for (round, steps) in program.rounds.iter().enumerate() {
        for step in steps {
            do_plainly(&plain, &program, &left, step);
            replayed.step(step, tally);
        }
        assert_eq!(graphed.outcome(), plain.outcome(), "after round {round}: replayed, and just done");
        plain.expect_no_hazards();
        graphed.expect_no_hazards();
    }
    replayed.close();
    drop(left);
    plain.close();
    graphed.close();
}

/// Memory for what sections leave to later ones, where no graph has it.
fn left_by(program: &Program, machine: &Machine) -> BTreeMap<usize, DeviceBlock> {
    fn leaves(ops: &[Op], found: &mut Vec<usize>) {
        for op in ops {
            match op {
                Op::Alloc { how: How::Left(section), .. } => found.push(*section),
                Op::Elsewhere(ops) => leaves(ops, found),
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    program.sections.iter().for_each(|section| leaves(&section.ops, &mut found));
    found.into_iter().map(|section| (section, machine.allocator.allocate(64, &machine.streams[0]).unwrap())).collect()
}

fn do_plainly(machine: &Machine, program: &Program, left: &BTreeMap<usize, DeviceBlock>, step: &Step) {
    match step {
        Step::Run { section, stream } => {
            let left: BTreeMap<usize, DevicePtr> =
                left.iter().map(|(&section, block)| (section, block.ptr())).collect();
            replayed::run_now(machine, &program.sections[*section], *stream, left);
        }
        Step::Reset { .. } | Step::LetGo => {}
        _ => replayed::step_anywhere(machine, step),
    }
}

#[test]
fn a_replayed_program_is_as_good_as_one_that_is_just_done() {
    let seeds = seeds(500);
    let (next, total) = (AtomicU64::new(seeds.start), Mutex::new(Tally::default()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut tally = Tally::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    run(seed, &mut tally);
                }
                total.lock().unwrap().add(&tally);
            });
        }
    });
    let tally = total.into_inner().unwrap();
    println!("seeds {seeds:?}: {tally:?}");
    let Tally { captures, replays, spoiled, resets, products, draws, bodies, handed_over } = tally;
    let least = [captures, replays, spoiled, resets, products, draws, bodies, handed_over].into_iter().min();
    assert!(
        seeds.end - seeds.start < 100 || least > Some((seeds.end - seeds.start) / 20),
        "some kind of operation is hardly ever drawn"
    );
}

#[test]
fn threads_capture_replay_allocate_and_poll_side_by_side() {
    for seed in seeds(15) {
        threads::run(seed, 60);
    }
}
