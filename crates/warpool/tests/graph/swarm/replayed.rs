//! The machine that captures sections and replays them. How it captures is drawn here, since it must make no
//! difference: which streams, which mode, by a scope or by a begin and an end, on which thread it ends, whether the
//! template is kept, whether captures fail before one succeeds.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use warpool::driver::sim::HazardKind;
use warpool::driver::{CaptureMode, DevicePtr};
use warpool::generator::Generator;
use warpool::graph::{BufferKey, CaptureOptions, Graph, GraphOptions};
use warpool::memory::{DeviceBlock, MemPool, MemPoolId, PoolOptions};
use warpool::{Error, Stream};

use super::Tally;
use super::draw::STREAMS;
use super::machine::Machine;
use super::play::Player;
use super::program::{Op, Program, Section, Step};
use crate::common::rng::Rng;

/// The graphs of a program.
pub struct Replayed<'m> {
    machine: &'m Machine,
    program: &'m Program,
    /// One for each section.
    graphs: Vec<Graph>,
    /// What the sections left, by keys of their graphs.
    leaves: BTreeMap<usize, BufferKey>,
    /// The pools that are the program's own, by groups.
    pools: Vec<Option<MemPool>>,
    held: Vec<DeviceBlock>,
    rng: Rng,
}

impl<'m> Replayed<'m> {
    pub fn new(seed: u64, machine: &'m Machine, program: &'m Program) -> Self {
        let mut rng = Rng::new(seed ^ 0xcab7);
        let graphs = program.sections.iter().map(|_| new_graph(machine, &mut rng)).collect();
        let pools = program
            .groups
            .iter()
            .map(|group| {
                let make = || MemPool::new(&machine.allocator, &machine.device, PoolOptions::default()).unwrap();
                group.mem_pool.then(make)
            })
            .collect();
        Self { machine, program, graphs, leaves: BTreeMap::new(), pools, held: Vec::new(), rng }
    }

    pub fn step(&mut self, step: &Step, tally: &mut Tally) {
        match step {
            Step::Run { section, stream } => {
                if !self.graphs[*section].is_captured() {
                    self.capture(*section, tally);
                }
                self.graphs[*section].replay(&self.machine.streams[*stream]).unwrap();
                tally.replays += 1;
            }
            Step::Reset { sections, by_drop } => {
                for &section in sections {
                    if *by_drop {
                        self.graphs[section] = new_graph(self.machine, &mut self.rng);
                    } else {
                        self.graphs[section].reset().unwrap();
                    }
                    self.leaves.remove(&section);
                    tally.resets += 1;
                }
            }
            Step::LetGo => self.held.clear(),
            _ => step_anywhere(self.machine, step),
        }
        self.machine.caching.check();
    }

    /// All graphs go, by their destructors or by hand.
    pub fn close(mut self) {
        for graph in &mut self.graphs {
            if self.rng.one_in(2) {
                graph.reset().unwrap();
            }
        }
    }

    fn capture(&mut self, section: usize, tally: &mut Tally) {
        tally.captures += 1;
        while self.rng.one_in(6) {
            self.spoil(section);
            tally.spoiled += 1;
        }
        let Section { ops, .. } = &self.program.sections[section];
        let (mut player, options) = self.player(section);
        let stream = player.lanes[0].clone();
        let graph = &mut self.graphs[section];
        if self.rng.one_in(2) {
            let body = |capture: &mut warpool::graph::Capture<'_>| {
                player.capture(ops, capture);
                Ok(())
            };
            graph.capture(&stream, options, body).unwrap();
        } else {
            graph.capture_begin(&stream, options).unwrap();
            player.capture(ops, &mut graph.scope().unwrap());
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
        self.leaves.extend(player.leaves.drain(..));
        self.held.append(&mut player.held());
    }

    /// How the next capture of a section is to go.
    fn player(&mut self, section: usize) -> (Player<'m>, CaptureOptions) {
        let Section { group, lanes, forks, .. } = self.program.sections[section];
        let first = self.rng.below(STREAMS - 1);
        let lanes: Vec<Stream> =
            (0..lanes).map(|lane| self.machine.streams[1 + (first + lane) % (STREAMS - 1)].clone()).collect();
        let modes = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        let mut options = CaptureOptions::default().with_mode(self.rng.pick(&modes));
        if let Some(pool) = self.pool_of(group) {
            options = options.with_pool(pool);
        }
        let mut player = Player::new(self.machine, lanes, forks && self.rng.one_in(2), self.left());
        player.bring(&self.program.sections[section].ops);
        (player, options)
    }

    /// The pool that a group has already.
    fn pool_of(&self, group: usize) -> Option<MemPoolId> {
        if let Some(pool) = &self.pools[group] {
            return Some(pool.id());
        }
        let group = &self.program.groups[group];
        self.graphs[group.first..group.first + group.count].iter().find_map(|graph| graph.pool().ok())
    }

    /// Where what sections left is now.
    fn left(&self) -> BTreeMap<usize, DevicePtr> {
        let at = |(&section, &key): (&usize, &BufferKey)| (section, self.graphs[section].buffer(key).unwrap().ptr());
        self.leaves.iter().map(at).collect()
    }

    /// A capture that comes to nothing, and must change nothing.
    fn spoil(&mut self, section: usize) {
        let Section { ops, .. } = &self.program.sections[section];
        let some: Vec<Op> = ops[..self.rng.below(ops.len())].to_vec();
        let (mut player, options) = self.player(section);
        let stream = player.lanes[0].clone();
        let states: Vec<[u8; 16]> = self.machine.generators.iter().map(Generator::state).collect();
        let machine = self.machine;
        let graph = &mut self.graphs[section];
        match self.rng.below(4) {
            0 => {
                let outcome: warpool::Result<()> = graph.capture(&stream, options, |capture| {
                    player.begin(&some, capture);
                    Err(Error::ThreadEnding)
                });
                assert_eq!(outcome, Err(Error::ThreadEnding));
            }
            1 => {
                let outcome = graph.capture(&stream, options, |capture| {
                    player.begin(&some, capture);
                    // Forbidden in every mode.
                    machine.device.synchronize().unwrap_err();
                    Ok(())
                });
                assert!(matches!(outcome, Err(Error::Graph(_))), "{outcome:?}");
            }
            2 => {
                let panic = catch_unwind(AssertUnwindSafe(|| {
                    graph.capture(&stream, options, |capture| -> warpool::Result<()> {
                        player.begin(&some, capture);
                        // As a panic, but without the message.
                        std::panic::resume_unwind(Box::new("on purpose"));
                    })
                }));
                assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
            }
            _ => {
                graph.capture_begin(&stream, options).unwrap();
                player.begin(&some, &mut graph.scope().unwrap());
                if self.rng.one_in(2) {
                    *graph = new_graph(machine, &mut self.rng);
                }
                graph.reset().unwrap();
            }
        }
        assert!(!graph.is_captured() && !graph.is_capturing() && graph.pools().is_empty());
        drop(player);
        for stream in &machine.streams {
            assert!(!machine.instance.is_capturing(stream).unwrap(), "{stream} still captures");
        }
        assert_eq!(states, machine.generators.iter().map(Generator::state).collect::<Vec<_>>());
        let hazards = machine.sim.hazards();
        let meant = |kind| matches!(kind, HazardKind::CaptureInvalidated | HazardKind::CaptureUnjoined);
        assert!(hazards.iter().all(|hazard| meant(hazard.kind)), "{hazards:#?}");
        machine.sim.clear_hazards();
    }
}

fn new_graph(machine: &Machine, rng: &mut Rng) -> Graph {
    let options = GraphOptions { keep_graph: rng.one_in(3) };
    Graph::new(&machine.allocator, &machine.device, options).unwrap()
}

/// What both machines do alike.
pub fn step_anywhere(machine: &Machine, step: &Step) {
    match step {
        Step::Eager { section, stream } => run_now(machine, section, *stream, BTreeMap::new()),
        Step::Wait { stream, on } => machine.streams[*stream].wait_stream(&machine.streams[*on]).unwrap(),
        Step::Seed { generator, seed } => machine.generators[*generator].set_seed(*seed).unwrap(),
        Step::Offset { generator, offset } => machine.generators[*generator].set_offset(*offset).unwrap(),
        Step::Trim => drop(machine.allocator.trim(machine.device.id(), MemPoolId::DEFAULT).unwrap()),
        Step::ClearWorkspaces => drop(machine.blas.clear_workspaces()),
        Step::Run { .. } | Step::Reset { .. } | Step::LetGo => panic!("not the same on both: {step:?}"),
    }
}

/// Does a section without a graph.
pub fn run_now(machine: &Machine, section: &Section, stream: usize, left: BTreeMap<usize, DevicePtr>) {
    let lanes = (0..section.lanes).map(|lane| machine.streams[(stream + lane) % STREAMS].clone()).collect();
    Player::new(machine, lanes, false, left).do_now(&section.ops);
}
