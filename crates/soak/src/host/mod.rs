//! Programs over pinned host memory: contents written by the host and by copies, uses on several streams and devices,
//! caps, trims, changed settings, graphs.
//!
//! The programs are correct: work of streams on a block is ordered, and recorded or waited for before the block is
//! freed.

mod blocks;
mod graphs;

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool::Stream;
use warpool::driver::{DevicePtr, Memory as _};
use warpool::memory::{CachingAllocator, DeviceAllocator as _, HostAllocator, MemPoolId, PinnedSettings, Settings};

use self::blocks::Live;
use self::graphs::HostGraph;
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
    /// The ranges of live blocks: start and end.
    ranges: BTreeMap<u64, u64>,
    graphs: Vec<HostGraph>,
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
        next_tag: 1,
        bytes_max,
    };
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
            30..44 => self.free_one(),
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

    fn check(&mut self) {
        self.host.check();
        let stats = self.host.stats();
        let live = self.live.len() as u64;
        let active = stats.active_requests.current;
        assert!(active >= live, "{active} active requests, and the program has {live} blocks");
        let bytes: u64 = self.live.iter().map(|live| live.block.bytes_usable()).sum();
        let active = stats.active_bytes.current;
        assert!(active >= bytes, "{active} active bytes, and the program has {bytes}");
        assert!(stats.allocated_bytes.current >= active, "{active} active bytes of {:?}", stats.allocated_bytes);
        let by_device: u64 = stats.pinned_bytes_by_device.iter().sum();
        assert_eq!(stats.allocated_bytes.current, by_device, "pinned bytes, and their sum over the devices");
        let pinned = self.machine.sim.object_counts().bytes_pinned;
        assert!(pinned >= stats.allocated_bytes.current, "the driver has pinned {pinned}: {stats:?}");
        if self.context.counts.faults == 0 {
            assert_eq!(pinned, stats.allocated_bytes.current, "what the driver has pinned, and the statistic");
        }
    }

    fn trim(&mut self) {
        let pinned = self.host.stats().allocated_bytes.current;
        let target = if self.context.rng.one_in(2) { 0 } else { self.context.rng.u64_in(0..=pinned) };
        self.context.step(format!("trim to {target} of {pinned}"));
        let _ = self.machine.call(self.context, || self.host.trim(target));
    }

    fn process_pending(&mut self) {
        self.context.step("process pending frees");
        let _ = self.machine.call(self.context, || self.host.process_pending());
    }

    fn change_settings(&mut self) {
        let mut settings = draw_settings(&mut self.context.rng);
        settings.use_cuda_host_register &= self.bytes_max <= MIB;
        settings.reserve_segment_bytes = self.host.settings().reserve_segment_bytes;
        self.context.step(format!("{settings:?}"));
        self.host.set_settings(settings);
    }

    /// Callbacks that panic when that is armed.
    fn attach_callbacks(&mut self) {
        let observers = self.host.observers();
        if self.context.rng.one_in(4) {
            let panics = self.machine.panics.clone();
            observers.attach_tracker(&warpool::memory::Action::ALL, Arc::new(move |_, _: &_| panics.pass()));
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
        cap_bytes: rng.one_in(3).then(|| rng.pick(&[2, 24, 64, 150]) * MIB),
        device_cap_bytes: rng.one_in(4).then(|| rng.pick(&[2, 20, 70]) * MIB),
        ..PinnedSettings::default()
    }
}
