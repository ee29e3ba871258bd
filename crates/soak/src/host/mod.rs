//! Programs over pinned host memory: contents written by the host and by copies, uses on several streams and devices,
//! caps, trims, changed settings, graphs. Segments and size classes are not modelled; `checks` compares counters.
//!
//! The programs are correct: work of streams on a block is ordered, and recorded or waited for before the block is
//! freed.

mod blocks;
mod checks;
mod graphs;

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool::Stream;
use warpool::driver::{DevicePtr, Memory as _};
use warpool::memory::{CachingAllocator, DeviceAllocator as _, HostAllocator, MemPoolId, PinnedSettings, Settings};

use self::blocks::{Live, Range};
use self::checks::Allowed;
use self::graphs::{GraphRange, HostGraph};
use crate::context::Context;
use crate::machine::{Machine, device_id};
use crate::rng::Rng;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const DEVICES: usize = 2;
const STREAMS: usize = 2;
/// Device memory of each stream, for copies of a block's ends.
const SCRATCH: u64 = 256;

struct Run<'a> {
    context: &'a mut Context,
    machine: Machine,
    host: HostAllocator,
    /// The allocator of the graphs.
    memory: Arc<CachingAllocator>,
    /// All streams, each with its scratch memory.
    streams: Vec<(Stream, DevicePtr)>,
    live: Vec<Live>,
    /// The blocks of the program, by address.
    ranges: BTreeMap<u64, Range>,
    graphs: Vec<HostGraph>,
    /// Memory that graphs use, whether the program has it too or not.
    graph_ranges: Vec<GraphRange>,
    /// All that were ever allocated.
    blocks_allocated: u64,
    bytes_allocated: u64,
    /// Driver calls that pin, of requests that were too large.
    calls_refused: u64,
    allowed: Allowed,
    next_graph: u32,
    next_tag: u32,
    /// The largest request.
    bytes_max: u64,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let machine = Machine::new(context, DEVICES as u32, STREAMS);
    let settings = draw_settings(&mut context.rng);
    context.step(format!("{settings:?}"));
    let host = HostAllocator::new(&machine.instance, settings.clone());
    let memory = Arc::new(CachingAllocator::new(&machine.instance, Settings::default()));
    let scratch = |stream: &Stream| machine.sim.mem_alloc(stream.device_id(), SCRATCH).unwrap();
    let streams = machine.streams.concat().into_iter().map(|stream| (stream.clone(), scratch(&stream))).collect();
    // Registering touches pages, which takes real time.
    let bytes_max =
        if settings.use_cuda_host_register { MIB } else { context.rng.pick(&[64 * KIB, 4 * MIB, 16 * MIB]) };
    let mut run = Run {
        context,
        machine,
        host,
        memory,
        streams,
        live: Vec::new(),
        ranges: BTreeMap::new(),
        graphs: Vec::new(),
        graph_ranges: Vec::new(),
        blocks_allocated: 0,
        bytes_allocated: 0,
        calls_refused: 0,
        allowed: Allowed::default(),
        next_graph: 1,
        next_tag: 1,
        bytes_max,
    };
    run.allowed = Allowed::new(&run.host.settings(), &run.host.stats());
    run.attach_callbacks();
    for _ in 0..60 + run.context.rng.below(200) {
        run.step();
        run.check();
    }
    run.finish();
}

impl Run<'_> {
    fn step(&mut self) {
        match self.context.rng.below(64) {
            0..18 => self.allocate(),
            18..30 => self.use_on_stream(),
            30..42 => self.free_one(),
            42 => self.pair(),
            43 if self.context.rng.one_in(3) => self.drain(),
            43 => drop(self.check_snapshot()),
            44..48 => self.host_access(),
            48 | 49 => self.trim(),
            50 => self.change_settings(),
            51..54 => self.process_pending(),
            54 | 55 => self.capture(),
            56..59 => self.replay(),
            59 => self.drop_graph(),
            60 => {
                self.machine.synchronize();
                self.machine.check_contents();
            }
            61 => self.invalid_calls(),
            62 => {
                let stream = &self.streams[self.context.rng.below(self.streams.len())].0;
                match self.context.rng.below(3) {
                    0 => self.machine.host_callback(stream),
                    way => self.machine.pause_or_resume(stream, way == 1),
                }
            }
            _ => self.machine.wait_for(&self.streams[self.context.rng.below(self.streams.len())].0),
        }
    }

    pub fn process_pending(&mut self) {
        self.context.step("process pending frees");
        let _ = self.machine.call(self.context, || self.host.process_pending());
    }

    fn change_settings(&mut self) {
        let mut settings = draw_settings(&mut self.context.rng);
        settings.use_cuda_host_register &= self.bytes_max <= MIB;
        settings.reserve_segment_bytes = self.host.settings().reserve_segment_bytes;
        self.context.step(format!("{settings:?}"));
        self.host.set_settings(settings.clone());
        self.allowed = Allowed::new(&settings, &self.host.stats());
    }

    /// Callbacks that panic when that is armed.
    fn attach_callbacks(&mut self) {
        let observers = self.host.observers();
        if self.context.rng.one_in(4) {
            let panics = self.machine.panics.clone();
            observers.attach_tracker(&warpool::memory::report::Action::ALL, Arc::new(move |_, _: &_| panics.pass()));
        }
        if self.context.rng.one_in(4) {
            let panics = self.machine.panics.clone();
            observers.attach_pressure_callback(Arc::new(move |_| {
                panics.pass();
                false
            }));
        }
        if self.context.rng.one_in(4) {
            let panics = self.machine.panics.clone();
            observers.attach_trim_hook(Arc::new(move |_| panics.pass()));
        }
    }

    /// Frees everything, closes everything, and checks that nothing is left.
    fn finish(mut self) {
        self.context.step("the end");
        while !self.graphs.is_empty() {
            self.drop_graph();
        }
        while !self.live.is_empty() {
            self.free_one();
        }
        self.drain();
        for (_, scratch) in &self.streams {
            self.machine.synchronize();
            self.machine.sim.mem_free(*scratch).unwrap();
        }
        for device in 0..DEVICES {
            self.memory.trim(device_id(device), MemPoolId::DEFAULT).unwrap();
        }
        self.check();
        let Self { machine, host, memory, streams, .. } = self;
        host.close().unwrap();
        assert_eq!(machine.sim.object_counts().bytes_pinned, 0, "pinned after everything was closed");
        drop((memory, streams));
        machine.close(false);
    }
}

fn draw_settings(rng: &mut Rng) -> PinnedSettings {
    PinnedSettings {
        use_cuda_host_register: rng.one_in(10),
        num_register_threads: rng.pick(&[1, 2]),
        reserve_segment_bytes: rng.pick(&[0, 0, 0, 8 * MIB]),
        max_round_threshold_bytes: rng.one_in(4).then(|| rng.pick(&[0, 64 * KIB, 2 * MIB])),
        max_cached_bytes: rng.one_in(4).then(|| rng.pick(&[16 * KIB, MIB, 8 * MIB])),
        free_catch_all: rng.one_in(4),
        cap_bytes: rng.one_in(2).then(|| rng.pick(&[2, 24, 64, 150]) * MIB),
        device_cap_bytes: rng.one_in(4).then(|| rng.pick(&[2, 20, 70]) * MIB),
        ..PinnedSettings::default()
    }
}
