//! A random program of one thread that uses its memory. Every block gets a tag from its owner's stream, which is
//! checked there, from other streams, and once more before the block is freed.
//!
//! The programs are correct: whatever another stream does with a block comes after its owner's work, and is recorded or
//! joined before the block is freed.

mod blocks;
mod graphs;
mod pools;

use warpool_testing::{FailingSeed, Rng};

use self::blocks::{Held, Sizes};
use self::graphs::Graphs;
use self::pools::Pools;
use super::machine::{DEVICE, Machine, Outcome};
use super::model::Model;
use crate::defect::Defect;
use crate::memory::{DeviceAllocator as _, MemPoolId, Settings};
use crate::{Result, Stream};

pub const STREAMS: usize = 4;

/// How often each operation happened.
#[derive(Debug, Default)]
pub struct Tally {
    pub allocations: u64,
    pub uses: u64,
    pub captures: u64,
    pub launches: u64,
    pub pools: u64,
    pub ooms: u64,
    pub faults: u64,
    /// Pages that were taken, taken back, and old mappings that were undone.
    pub taken: u64,
    pub taken_back: u64,
    pub unmapped: u64,
}

impl Tally {
    pub fn least(&self) -> u64 {
        let Self { allocations, uses, captures, launches, pools, ooms, faults, taken, taken_back, unmapped } = *self;
        let all = [allocations, uses, captures, launches, pools, ooms, faults, taken, taken_back, unmapped];
        all.into_iter().min().unwrap_or(0)
    }
}

struct Run<'a> {
    machine: Machine,
    model: Model,
    held: Vec<Held>,
    graphs: Graphs,
    pools: Pools,
    /// Streams that take part in the current capture.
    capturing: Vec<Stream>,
    /// Whether driver calls fail.
    faults: bool,
    limit: u64,
    sizes: Sizes,
    next_tag: u32,
    rng: Rng,
    failing: FailingSeed,
    tally: &'a mut Tally,
}

/// One program. Panics on a defect.
pub fn run(seed: u64, tally: &mut Tally) {
    if let Some(defect) = defect_of(seed, tally) {
        panic!("WARPOOL_SWARM_SEED={seed}: {defect}");
    }
}

/// One program. Returns what the simulation saw: a lost tag or a hazard.
pub fn defect_of(seed: u64, tally: &mut Tally) -> Option<String> {
    let mut rng = Rng::new(seed);
    let settings = Settings { paged_slack: rng.pick(&[0.0, 0.0, 10.0]), ..Settings::default() };
    let machine = Machine::new(seed, STREAMS, settings);
    let (limit, sizes) = (machine.capacity, Sizes::draw(&mut rng, machine.capacity));
    let mut run = Run {
        machine,
        model: Model::default(),
        held: Vec::new(),
        graphs: Graphs::default(),
        pools: Pools::default(),
        capturing: Vec::new(),
        faults: rng.one_in(2),
        limit,
        sizes,
        next_tag: 1,
        rng,
        failing: FailingSeed::unless(seed, Defect::any_is_on),
        tally,
    };
    for _ in 0..60 + run.rng.below(120) {
        run.step();
        run.model.check(&run.machine.paged);
    }
    run.finish()
}

impl Run<'_> {
    fn step(&mut self) {
        match self.rng.below(64) {
            0..22 => self.allocate(),
            22..24 => self.check_tag(),
            24..29 => self.use_elsewhere(),
            29..46 => self.free(),
            46 | 47 => self.trim(),
            48..51 => self.change_pools(),
            51 => self.change_scopes(),
            52 => self.change_limits(),
            53..55 => self.capture(),
            55..59 => self.launch(),
            59 => self.destroy_graph(),
            60 => self.reset_peak(),
            61 => self.pause(),
            _ => self.synchronize(),
        }
    }

    /// Makes a call of the allocator; in some programs driver calls fail in some.
    fn call<T>(&mut self, call: impl FnOnce(&Machine) -> Result<T>) -> Outcome<T> {
        let plan = (self.faults && self.rng.one_in(6)).then(|| Machine::draw_plan(&mut self.rng));
        let before = self.machine.faulty.injected().len();
        let outcome = self.machine.call(plan, || call(&self.machine));
        let injected = self.machine.faulty.injected().split_off(before);
        if !injected.is_empty() {
            self.failing.push(format!("  faults: {injected:?}"));
        }
        self.tally.faults += injected.len() as u64;
        outcome
    }

    fn is_capturing(&self, stream: &Stream) -> bool {
        self.capturing.contains(stream)
    }

    /// A stream that takes no part in a capture.
    fn idle_stream(&mut self) -> Option<Stream> {
        let idle: Vec<usize> = (0..STREAMS).filter(|&at| !self.is_capturing(&self.machine.streams[at])).collect();
        (!idle.is_empty()).then(|| self.machine.streams[self.rng.pick(&idle)].clone())
    }

    fn trim(&mut self) {
        let target = if self.rng.one_in(2) { 0 } else { self.rng.u64_below(self.machine.capacity) };
        self.failing.push(format!("trim to {target}"));
        match target {
            0 => self.call(|machine| machine.paged.trim(DEVICE, MemPoolId::DEFAULT)),
            _ => self.call(|machine| machine.paged.trim_to(DEVICE, target)),
        };
    }

    fn change_limits(&mut self) {
        self.limit = self.machine.capacity / 4 * self.rng.u64_in(2..=4);
        self.failing.push(format!("at most {} bytes", self.limit));
        self.machine.paged.set_memory_cap(DEVICE, Some(self.limit)).unwrap();
    }

    fn reset_peak(&mut self) {
        self.failing.push("reset peaks".to_owned());
        self.machine.paged.reset_peak_stats(DEVICE).unwrap();
        self.model.reset_peak();
    }

    /// The work of a stream is delayed, or goes on.
    fn pause(&mut self) {
        let stream = self.machine.streams[self.rng.below(STREAMS)].id();
        self.failing.push(format!("pause or resume {stream}"));
        match self.rng.below(2) {
            0 => self.machine.sim.pause_stream(stream).unwrap(),
            _ => self.machine.sim.resume_stream(stream).unwrap(),
        }
    }

    fn synchronize(&mut self) {
        let Some(stream) = self.idle_stream() else { return };
        self.failing.push(format!("wait for {}", stream.id()));
        stream.synchronize().unwrap();
    }

    /// Frees everything and gives everything back.
    fn finish(mut self) -> Option<String> {
        self.failing.push("the end".to_owned());
        self.faults = false;
        self.pools.scopes.clear();
        while !self.graphs.all.is_empty() {
            self.destroy_graph();
        }
        for held in std::mem::take(&mut self.held) {
            self.free_held(held);
        }
        for pool in std::mem::take(&mut self.pools.ids) {
            self.release_pool(pool);
        }
        self.machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        self.model.check(&self.machine.paged);
        let pages = self.machine.paged.page_stats(DEVICE).unwrap();
        assert_eq!((pages.active_bytes, pages.reserved_bytes), (0, 0), "active and reserved at the end: {pages:?}");
        self.tally.taken += pages.totals.taken;
        self.tally.taken_back += pages.totals.taken_back;
        self.tally.unmapped += pages.totals.unmapped;
        self.machine.finish()
    }
}
