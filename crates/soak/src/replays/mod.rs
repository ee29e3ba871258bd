//! Programs over several streams and threads, with temporaries, matrix multiplications, random numbers and conditional
//! bodies, which are captured and replayed, or done eagerly. Memory and generators must be as after doing all work one
//! after the other, which the host computes.
//!
//! Driver calls do not fail here: the campaign of captures has that.

mod captures;
mod executor;
mod section;
pub mod threads;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warpool::blas::{Blas, BlasSettings};
use warpool::driver::Copies as _;
use warpool::driver::sim::SimDriver;
use warpool::generator::Generator;
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, Settings};
use warpool::{Device, Instance, Stream};

use self::captures::{Captured, count};
use self::executor::Executor;
use self::section::{Known, Op, Uses, touched};
use self::work::{BYTES, LoadedKernels, Model, State, Var, WORDS, Words};
use crate::context::Context;
use crate::machine::{Machine, device_id};

/// The default stream, and others.
const STREAMS: usize = 6;
const SETTINGS: [&str; 5] = [
    "",
    "expandable_segments:True",
    "graph_capture_record_stream_reuse:True",
    "expandable_segments:True,graph_capture_record_stream_reuse:True",
    "max_split_size_mb:20,garbage_collection_threshold:0.3",
];

/// What sections use.
pub struct Gpu {
    sim: Arc<SimDriver>,
    instance: Instance,
    device: Device,
    allocator: Arc<dyn DeviceAllocator>,
    blas: Blas,
    generators: Vec<Generator>,
    outside: Vec<Arc<DeviceBlock>>,
    streams: Vec<Stream>,
    kernels: LoadedKernels,
}

impl Gpu {
    /// The contents of a variable, after a synchronization.
    fn words(&self, block: &DeviceBlock) -> Words {
        let mut bytes = [0; BYTES as usize];
        self.sim.download(device_id(0), block.ptr(), &mut bytes).unwrap();
        std::array::from_fn(|at| u32::from_le_bytes(bytes.as_chunks::<4>().0[at]))
    }
}

struct Run<'a> {
    context: &'a mut Context,
    machine: Machine,
    caching: Arc<CachingAllocator>,
    gpu: Gpu,
    model: Model,
    graphs: Vec<Captured>,
    /// Which streams used each variable last, and each pool.
    uses: Uses,
    last_replay: BTreeMap<MemPoolId, usize>,
    next_left: usize,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let mut run = Run::new(context);
    for _ in 0..15 + run.context.rng.below(30) {
        run.step();
        run.caching.check();
    }
    run.finish();
}

impl<'a> Run<'a> {
    fn new(context: &'a mut Context) -> Self {
        let machine = Machine::with(context, 1, STREAMS - 1, |config| {
            config.devices[0].properties.bytes_total = 8 << 30;
            config.check_uninitialized = true;
        });
        let (instance, device, rng) = (machine.instance.clone(), machine.device(0), &mut context.rng);
        let settings = rng.pick(&SETTINGS);
        let caching = Arc::new(CachingAllocator::new(&instance, Settings::parse(settings).unwrap()));
        let allocator: Arc<dyn DeviceAllocator> = caching.clone();
        let workspace_bytes = rng.pick(&[None, Some(0), Some(4 << 10), Some(3 << 20)]);
        let blas = Blas::new(&allocator, BlasSettings { workspace_bytes, ..BlasSettings::default() });
        let count = 1 + rng.below(3);
        let mut generators: Vec<Generator> = (0..count).map(|_| Generator::new(&device).unwrap()).collect();
        let mut state_of: Vec<usize> = (0..count).collect();
        if count > 1 && rng.one_in(3) {
            (generators[count - 1], state_of[count - 1]) = (generators[0].share(), 0);
        }
        generators.iter().for_each(|generator| generator.set_seed(7).unwrap());
        let main = device.default_stream().unwrap();
        let streams = [main.clone()].into_iter().chain(machine.streams[0].iter().cloned()).collect();
        let mut values = BTreeMap::new();
        // At least three: two may be flags of nested bodies.
        let outside = (0..3 + rng.below(3))
            .map(|index| {
                let (block, words): (_, Words) =
                    (allocator.allocate(BYTES, &main).unwrap(), [0; WORDS].map(|_| rng.u32()));
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                machine.sim.upload(device_id(0), block.ptr(), &bytes).unwrap();
                values.insert(Var::Outside(index), words);
                Arc::new(block)
            })
            .collect();
        context.step(format!("{settings:?}, workspaces of {workspace_bytes:?} bytes, {count} generators {state_of:?}"));
        let (sim, kernels) = (machine.sim.clone(), LoadedKernels::load(&machine.sim));
        let gpu = Gpu { sim, instance, device, allocator, blas, generators, outside, streams, kernels };
        let model = Model { values, states: vec![State { seed: 7, offset: 0 }; count], state_of };
        let (graphs, uses, last_replay) = (Vec::new(), Uses::default(), BTreeMap::new());
        Self { context, machine, caching, gpu, model, graphs, uses, last_replay, next_left: 0 }
    }

    fn step(&mut self) {
        self.context.counts.operations += 1;
        let generator = self.context.rng.below(self.gpu.generators.len());
        let state = self.model.state_of[generator];
        match self.context.rng.below(32) {
            0..8 => self.capture(),
            8..18 if !self.graphs.is_empty() => {
                let at = self.context.rng.below(self.graphs.len());
                self.replay(at);
            }
            18..21 => self.run_eagerly(),
            21..23 if !self.graphs.is_empty() => self.reset(),
            23 => {
                let seed = self.context.rng.u64();
                self.gpu.generators[generator].set_seed(seed).unwrap();
                self.model.states[state] = State { seed, offset: 0 };
            }
            24 => {
                let offset = 4 * self.context.rng.u64_below(1000);
                self.gpu.generators[generator].set_offset(offset).unwrap();
                self.model.states[state].offset = offset;
            }
            25 => drop(self.gpu.allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap()),
            26 => drop(self.gpu.blas.clear_workspaces()),
            27 => self.graphs.iter_mut().for_each(|graph| graph.held.clear()),
            28 | 29 => self.compare(),
            _ => {
                let stream = &self.gpu.streams[self.context.rng.below(STREAMS)];
                self.machine.pause_or_resume(stream, self.context.rng.one_in(2));
            }
        }
    }

    /// A stream waits for others that use the same variables.
    fn wait_for_users(&mut self, stream: usize, ops: &[Op]) {
        let (mut reads, mut writes) = (BTreeSet::new(), BTreeSet::new());
        touched(ops, &mut reads, &mut writes);
        let lasts = |vars: &BTreeSet<Var>| -> Vec<Var> {
            vars.iter().copied().filter(|var| !matches!(var, Var::Temp(_))).collect()
        };
        for on in self.uses.add(stream, &lasts(&reads), &lasts(&writes)) {
            self.gpu.streams[stream].wait_stream(&self.gpu.streams[on]).unwrap();
        }
    }

    /// Replays a graph in any stream, after the last replay in its pool, if what it reads is there.
    pub fn replay(&mut self, at: usize) {
        let is_gone =
            |other: &Captured| !other.is_valid && other.leaves.is_some_and(|(left, _)| self.graphs[at].reads(left));
        if self.graphs.iter().any(is_gone) {
            return;
        }
        let stream = self.context.rng.below(STREAMS);
        let ops = self.graphs[at].section.ops.clone();
        let pool = self.graphs[at].pool;
        self.context.step(format!("replay of graph {at}, pool {pool}, in stream {stream}"));
        let streams = &self.gpu.streams;
        if let Some(last) = self.last_replay.insert(pool, stream) {
            streams[stream].wait_stream(&streams[last]).unwrap();
        }
        self.wait_for_users(stream, &ops);
        self.graphs[at].graph.replay(&self.gpu.streams[stream]).unwrap();
        self.context.counts.replays += 1;
        let later = self.graphs[at + 1..].iter_mut().filter(|graph| graph.pool == pool);
        later.for_each(|graph| graph.is_valid = false);
        self.graphs[at].is_valid = true;
        self.apply(&ops);
    }

    fn run_eagerly(&mut self) {
        let (outside, generators) = (self.gpu.outside.len(), self.gpu.generators.len());
        let known = Known { outside, left: Vec::new(), generators, leaves: None, captured: false };
        let (section, first) = (section::draw(&mut self.context.rng, &known), self.context.rng.below(STREAMS));
        self.context.step(format!("eagerly in stream {first}: {section:?}"));
        count(self.context, &section.ops);
        self.wait_for_users(first, &section.ops);
        let stream = |branch: usize| self.gpu.streams[(first + branch) % STREAMS].clone();
        let branches = (0..section.branches).map(stream).collect();
        Executor::new(&self.gpu, branches, false, BTreeMap::new()).run(&section.ops);
        self.apply(&section.ops);
    }

    fn apply(&mut self, ops: &[Op]) {
        for op in ops {
            match op {
                Op::Work { work, .. } => self.model.apply(*work),
                Op::Elsewhere(ops) => self.apply(ops),
                Op::Body { flag, byte, is_while, ops } => {
                    let is_set = |model: &Model| {
                        let word = model.values[flag][0];
                        if *byte { word as u8 != 0 } else { word != 0 }
                    };
                    while is_set(&self.model) {
                        self.apply(ops);
                        if !is_while {
                            break;
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// Resets or drops a graph, mostly with replays under way, and those that read what it left.
    fn reset(&mut self) {
        let mut gone = vec![self.context.rng.below(self.graphs.len())];
        while let Some(at) = gone.pop() {
            let Captured { mut graph, leaves, .. } = self.graphs.remove(at);
            self.context.step(format!("graph {at} is reset or dropped"));
            self.context.made("reset");
            if self.context.rng.one_in(2) {
                graph.reset().unwrap();
            }
            drop(graph);
            gone.clear();
            if let Some((number, _)) = leaves {
                self.model.values.remove(&Var::Left(number));
            }
            let is_left = |graph: &Captured| {
                (0..self.next_left)
                    .any(|number| graph.reads(number) && !self.model.values.contains_key(&Var::Left(number)))
            };
            gone.extend(self.graphs.iter().position(is_left));
        }
    }

    /// Compares memory and generators with the model.
    fn compare(&mut self) {
        self.machine.synchronize();
        self.machine.check_hazards();
        for (index, block) in self.gpu.outside.iter().enumerate() {
            assert_eq!(
                self.gpu.words(block),
                self.model.values[&Var::Outside(index)],
                "the contents of variable {index}"
            );
        }
        for Captured { graph, leaves, .. } in self.graphs.iter().filter(|graph| graph.is_valid) {
            let Some((number, key)) = leaves else { continue };
            let found = self.gpu.words(graph.buffer(*key).unwrap());
            assert_eq!(found, self.model.values[&Var::Left(*number)], "what a graph left in variable {number}");
        }
        for (generator, state) in self.gpu.generators.iter().zip(&self.model.state_of) {
            let found = State { seed: generator.seed(), offset: generator.offset().unwrap() };
            assert_eq!(found, self.model.states[*state], "the state of a generator");
        }
    }

    fn finish(mut self) {
        self.context.step("the end");
        self.compare();
        while !self.graphs.is_empty() {
            self.reset();
        }
        let Self { machine, caching, gpu, .. } = self;
        let Gpu { sim, instance, device, allocator, blas, generators, outside, streams, kernels } = gpu;
        drop(outside);
        blas.close().unwrap();
        caching.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        caching.check();
        let stats = caching.stats(device_id(0)).unwrap();
        let left = (stats.allocation.all.current, stats.workspace_bytes.current, stats.reserved_bytes.all.current);
        assert_eq!(left, (0, 0, 0), "blocks, bytes of workspaces and reserved bytes at the end");
        kernels.unload(&sim);
        drop((caching, allocator, generators, streams, device, instance, sim));
        machine.close(false);
    }
}
