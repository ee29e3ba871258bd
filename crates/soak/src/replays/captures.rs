//! Captures of sections. How one is captured must not make a difference, so it is drawn: streams, mode, by a closure or
//! by a begin and an end, which thread ends it, whether the template is kept, and captures that fail before.

use std::collections::{BTreeMap, BTreeSet};

use warpool::driver::sim::HazardKind;
use warpool::driver::{CaptureMode, DevicePtr};
use warpool::generator::Generator;
use warpool::graph::{BufferKey, Capture, CaptureOptions, Graph, GraphOptions};
use warpool::memory::pools::PoolOptions;
use warpool::memory::{DeviceBlock, MemPool, MemPoolId};
use warpool::{Error, Stream};

use super::executor::Executor;
use super::section::{self, Known, Op, Section, touched};
use super::work::Var;
use super::{Gpu, Run, STREAMS};
use crate::caught::{Caught, caught, inject_panic};
use crate::context::Context;

/// A captured section.
pub struct Captured {
    pub graph: Graph,
    pub section: Section,
    pub pool: MemPoolId,
    /// The variable that it leaves to later graphs in its pool.
    pub leaves: Option<(usize, BufferKey)>,
    /// Whether the variable has the contents of the last replay. A replay of a graph that was captured before, in the
    /// same pool, may use its memory.
    pub is_valid: bool,
    /// Blocks of the capture that the program owns.
    pub held: Vec<DeviceBlock>,
}

impl Captured {
    /// Whether it reads a variable that another graph left.
    pub fn reads(&self, number: usize) -> bool {
        let (mut reads, mut writes) = (BTreeSet::new(), BTreeSet::new());
        touched(&self.section.ops, &mut reads, &mut writes);
        reads.contains(&Var::Left(number))
    }
}

impl Run<'_> {
    /// Captures a section and replays it once, so that what it leaves has contents.
    pub fn capture(&mut self) {
        if self.graphs.len() >= 5 {
            return;
        }
        let (device, rng) = (self.gpu.device.clone(), &mut self.context.rng);
        let pool = match rng.below(3) {
            0 if !self.graphs.is_empty() => {
                let other = rng.below(self.graphs.len());
                Some(self.graphs[other].graph.pool().unwrap().clone())
            }
            1 => Some(MemPool::new(&self.gpu.allocator, &device, PoolOptions::default()).unwrap()),
            _ => None,
        };
        let in_pool = self.graphs.iter().filter(|graph| pool.as_ref().is_some_and(|pool| pool.id() == graph.pool));
        let lefts: Vec<(usize, _)> = in_pool
            .filter(|other| other.is_valid)
            .filter_map(|other| {
                let (number, key) = other.leaves?;
                Some((number, other.graph.buffer(key).unwrap().ptr()))
            })
            .collect();
        let leaves = rng.one_in(2).then_some(self.next_left);
        self.next_left += 1;
        let (outside, generators) = (self.gpu.outside.len(), self.gpu.generators.len());
        let left = lefts.iter().map(|&(number, _)| number).collect();
        let section = section::draw(rng, &Known { outside, left, generators, leaves, captured: true });
        count(self.context, &section.ops);
        self.context.step(format!("capture in pool {:?}: {section:?}", pool.as_ref().map(MemPool::id)));
        let options = GraphOptions { keep_graph: self.context.rng.one_in(3) };
        let mut graph = Graph::new(&self.gpu.allocator, &device, options).unwrap();
        let lefts: BTreeMap<usize, DevicePtr> = lefts.into_iter().collect();
        while self.context.rng.one_in(6) {
            let executor = new_executor(&self.gpu, self.context, &section, &lefts);
            fail(&self.gpu, self.context, &mut graph, executor, &section, pool.as_ref());
        }
        let mut executor = new_executor(&self.gpu, self.context, &section, &lefts);
        succeed(self.context, &mut graph, &mut executor, &section, pool.as_ref());
        self.context.counts.captures += 1;
        let pool = graph.pool().unwrap().id();
        let leaves = leaves.zip(executor.leaves);
        let held = executor.held();
        drop(executor);
        self.graphs.push(Captured { graph, section, pool, leaves, is_valid: false, held });
        self.replay(self.graphs.len() - 1);
    }
}

/// An executor on any streams but the default one.
fn new_executor<'a>(
    gpu: &'a Gpu,
    context: &mut Context,
    section: &Section,
    left: &BTreeMap<usize, DevicePtr>,
) -> Executor<'a> {
    let first = context.rng.below(STREAMS - 1);
    let stream = |branch: usize| gpu.streams[1 + (first + branch) % (STREAMS - 1)].clone();
    let branches: Vec<Stream> = (0..section.branches).map(stream).collect();
    let mut executor = Executor::new(gpu, branches, context.rng.one_in(2), left.clone());
    executor.bring(&section.ops);
    executor
}

fn draw_options<'a>(context: &mut Context, pool: Option<&'a MemPool>) -> CaptureOptions<'a> {
    let mode = context.rng.pick(&[CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]);
    CaptureOptions { pool, mode, ..CaptureOptions::default() }
}

fn succeed(
    context: &mut Context,
    graph: &mut Graph,
    executor: &mut Executor<'_>,
    section: &Section,
    pool: Option<&MemPool>,
) {
    let options = draw_options(context, pool);
    let stream = executor.branches[0].clone();
    if context.rng.one_in(2) {
        let body = |capture: &mut Capture<'_>| {
            executor.capture(&section.ops, capture);
            Ok(())
        };
        graph.capture(&stream, options, body).unwrap();
    } else {
        graph.capture_begin(&stream, options).unwrap();
        executor.capture(&section.ops, &mut graph.scope().unwrap());
        if options.mode == CaptureMode::Relaxed && context.rng.one_in(2) {
            let ended = std::thread::scope(|scope| scope.spawn(|| graph.capture_end(&stream)).join());
            ended.unwrap().unwrap();
            context.made("ended by another thread");
        } else {
            graph.capture_end(&stream).unwrap();
        }
    }
    if graph.options().keep_graph {
        (0..context.rng.below(3)).for_each(|_| graph.instantiate().unwrap());
    }
}

/// A capture of a part of a section that fails, and must change nothing.
fn fail(
    gpu: &Gpu,
    context: &mut Context,
    graph: &mut Graph,
    mut executor: Executor<'_>,
    section: &Section,
    pool: Option<&MemPool>,
) {
    let (some, options) = (&section.ops[..context.rng.below(section.ops.len())], draw_options(context, pool));
    let stream = executor.branches[0].clone();
    let states: Vec<[u8; 16]> = gpu.generators.iter().map(Generator::state).collect();
    let way = context.rng.below(5);
    context.step(format!("  a capture that fails, way {way}, after {} operations", some.len()));
    let outcome = caught(|| match way {
        0..3 => graph.capture(&stream, options, |capture| {
            executor.capture(some, capture);
            match way {
                0 => Err(Error::ThreadEnding),
                // Forbidden in every mode.
                1 => {
                    gpu.device.synchronize().unwrap_err();
                    Ok(())
                }
                _ => inject_panic(),
            }
        }),
        way => {
            graph.capture_begin(&stream, options).unwrap();
            executor.capture(some, &mut graph.scope().unwrap());
            if way == 3 {
                let options = graph.options();
                *graph = Graph::new(&gpu.allocator, &gpu.device, options).unwrap();
            }
            graph.reset().unwrap();
            Err(Error::ThreadEnding)
        }
    });
    match (way, outcome) {
        (0 | 3 | 4, Ok(Err(Error::ThreadEnding))) | (1, Ok(Err(Error::Graph(_)))) | (2, Err(Caught::Injected)) => {}
        (_, Err(Caught::Failed(message))) => panic!("{message}"),
        (_, outcome) => panic!("the capture should fail: {:?}", outcome.ok()),
    }
    assert!(!graph.is_captured() && !graph.is_capturing() && graph.pools().is_empty(), "it is as new");
    drop(executor);
    for stream in &gpu.streams {
        assert!(!gpu.instance.is_capturing(stream).unwrap(), "{stream} still captures");
    }
    let after: Vec<[u8; 16]> = gpu.generators.iter().map(Generator::state).collect();
    assert_eq!(after, states, "generators after a capture that failed");
    let hazards = gpu.sim.hazards();
    let is_meant = |kind| matches!(kind, HazardKind::CaptureInvalidated | HazardKind::CaptureUnjoined);
    assert!(hazards.iter().all(|hazard| is_meant(hazard.kind)), "{hazards:?}");
    gpu.sim.clear_hazards();
    context.counts.captures_failed += 1;
}

/// Counts kinds of operations.
pub fn count(context: &mut Context, ops: &[Op]) {
    use super::work::Work;
    for op in ops {
        match op {
            Op::Work { work: Work::Multiply { .. }, .. } => context.made("product"),
            Op::Work { work: Work::Draw { .. } | Work::Salt { .. }, .. } => context.made("random numbers"),
            Op::Body { ops, .. } => {
                context.made("body");
                count(context, ops);
            }
            Op::Elsewhere(ops) => {
                context.made("other thread");
                count(context, ops);
            }
            _ => {}
        }
    }
}
