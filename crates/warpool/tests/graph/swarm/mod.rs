//! Random programs over several streams and threads, with temporaries, matrix multiplications, random numbers and
//! conditional bodies: captured and replayed, they leave the same memory contents and generator states as eager runs.
//!
//! - `program` defines programs, `draw` and `schedule` draw one from a seed, with the waits that it needs (`order`),
//!   `kernels` has the kernels.
//! - `context` is a simulated device, `executor` executes a section on it, eagerly or in a capture; `replayed` has the
//!   graphs.
//! - `threads`: real threads that capture, replay, allocate and poll at the same time.
//! - `found`: failures that the programs found, reduced.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed, and prints it if it fails; `WARPOOL_SWARM_COUNT=n` that
//! many, from `WARPOOL_SWARM_FIRST` on.

mod context;
mod draw;
mod executor;
mod failing_program;
mod found;
mod kernels;
mod order;
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
use context::SwarmContext;
use failing_program::FailingProgram;
use program::{Op, Ownership, Program, Step};
use replayed::Replayed;

/// How often each kind of operation was executed.
#[derive(Debug, Default)]
struct OpCounts {
    captures: u64,
    replays: u64,
    spoiled: u64,
    resets: u64,
    products: u64,
    draws: u64,
    bodies: u64,
    handed_over: u64,
}

impl OpCounts {
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

/// Runs the program of one seed, replayed and eagerly.
fn run(seed: u64, op_counts: &mut OpCounts) {
    let program = draw::program(seed);
    let _failing = FailingProgram { seed, program: &program };
    program.sections.iter().for_each(|section| op_counts.count(&section.ops));
    let (plain, graphed) = (SwarmContext::new(seed, &program), SwarmContext::new(seed, &program));
    let left = left_by(&program, &plain);
    let mut replayed = Replayed::new(seed, &graphed, &program);
    for (round, steps) in program.rounds.iter().enumerate() {
        for step in steps {
            run_eagerly(&plain, &program, &left, step);
            replayed.step(step, op_counts);
        }
        assert_eq!(graphed.outcome(), plain.outcome(), "after round {round}: replayed, and eager");
        plain.expect_no_hazards();
        graphed.expect_no_hazards();
    }
    replayed.close();
    drop(left);
    plain.close();
    graphed.close();
}

/// Memory for the variables that sections leave to later ones, if no graph owns it.
fn left_by(program: &Program, context: &SwarmContext) -> BTreeMap<usize, DeviceBlock> {
    fn leaves(ops: &[Op], found: &mut Vec<usize>) {
        for op in ops {
            match op {
                Op::Alloc { how: Ownership::Left(section), .. } => found.push(*section),
                Op::Elsewhere(ops) => leaves(ops, found),
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    program.sections.iter().for_each(|section| leaves(&section.ops, &mut found));
    found.into_iter().map(|section| (section, context.allocator.allocate(64, &context.streams[0]).unwrap())).collect()
}

fn run_eagerly(context: &SwarmContext, program: &Program, left: &BTreeMap<usize, DeviceBlock>, step: &Step) {
    match step {
        Step::Run { section, stream } => {
            let left: BTreeMap<usize, DevicePtr> =
                left.iter().map(|(&section, block)| (section, block.ptr())).collect();
            replayed::run_now(context, &program.sections[*section], *stream, left);
        }
        Step::Reset { .. } | Step::DropHeld => {}
        _ => replayed::step_anywhere(context, step),
    }
}

#[test]
fn replayed_programs_match_eager_ones() {
    let seeds = seeds(500);
    let (next, total) = (AtomicU64::new(seeds.start), Mutex::new(OpCounts::default()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut op_counts = OpCounts::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    run(seed, &mut op_counts);
                }
                total.lock().unwrap().add(&op_counts);
            });
        }
    });
    let op_counts = total.into_inner().unwrap();
    println!("seeds {seeds:?}: {op_counts:?}");
    let OpCounts { captures, replays, spoiled, resets, products, draws, bodies, handed_over } = op_counts;
    let least = [captures, replays, spoiled, resets, products, draws, bodies, handed_over].into_iter().min();
    assert!(
        seeds.end - seeds.start < 100 || least > Some((seeds.end - seeds.start) / 20),
        "some kind of operation is rarely drawn"
    );
}

#[test]
fn threads_capture_replay_allocate_and_poll_concurrently() {
    for seed in seeds(15) {
        threads::run(seed, 60);
    }
}
