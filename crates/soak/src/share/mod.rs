//! Several allocators that share one small card, each in a simulation of its own as processes have (`card.rs`): they
//! allocate, commit elastic memory, free, give what is idle, are started, end, and are killed, at every step of each
//! other's calls, with faults.
//!
//! Beside contents, hazards and leaks, these are violations:
//! - the driver has less than a process was granted;
//! - a process that has had what it is guaranteed does not get it again;
//! - idle memory that others would have to give is not given, or that of processes that ended is missing.

mod card;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use warpool::driver::decorate::Hooked;
use warpool::memory::elastic::{ElasticLayout, ElasticRange};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::settings::ShareSettings;
use warpool::memory::{DeviceAllocator, MemPoolId, PagedAllocator, Settings};
use warpool::share::LedgerPages;

use self::card::{Card, PartOfCard, Points};
use crate::caught::inject_panic;
use crate::context::Context;
use crate::counts::{Counts, Kinds};
use crate::machine::{Machine, Outcome, device_id};
use crate::rng::Rng;

const MIB: u64 = 1 << 20;
/// All requests are multiples of the smallest page: so what a process needs is known.
const SLOT: u64 = 2 * MIB;
const PROCESSES: usize = 3;
const STREAMS: usize = 2;
const BLOCKS: u64 = 16;
/// What a simulation has beside the card, for the context and the kernels that check contents.
const BESIDE: u64 = 64 * MIB;

struct World {
    card: Arc<Card>,
    /// The processes that are not in a call.
    processes: [Mutex<Option<Box<Process>>>; PROCESSES],
    /// The processes that are in a call: each is at a point of that call while the next one runs.
    calls: Mutex<Vec<u64>>,
    rng: Mutex<Rng>,
    /// How many points of the current call may be used yet.
    uses_left: AtomicU64,
    /// All that is asked for is given, as in the end.
    all_answer: AtomicBool,
    /// How many processes were killed.
    killed: AtomicU64,
    /// What processes that ended have counted.
    counted: Mutex<(Counts, Kinds)>,
}

struct Process {
    context: Context,
    number: u64,
    machine: Machine,
    part: Arc<Hooked<PartOfCard>>,
    paged: Arc<PagedAllocator>,
    allocator: Arc<dyn DeviceAllocator>,
    terms: ShareSettings,
    /// Live blocks, with their tags and streams.
    blocks: Vec<(Allocation, u32, usize)>,
    range: Option<ElasticRange>,
    /// The tag of each committed block.
    tags: Vec<Option<u32>>,
    next_tag: u32,
    /// It has had what it is guaranteed. Before, others may still have it.
    has_had: bool,
    decays: bool,
    is_killed: bool,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let bytes = SLOT * context.rng.pick(&[24, 40, 96]);
    context.step(format!("a card of {bytes} bytes"));
    let world = Arc::new(World {
        card: Card::new(bytes),
        processes: Default::default(),
        calls: Mutex::default(),
        rng: Mutex::new(Rng::new(context.rng.u64())),
        uses_left: AtomicU64::new(0),
        all_answer: AtomicBool::new(false),
        killed: AtomicU64::new(0),
        counted: Mutex::default(),
    });
    let points: Arc<dyn Points> = Arc::clone(&world) as _;
    world.card.set_points(Arc::downgrade(&points));
    let mut next = 0;
    for _ in 0..60 + context.rng.below(120) {
        world.step(context, &mut next, bytes);
    }
    world.finish(context, bytes);
    let (counts, kinds) = std::mem::take(&mut *lock(&world.counted));
    context.counts += counts;
    kinds.into_iter().for_each(|(kind, times)| context.made_many(kind, times));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Points for World {
    fn reached(&self, process: u64) {
        if std::thread::panicking() || lock(&self.calls).last() != Some(&process) {
            return;
        }
        let drawn = lock(&self.rng).below(400);
        if drawn > 12 || self.uses_left.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.uses_left.fetch_sub(1, Ordering::Relaxed);
        if drawn == 0 {
            inject_panic();
        }
        let at = lock(&self.rng).below(PROCESSES);
        self.with_process(at, |process| {
            process.context.made("in another call");
            process.act(self);
        });
    }

    fn looked_at_clock(&self, process: u64) {
        if std::thread::panicking() || lock(&self.calls).last() != Some(&process) {
            return;
        }
        let all = self.all_answer.load(Ordering::Relaxed);
        if all || lock(&self.rng).one_in(16) {
            (0..PROCESSES).for_each(|at| self.with_process(at, |process| process.answer(self, all)));
        }
        self.reached(process);
    }
}

impl World {
    /// Runs one that is not in a call. If it is killed, nothing is left of it but its memory.
    fn with_process(&self, at: usize, act: impl FnOnce(&mut Process)) {
        let Some(mut process) = lock(&self.processes[at]).take() else { return };
        act(&mut process);
        if process.is_killed {
            self.kill(*process);
        } else {
            *lock(&self.processes[at]) = Some(process);
        }
    }

    fn kill(&self, process: Process) {
        process.context.step(format!("{} is killed", process.number));
        self.card.ended(process.number);
        process.part.hook().end();
        self.killed.fetch_add(1, Ordering::Relaxed);
        self.count(process.context);
    }

    fn count(&self, context: Context) {
        let mut counted = lock(&self.counted);
        counted.0 += context.counts;
        for (kind, times) in context.kinds {
            *counted.1.entry(kind).or_default() += times;
        }
    }

    fn step(&self, context: &mut Context, next: &mut u64, bytes: u64) {
        self.uses_left.store(2, Ordering::Relaxed);
        if context.rng.one_in(6) {
            self.card.reclaim();
        }
        let at = context.rng.below(PROCESSES);
        let is_there = lock(&self.processes[at]).is_some();
        if !is_there {
            *next += 1;
            let started = Process::start(context, &self.card, *next, bytes);
            *lock(&self.processes[at]) = Some(Box::new(started));
            context.made("started");
            self.with_process(at, |process| process.join(self));
        } else if context.rng.one_in(60) {
            let process = lock(&self.processes[at]).take().expect("it is there");
            context.made("ended");
            self.end(*process);
        } else if context.rng.one_in(60) {
            self.with_process(at, |process| {
                process.context.made("killed");
                process.is_killed = true;
            });
        } else {
            self.with_process(at, |process| process.act(self));
        }
    }

    /// It gives everything back and ends.
    fn end(&self, mut process: Process) {
        process.context.step(format!("{} ends", process.number));
        process.free_all();
        let Process { context, number, machine, part, paged, allocator, range, .. } = process;
        range.inspect(|range| allocator.elastic().expect("it has elastic memory").release(range));
        machine.synchronize();
        paged.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        paged.check();
        let pages = paged.page_stats(device_id(0)).unwrap();
        assert_eq!((pages.active_bytes, pages.reserved_bytes), (0, 0), "{pages:?}");
        drop((paged, allocator));
        self.card.ended(number);
        part.hook().end();
        machine.close(true);
        self.count(context);
    }

    /// Nothing is live any more: one process after the other gets what the others need not keep, and the last one
    /// everything.
    fn finish(&self, context: &Context, bytes: u64) {
        context.step("the end");
        self.uses_left.store(0, Ordering::Relaxed);
        self.all_answer.store(true, Ordering::Relaxed);
        self.card.reclaim();
        let mut left: Vec<Box<Process>> = self.processes.iter().filter_map(|process| lock(process).take()).collect();
        left.iter_mut().for_each(|process| process.free_all());
        // Others do not give to lower priorities.
        left.sort_by_key(|process| process.terms.priority);
        while let Some(mut process) = left.pop() {
            let guaranteed: u64 = left.iter().map(|other| other.terms.guaranteed_bytes).sum();
            // Beyond what is guaranteed, a part is left for memory that no allocator has.
            let left_outside = ((bytes + BESIDE) / 32).next_multiple_of(SLOT);
            let most = (bytes - guaranteed - left_outside).max(process.terms.guaranteed_bytes);
            let most = most.min(process.terms.limit_bytes.unwrap_or(u64::MAX));
            for (slot, other) in self.processes.iter().zip(left.drain(..)) {
                *lock(slot) = Some(other);
            }
            process.take_all(self, most);
            left.extend(self.processes.iter().filter_map(|other| lock(other).take()));
            left.sort_by_key(|process| process.terms.priority);
            self.end(*process);
        }
    }
}

impl Process {
    fn start(context: &mut Context, card: &Arc<Card>, number: u64, bytes: u64) -> Self {
        let seed = context.rng.u64();
        let mut own = Context::new(seed, context.steps.clone(), &context.skip, context.broken);
        let pages = card.add(number);
        let mut part = None;
        let capacity = |config: &mut warpool::driver::sim::SimConfig| {
            config.devices[0].properties.bytes_total = bytes + BESIDE;
        };
        let machine = Machine::decorated(&own, 1, STREAMS, capacity, |sim| {
            let hooked = Arc::new(Hooked::with_hook(sim.clone(), PartOfCard::new(&pages, &sim)));
            part = Some(Arc::clone(&hooked));
            hooked
        });
        let rng = &mut own.rng;
        let terms = ShareSettings {
            enabled: true,
            guaranteed_bytes: SLOT * rng.u64_below(bytes / SLOT / PROCESSES as u64),
            limit_bytes: rng.one_in(4).then_some(bytes / 2),
            priority: rng.u64_below(2),
            reclaim_ms: 1,
        };
        let decays = rng.one_in(3);
        let settings = Settings { share: terms.clone(), idle_decay_ms: decays.then_some(1), ..Settings::default() };
        own.step(format!("{number} starts: {terms:?}, decays: {decays}"));
        let paged = Arc::new(PagedAllocator::new(&machine.instance, settings).unwrap());
        paged.set_page_sizes(u64::MAX, u64::MAX);
        let pages: Arc<dyn LedgerPages> = pages;
        paged.share(&pages).unwrap();
        let (allocator, part) = (paged.clone(), part.expect("it was made"));
        Self {
            context: own,
            number,
            machine,
            part,
            paged,
            allocator,
            terms,
            blocks: Vec::new(),
            range: None,
            tags: vec![None; BLOCKS as usize],
            next_tag: 0,
            has_had: false,
            decays,
            is_killed: false,
        }
    }

    fn join(&mut self, world: &World) {
        let layout = ElasticLayout { rows: 1, blocks: BLOCKS, block_bytes: SLOT };
        let stream = self.machine.stream(0, 0).id();
        let reserve = |allocator: &Arc<dyn DeviceAllocator>| allocator.elastic()?.reserve(device_id(0), stream, layout);
        if let Outcome::Done(range) = self.call(world, reserve) {
            self.range = Some(range);
        }
    }

    fn step(&self, step: impl std::fmt::Display) {
        self.context.step(format!("{}: {step}", self.number));
    }

    /// A call under test, at each point of which others may run, or the process is killed.
    fn call<T>(
        &mut self,
        world: &World,
        call: impl FnOnce(&Arc<dyn DeviceAllocator>) -> warpool::Result<T>,
    ) -> Outcome<T> {
        lock(&world.calls).push(self.number);
        let outcome = self.machine.call(&mut self.context, || call(&self.allocator));
        assert_eq!(lock(&world.calls).pop(), Some(self.number), "calls end in reverse order");
        if matches!(outcome, Outcome::Panicked) {
            self.context.made("killed in a call");
            self.is_killed = true;
        }
        if let Some(full) = self.part.hook().full() {
            panic!("the driver had less than process {} was granted: {full}", self.number);
        }
        outcome
    }

    fn live(&self) -> u64 {
        let blocks: u64 = self.blocks.iter().map(|(block, ..)| block.bytes_requested).sum();
        blocks + SLOT * self.tags.iter().flatten().count() as u64
    }

    /// One call.
    fn act(&mut self, world: &World) {
        match self.context.rng.below(32) {
            0..12 => self.allocate(world),
            12..18 => self.free(),
            18..21 => self.commit(world),
            21..23 => self.decommit(world),
            23 => {
                self.step("trim");
                self.call(world, |allocator| allocator.trim(device_id(0), MemPoolId::DEFAULT));
            }
            24 => {
                let (stream, pause) = (self.context.rng.below(STREAMS), self.context.rng.one_in(2));
                self.machine.pause_or_resume(self.machine.stream(0, stream), pause);
            }
            25 => {
                let micros = self.context.rng.pick(&[50, 200, 2000]);
                self.machine.sim.pass_time(Duration::from_micros(micros));
                self.answer(world, false);
            }
            26..28 => self.machine.wait_for(self.machine.stream(0, self.context.seed as usize % STREAMS)),
            _ => self.answer(world, false),
        }
        if !self.is_killed {
            self.paged.check();
            self.machine.check_hazards();
            let reserved = self.paged.page_stats(device_id(0)).unwrap().reserved_bytes;
            let limit = self.terms.limit_bytes.unwrap_or(u64::MAX);
            assert!(reserved <= limit, "process {} has {reserved}, and its limit is {limit}", self.number);
        }
    }

    /// What its thread does.
    fn answer(&mut self, world: &World, plainly: bool) {
        let released = if plainly {
            Outcome::Done(self.paged.release_idle(device_id(0)).unwrap())
        } else {
            self.call(world, |allocator| allocator.release_idle(device_id(0)))
        };
        if let Outcome::Done(bytes @ 1..) = released {
            self.step(format!("gave {bytes}"));
            self.context.made(if self.decays { "decayed or given" } else { "given" });
        }
    }

    /// What is guaranteed does not fail, unless a process that ended still has memory, or a driver call failed; nor
    /// while others are in the middle of a call.
    fn expect_shortage(&self, before: (usize, u64, bool), world: &World, bytes: u64) {
        let (injected, killed, is_alone) = before;
        let guaranteed = self.terms.guaranteed_bytes.min(self.terms.limit_bytes.unwrap_or(u64::MAX));
        let is_excused = !is_alone
            || self.machine.faulty.injected().len() > injected
            || world.killed.load(Ordering::Relaxed) > killed
            || world.card.has_remains();
        assert!(
            is_excused || !self.has_had || self.live() + bytes > guaranteed,
            "process {} has {} live and asked for {bytes}, of {guaranteed} that are guaranteed: {}",
            self.number,
            self.live(),
            world.card.describe()
        );
    }

    fn before(&self, world: &World) -> (usize, u64, bool) {
        let is_alone = lock(&world.calls).is_empty();
        (self.machine.faulty.injected().len(), world.killed.load(Ordering::Relaxed), is_alone)
    }

    fn got(&mut self) {
        self.has_had |= self.live() >= self.terms.guaranteed_bytes;
    }

    fn new_tag(&mut self) -> u32 {
        self.next_tag += 1;
        self.next_tag
    }

    fn allocate(&mut self, world: &World) {
        let (stream, slots) = (self.context.rng.below(STREAMS), self.context.rng.pick(&[1, 1, 2, 3, 5, 8, 13]));
        let bytes = slots * SLOT;
        self.step(format!("allocate {bytes} on stream {stream}"));
        let (request, before) =
            (Request::new(device_id(0), self.machine.stream(0, stream).id(), bytes), self.before(world));
        match self.call(world, |allocator| allocator.allocate_raw(request)) {
            Outcome::Done(block) => {
                self.context.counts.allocations += 1;
                let tag = self.new_tag();
                self.machine.write_pages(block.ptr, bytes, tag, self.machine.stream(0, stream));
                self.blocks.push((block, tag, stream));
                self.got();
            }
            Outcome::OutOfMemory { .. } => self.expect_shortage(before, world, bytes),
            Outcome::Faulted | Outcome::Panicked => {}
        }
    }

    fn free(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let (block, tag, stream) = self.blocks.swap_remove(self.context.rng.below(self.blocks.len()));
        self.step(format!("free {} bytes", block.bytes_requested));
        self.machine.check_pages(block.ptr, block.bytes_requested, tag, self.machine.stream(0, stream));
        self.allocator.free(block).unwrap();
    }

    fn any_blocks(&mut self) -> Range<u64> {
        let from = self.context.rng.u64_below(BLOCKS);
        from..(from + self.context.rng.u64_in(1..=6)).min(BLOCKS)
    }

    /// All changes of the range are in its own stream.
    fn commit(&mut self, world: &World) {
        let (Some(range), blocks) = (self.range, self.any_blocks()) else { return };
        self.step(format!("commit {blocks:?}"));
        let new = blocks.clone().filter(|&block| self.tags[block as usize].is_none()).count() as u64;
        let (wanted, before) = (blocks.clone(), self.before(world));
        match self.call(world, |allocator| allocator.elastic()?.commit(&range, range.stream, wanted.clone())) {
            Outcome::Done(()) => {
                self.context.made("commit");
                for block in blocks {
                    if self.tags[block as usize].is_none() {
                        let tag = self.new_tag();
                        self.tags[block as usize] = Some(tag);
                        let ptr = range.ptr.offset(block * SLOT);
                        self.machine.write_pages(ptr, SLOT, tag, self.machine.stream(0, 0));
                    }
                    self.check_block(block);
                }
                self.got();
            }
            Outcome::OutOfMemory { .. } => self.expect_shortage(before, world, new * SLOT),
            Outcome::Faulted | Outcome::Panicked => {}
        }
    }

    fn check_block(&self, block: u64) {
        if let (Some(range), Some(tag)) = (self.range, self.tags[block as usize]) {
            let ptr = range.ptr.offset(block * SLOT);
            self.machine.check_pages(ptr, SLOT, tag, self.machine.stream(0, 0));
        }
    }

    fn decommit(&mut self, world: &World) {
        let (Some(range), blocks) = (self.range, self.any_blocks()) else { return };
        self.step(format!("decommit {blocks:?}"));
        blocks.clone().for_each(|block| self.check_block(block));
        let wanted = blocks.clone();
        let done = self.call(world, |allocator| allocator.elastic()?.decommit(&range, range.stream, wanted.clone()));
        if let Outcome::Done(()) = done {
            blocks.for_each(|block| self.tags[block as usize] = None);
        }
    }

    /// Frees everything, and checks contents.
    fn free_all(&mut self) {
        while !self.blocks.is_empty() {
            self.free();
        }
        if let Some(range) = self.range {
            (0..BLOCKS).for_each(|block| self.check_block(block));
            self.allocator.elastic().unwrap().decommit(&range, range.stream, 0..BLOCKS).unwrap();
            self.tags.fill(None);
        }
        self.machine.streams[0].iter().for_each(|stream| self.machine.pause_or_resume(stream, false));
        self.machine.synchronize();
        self.machine.check_contents();
        self.paged.check();
    }

    /// A request for all that the others need not keep.
    fn take_all(&mut self, world: &World, bytes: u64) {
        self.step(format!("takes {bytes}"));
        let request = Request::new(device_id(0), self.machine.stream(0, 0).id(), bytes);
        lock(&world.calls).push(self.number);
        let block = self.allocator.allocate_raw(request);
        lock(&world.calls).pop();
        let entries = || world.card.describe();
        let block = block.unwrap_or_else(|error| {
            panic!("what nobody needs is not given to {}: {error} The entries: {}", self.number, entries())
        });
        self.allocator.free(block).unwrap();
        self.context.made("all");
    }
}
