//! Captures sections and replays them. How a section is captured is drawn here, since it must not make a difference:
//! which streams, which mode, by a scope or by a begin and an end, on which thread it ends, whether the template is
//! kept, whether captures fail before one succeeds.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use warpool::driver::sim::HazardKind;
use warpool::driver::{CaptureMode, DevicePtr};
use warpool::generator::Generator;
use warpool::graph::{BufferKey, CaptureOptions, Graph, GraphOptions};
use warpool::memory::{DeviceBlock, MemPool, MemPoolId, PoolOptions};
use warpool::{Error, Stream};

use super::OpCounts;
use super::context::SwarmContext;
use super::draw::STREAMS;
use super::executor::Executor;
use super::program::{Op, Program, Section, Step};
use crate::common::rng::Rng;

/// The graphs of a program.
pub struct Replayed<'m> {
    context: &'m SwarmContext,
    program: &'m Program,
    /// One for each section.
    graphs: Vec<Graph>,
    /// The variables that the sections left, as keys of their graphs.
    leaves: BTreeMap<usize, BufferKey>,
    /// The pools that the program created, by group.
    pools: Vec<Option<MemPool>>,
    held: Vec<DeviceBlock>,
    rng: Rng,
}

impl<'m> Replayed<'m> {
    pub fn new(seed: u64, context: &'m SwarmContext, program: &'m Program) -> Self {
        let mut rng = Rng::new(seed ^ 0xcab7);
        let graphs = program.sections.iter().map(|_| new_graph(context, &mut rng)).collect();
        let pools = program
            .groups
            .iter()
            .map(|group| {
                let make = || MemPool::new(&context.allocator, &context.device, PoolOptions::default()).unwrap();
                group.mem_pool.then(make)
            })
            .collect();
        Self { context, program, graphs, leaves: BTreeMap::new(), pools, held: Vec::new(), rng }
    }

    pub fn step(&mut self, step: &Step, op_counts: &mut OpCounts) {
        match step {
            Step::Run { section, stream } => {
                if !self.graphs[*section].is_captured() {
                    self.capture(*section, op_counts);
                }
                self.graphs[*section].replay(&self.context.streams[*stream]).unwrap();
                op_counts.replays += 1;
            }
            Step::Reset { sections, by_drop } => {
                for &section in sections {
                    if *by_drop {
                        self.graphs[section] = new_graph(self.context, &mut self.rng);
                    } else {
                        self.graphs[section].reset().unwrap();
                    }
                    self.leaves.remove(&section);
                    op_counts.resets += 1;
                }
            }
            Step::DropHeld => self.held.clear(),
            _ => step_anywhere(self.context, step),
        }
        self.context.caching.check();
    }

    /// Drops or resets all graphs.
    pub fn close(mut self) {
        for graph in &mut self.graphs {
            if self.rng.one_in(2) {
                graph.reset().unwrap();
            }
        }
    }

    fn capture(&mut self, section: usize, op_counts: &mut OpCounts) {
        op_counts.captures += 1;
        while self.rng.one_in(6) {
            self.fail_capture(section);
            op_counts.spoiled += 1;
        }
        let Section { ops, .. } = &self.program.sections[section];
        let (mut executor, mode) = self.executor(section);
        let pool = self.pool_of(self.program.sections[section].group);
        let options = CaptureOptions { pool: pool.as_ref(), mode, ..CaptureOptions::default() };
        let stream = executor.branches[0].clone();
        let graph = &mut self.graphs[section];
        if self.rng.one_in(2) {
            let body = |capture: &mut warpool::graph::Capture<'_>| {
                executor.capture(ops, capture);
                Ok(())
            };
            graph.capture(&stream, options, body).unwrap();
        } else {
            graph.capture_begin(&stream, options).unwrap();
            executor.capture(ops, &mut graph.scope().unwrap());
            if options.mode == CaptureMode::Relaxed && self.rng.one_in(2) {
                let ended = std::thread::scope(|scope| scope.spawn(|| graph.capture_end(&stream)).join());
                ended.unwrap().unwrap();
            } else {
                graph.capture_end(&stream).unwrap();
            }
        }
        if graph.options().keep_graph && self.rng.one_in(2) {
            for _ in 0..1 + self.rng.below(2) {
                graph.instantiate().unwrap();
            }
        }
        self.leaves.extend(executor.leaves.drain(..));
        self.held.append(&mut executor.held());
    }

    /// The executor and the mode of the next capture of a section.
    fn executor(&mut self, section: usize) -> (Executor<'m>, CaptureMode) {
        let Section { branches, forks, .. } = self.program.sections[section];
        let first = self.rng.below(STREAMS - 1);
        let branches: Vec<Stream> =
            (0..branches).map(|branch| self.context.streams[1 + (first + branch) % (STREAMS - 1)].clone()).collect();
        let modes = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        let mode = self.rng.pick(&modes);
        let mut executor = Executor::new(self.context, branches, forks && self.rng.one_in(2), self.left());
        executor.bring(&self.program.sections[section].ops);
        (executor, mode)
    }

    /// The pool of a group, if it has one.
    fn pool_of(&self, group: usize) -> Option<MemPool> {
        if let Some(pool) = &self.pools[group] {
            return Some(pool.clone());
        }
        let group = &self.program.groups[group];
        self.graphs[group.first..group.first + group.count].iter().find_map(|graph| graph.pool().ok().cloned())
    }

    /// The addresses of the variables that sections left.
    fn left(&self) -> BTreeMap<usize, DevicePtr> {
        let at = |(&section, &key): (&usize, &BufferKey)| (section, self.graphs[section].buffer(key).unwrap().ptr());
        self.leaves.iter().map(at).collect()
    }

    /// A capture that fails, and must change nothing.
    fn fail_capture(&mut self, section: usize) {
        let Section { ops, .. } = &self.program.sections[section];
        let some: Vec<Op> = ops[..self.rng.below(ops.len())].to_vec();
        let (mut executor, mode) = self.executor(section);
        let pool = self.pool_of(self.program.sections[section].group);
        let options = CaptureOptions { pool: pool.as_ref(), mode, ..CaptureOptions::default() };
        let stream = executor.branches[0].clone();
        let states: Vec<[u8; 16]> = self.context.generators.iter().map(Generator::state).collect();
        let context = self.context;
        let graph = &mut self.graphs[section];
        match self.rng.below(4) {
            0 => {
                let outcome: warpool::Result<()> = graph.capture(&stream, options, |capture| {
                    executor.begin(&some, capture);
                    Err(Error::ThreadEnding)
                });
                assert_eq!(outcome, Err(Error::ThreadEnding));
            }
            1 => {
                let outcome = graph.capture(&stream, options, |capture| {
                    executor.begin(&some, capture);
                    // Forbidden in every mode.
                    context.device.synchronize().unwrap_err();
                    Ok(())
                });
                assert!(matches!(outcome, Err(Error::Graph(_))), "{outcome:?}");
            }
            2 => {
                let panic = catch_unwind(AssertUnwindSafe(|| {
                    graph.capture(&stream, options, |capture| -> warpool::Result<()> {
                        executor.begin(&some, capture);
                        // As a panic, but without the message.
                        std::panic::resume_unwind(Box::new("on purpose"));
                    })
                }));
                assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
            }
            _ => {
                graph.capture_begin(&stream, options).unwrap();
                executor.begin(&some, &mut graph.scope().unwrap());
                if self.rng.one_in(2) {
                    *graph = new_graph(context, &mut self.rng);
                }
                graph.reset().unwrap();
            }
        }
        assert!(!graph.is_captured() && !graph.is_capturing() && graph.pools().is_empty());
        drop(executor);
        for stream in &context.streams {
            assert!(!context.instance.is_capturing(stream).unwrap(), "{stream} still captures");
        }
        assert_eq!(states, context.generators.iter().map(Generator::state).collect::<Vec<_>>());
        let hazards = context.sim.hazards();
        let meant = |kind| matches!(kind, HazardKind::CaptureInvalidated | HazardKind::CaptureUnjoined);
        assert!(hazards.iter().all(|hazard| meant(hazard.kind)), "{hazards:#?}");
        context.sim.clear_hazards();
    }
}

fn new_graph(context: &SwarmContext, rng: &mut Rng) -> Graph {
    let options = GraphOptions { keep_graph: rng.one_in(3) };
    Graph::new(&context.allocator, &context.device, options).unwrap()
}

/// Executes a step that is the same on both devices.
pub fn step_anywhere(context: &SwarmContext, step: &Step) {
    match step {
        Step::Eager { section, stream } => run_now(context, section, *stream, BTreeMap::new()),
        Step::Wait { stream, on } => context.streams[*stream].wait_stream(&context.streams[*on]).unwrap(),
        Step::Seed { generator, seed } => context.generators[*generator].set_seed(*seed).unwrap(),
        Step::Offset { generator, offset } => context.generators[*generator].set_offset(*offset).unwrap(),
        Step::Trim => drop(context.allocator.trim(context.device.id(), MemPoolId::DEFAULT).unwrap()),
        Step::ClearWorkspaces => drop(context.blas.clear_workspaces()),
        Step::Run { .. } | Step::Reset { .. } | Step::DropHeld => panic!("not the same on both: {step:?}"),
    }
}

/// Runs a section eagerly.
pub fn run_now(context: &SwarmContext, section: &Section, stream: usize, left: BTreeMap<usize, DevicePtr>) {
    let branches = (0..section.branches).map(|branch| context.streams[(stream + branch) % STREAMS].clone()).collect();
    Executor::new(context, branches, false, left).do_now(&section.ops);
}
