//! Programs over an allocator of device memory, single-threaded: blocks with contents on several streams and devices,
//! pools, limits, checkpoints, captures and replays.
//!
//! The programs are correct: whatever another stream does with a block comes after its owner's work, and is recorded or
//! joined before the block is freed. So any lost tag, and any hazard that the simulation reports, is a defect.

mod blocks;
mod checkpoints;
mod graphs;
mod pages;
mod pools;
mod settings;

use warpool::Stream;
use warpool::memory::DeviceAllocator as _;
use warpool::memory::pools::PoolScope;
use warpool::memory::report::{HistoryOptions, StackLevel};

use self::blocks::Held;
use self::graphs::Graphs;
use self::pages::{Sizes, check_pages};
use self::pools::Pool;
use crate::allocators::{Allocators, Subject};
use crate::context::Context;
use crate::machine::{Machine, device_id};
use crate::table::Table;

const DEVICES: usize = 2;
const MIB: u64 = 1 << 20;

/// The main activity of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Allocates and frees, on any allocator.
    Memory,
    /// Captures and replays.
    Graphs,
    /// The same as `Memory`, on the paged allocator and a device of few pages.
    Pages,
}

struct Run<'a> {
    context: &'a mut Context,
    machine: Machine,
    subject: Subject,
    table: Table,
    held: Vec<Held>,
    graphs: Graphs,
    pools: Vec<Pool>,
    scopes: Vec<PoolScope>,
    /// Streams that take part in the current capture.
    capturing: Vec<Stream>,
    /// The memory limit of each device, if it is known.
    limits: [Option<u64>; DEVICES],
    /// Whether each device may access the other's memory.
    peers: bool,
    next_tag: u32,
    devices: usize,
    streams: usize,
    sizes: Sizes,
    /// Of a small device: the bytes of all pages that it has room for, and of those that may be reserved now.
    capacity_of_pages: u64,
    limit_of_pages: u64,
    /// Whether pages that nobody needs return to the driver.
    decays: bool,
}

/// Runs one program.
pub fn run(context: &mut Context, mix: Mix) {
    let (devices, streams, capacity) = match mix {
        Mix::Pages => (1, 4, context.rng.pick(&[40, 80, 160]) * MIB),
        _ => (DEVICES, 3, 0),
    };
    // Without suballocation reports, requests that nothing disturbs take a shorter path.
    let is_told = mix != Mix::Pages || !context.rng.one_in(3);
    let mut machine = Machine::with(context, devices as u32, streams, |config| {
        config.track_suballocations = is_told;
        if mix == Mix::Pages {
            // Beside the pages there is room for the context and the tags.
            config.devices[0].properties.bytes_total = capacity + 4 * MIB;
        }
    });
    machine.tags_every_page = mix == Mix::Pages;
    let allocators = match mix {
        Mix::Pages => Allocators::Paged,
        Mix::Graphs if !context.seed.is_multiple_of(8) => Allocators::Caching,
        _ => Allocators::All,
    };
    let context_seed = context.seed;
    let subject = Subject::draw(context, &machine, allocators);
    let sizes = if mix == Mix::Pages { Sizes::draw(&mut context.rng, capacity) } else { Sizes::Classes };
    let mut run = Run {
        context,
        machine,
        subject,
        table: Table::new(devices),
        devices,
        streams,
        sizes,
        capacity_of_pages: capacity,
        limit_of_pages: capacity,
        // Drawn from the seed, so that the others' steps stay the same.
        decays: mix == Mix::Pages && context_seed % 4 == 3,
        held: Vec::new(),
        graphs: Graphs::default(),
        pools: Vec::new(),
        scopes: Vec::new(),
        capturing: Vec::new(),
        limits: [None; DEVICES],
        peers: false,
        next_tag: 1,
    };
    run.attach_callbacks();
    run.begin_decay();
    for _ in 0..60 + run.context.rng.below(200) {
        match mix {
            Mix::Memory => run.memory_step(),
            Mix::Graphs => run.graph_step(),
            Mix::Pages => run.page_step(),
        }
        run.check();
    }
    run.finish();
}

impl Run<'_> {
    fn memory_step(&mut self) {
        match self.context.rng.below(64) {
            0..20 => self.allocate(),
            20..24 => self.check_tag(),
            24..32 => self.use_elsewhere(),
            32..44 => self.free(),
            44 | 45 => self.trim(),
            46..49 => self.change_pools(),
            49 => self.change_scopes(),
            50 | 51 => self.change_settings(),
            52 => self.change_limits(),
            53 => self.read_state(),
            54 => self.invalid_calls(),
            55 | 56 => self.checkpoint(),
            57 => self.switch_caching(),
            58 => self.capture(),
            59 | 60 => self.replay(),
            61 => self.drop_graph(),
            62 => self.enable_peers(),
            _ if self.context.rng.one_in(2) => self.delay_work(),
            _ => self.synchronize(),
        }
    }

    fn graph_step(&mut self) {
        match self.context.rng.below(32) {
            0..5 => self.allocate(),
            5..9 => self.free(),
            9..11 => self.use_elsewhere(),
            11..16 => self.capture(),
            16..23 => self.replay(),
            23..26 => self.drop_graph(),
            26 => self.trim(),
            27 => self.change_pools(),
            28 => self.change_settings(),
            29 => self.switch_caching(),
            30 => self.check_tag(),
            _ if self.context.rng.one_in(2) => self.delay_work(),
            _ => self.synchronize(),
        }
    }

    /// After every step.
    fn check(&mut self) {
        self.table.check_stats(&*self.subject.allocator);
        if let Some(caching) = &self.subject.caching {
            caching.check();
            for (device, limit) in self.limits.iter().enumerate() {
                let reserved = caching.stats(device_id(device)).unwrap().reserved_bytes.all.current;
                assert!(limit.is_none_or(|limit| reserved <= limit), "{reserved} bytes, the limit is {limit:?}");
            }
            if self.context.rng.one_in(8) {
                self.table.check_snapshot(&*self.subject.allocator);
            }
        }
        if let Some(paged) = &self.subject.paged {
            paged.check();
            if self.is_of_pages() {
                check_pages(paged, device_id(0));
            }
        }
    }

    /// Whether the program is one of the paged allocator on a small device.
    fn is_of_pages(&self) -> bool {
        self.capacity_of_pages > 0
    }

    /// Statistics, snapshots and the history can be read at any time.
    fn read_state(&mut self) {
        let device = self.context.rng.below(self.devices);
        let allocator = &self.subject.allocator;
        match self.context.rng.below(4) {
            0 => {
                allocator.reset_peak_stats(device_id(device)).unwrap();
                self.table.reset_peak(device);
            }
            1 => {
                allocator.reset_accumulated_stats(device_id(device)).unwrap();
                self.table.reset_accumulated(device);
            }
            2 => {
                let entries_max = self.context.rng.pick(&[1, 10, 1000]);
                let stacks = self.context.rng.pick(&[StackLevel::Never, StackLevel::Alloc, StackLevel::All]);
                let options = HistoryOptions { entries_max, stacks, ..HistoryOptions::default() };
                allocator.record_history(self.context.rng.one_in(2).then_some(options)).unwrap();
            }
            _ => {
                allocator.snapshot(Default::default()).unwrap();
                let _ = allocator.largest_available(device_id(device)).unwrap();
            }
        }
    }

    fn synchronize(&mut self) {
        let device = self.context.rng.below(self.devices);
        match self.context.rng.below(4) {
            0 => {
                self.machine.synchronize();
                self.machine.check_contents();
            }
            1 => {
                let pool = self.machine.device(device).event_pool();
                let _ = self.machine.call(self.context, || pool.trim());
            }
            _ => self.machine.wait_for(self.machine.stream(device, self.context.rng.below(self.streams))),
        }
    }

    /// Pauses or resumes a stream, or queues a host callback in it.
    fn delay_work(&mut self) {
        let device = self.context.rng.below(self.devices);
        let stream = self.machine.stream(device, self.context.rng.below(self.streams));
        match self.context.rng.below(3) {
            0 => self.machine.host_callback(stream),
            way => self.machine.pause_or_resume(stream, way == 1),
        }
    }

    /// Trackers and other callbacks, which panic when that is armed.
    fn attach_callbacks(&mut self) {
        let rng = &mut self.context.rng;
        let observers = self.subject.allocator.observers();
        if rng.one_in(4) {
            let panics = self.machine.panics.clone();
            observers.attach_oom_observer(std::sync::Arc::new(move |_| panics.pass()));
        }
        if rng.one_in(4) {
            let panics = self.machine.panics.clone();
            observers.attach_pressure_callback(std::sync::Arc::new(move |_| {
                panics.pass();
                false
            }));
        }
        if rng.one_in(4) {
            let panics = self.machine.panics.clone();
            observers.attach_trim_hook(std::sync::Arc::new(move |_| panics.pass()));
        }
        if rng.one_in(4) {
            let panics = self.machine.panics.clone();
            let tracker = std::sync::Arc::new(move |_, _: &_| panics.pass());
            observers.attach_tracker(&warpool::memory::report::Action::ALL, tracker);
        }
        if rng.one_in(8) {
            let panics = self.machine.panics.clone();
            let hook = std::sync::Arc::new(move || {
                panics.pass();
                None
            });
            observers.set_stack_hook(Some(hook));
        }
    }

    /// Frees everything, closes everything, and checks that nothing is left.
    fn finish(mut self) {
        self.context.step("the end");
        self.scopes.clear();
        while self.graphs.count() > 0 {
            self.drop_graph();
        }
        for held in std::mem::take(&mut self.held) {
            self.free_held(held);
        }
        self.pools.clear();
        self.graphs = Graphs::default();
        for device in 0..self.devices {
            self.subject.allocator.trim(device_id(device), warpool::memory::MemPoolId::DEFAULT).unwrap();
        }
        if let Some(caching) = &self.subject.caching {
            caching.check();
            for device in 0..self.devices {
                let reserved = caching.stats(device_id(device)).unwrap().reserved_bytes.all.current;
                assert_eq!(reserved, 0, "reserved on device {device} at the end");
            }
        }
        if let Some(paged) = &self.subject.paged {
            paged.check();
            for device in 0..self.devices {
                let left = paged.page_stats(device_id(device)).unwrap();
                assert_eq!(left.reserved_bytes, 0, "reserved on device {device} at the end: {left:?}");
                self.context.made_many("page taken", left.totals.taken);
                self.context.made_many("page taken back", left.totals.taken_back);
                self.context.made_many("old mapping undone", left.totals.unmapped);
            }
        }
        self.table.check_empty(&*self.subject.allocator);
        if let Some(limited) = &self.subject.limited {
            assert_eq!(limited.bytes_allocated(), 0, "allocated by the limiting decorator at the end");
        }
        let Self { machine, subject, .. } = self;
        let Subject { allocator, caching, paged, limited, external, .. } = subject;
        let keeps_addresses = paged.is_some();
        drop((allocator, caching, paged, limited));
        if let Some(external) = &external {
            external.check_empty();
        }
        drop(external);
        machine.close(keeps_addresses);
    }
}
