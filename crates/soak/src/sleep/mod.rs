//! Tags that sleep and wake while driver calls fail, waits and copies included, with graphs, limits and trims. In half
//! of the programs segments are larger than the chunks that contents are copied in, and of odd sizes; in the others
//! memory is short. A naive model has the contents of every block.

mod graphs;

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool::driver::Call;
use warpool::driver::ErrorCode;
use warpool::driver::decorate::FaultPlan;
use warpool::graph::{Graph, GraphOptions};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::sleep::{Keep, SleepReport, TagState};
use warpool::memory::{
    CachingAllocator, DeviceAllocator, HostAllocator, MemPoolId, PagedAllocator, PinnedSettings, Settings, Tags,
};
use warpool::{Error, Result};

use self::graphs::Captured;
use crate::caught::{Caught, caught};
use crate::context::Context;
use crate::machine::{Machine, device_id};
use crate::rng::Rng;

const MIB: u64 = 1 << 20;
const STREAMS: usize = 3;
const TAGS: [&str; 3] = ["weights", "cache", "graphs"];
/// The tag that graphs are captured into.
const GRAPHS: usize = 2;

/// Calls that put memory to sleep and wake it.
const CALLS: [Call; 8] = [
    Call::VmCreate,
    Call::VmMap,
    Call::VmSetAccess,
    Call::VmUnmap,
    Call::VmRelease,
    Call::Copy,
    Call::StreamSynchronize,
    Call::DeviceSynchronize,
];

struct Run<'a> {
    context: &'a mut Context,
    machine: Machine,
    allocator: Arc<dyn DeviceAllocator>,
    caching: Option<Arc<CachingAllocator>>,
    paged: Option<Arc<PagedAllocator>>,
    host: HostAllocator,
    tags: Tags,
    blocks: BTreeMap<u32, Block>,
    /// The tags that sleep, and what they keep.
    asleep: BTreeMap<usize, Keep>,
    graphs: Vec<Captured>,
    next_value: u32,
    /// Whether memory is short, and requests are small.
    is_small: bool,
}

struct Block {
    allocation: Allocation,
    /// `None` without a tag.
    tag: Option<usize>,
    stream: usize,
    /// The value in its pages; `None` if they are zeroed.
    value: Option<u32>,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let is_small = context.rng.one_in(2);
    let capacity = context.rng.pick(if is_small { &[80, 120, 240] } else { &[400, 700, 1200] }) * MIB;
    let is_told = context.rng.one_in(2);
    let machine = Machine::with(context, 1, STREAMS, |config| {
        config.track_suballocations = is_told;
        config.devices[0].properties.bytes_total = capacity;
        // So that memory that was not zeroed is detected.
        config.fresh_byte = 0xa5;
    });
    let settings = Settings { expandable_segments: context.rng.one_in(2), ..Settings::default() };
    let is_paged = context.rng.one_in(3);
    context.step(format!("{capacity} bytes, paged {is_paged}, {}", settings.to_conf_string()));
    let (mut caching, mut paged) = (None, None);
    let allocator: Arc<dyn DeviceAllocator> = if is_paged {
        paged.insert(Arc::new(PagedAllocator::new(&machine.instance, settings).unwrap())).clone()
    } else {
        caching.insert(Arc::new(CachingAllocator::new(&machine.instance, settings))).clone()
    };
    let caps = if is_small { [8, 24, 60] } else { [100, 100, 100] };
    let cap_bytes = context.rng.one_in(5).then(|| context.rng.pick(&caps) * MIB);
    let host = HostAllocator::new(&machine.instance, PinnedSettings { cap_bytes, ..PinnedSettings::default() });
    let tags = Tags::new(&allocator, &host).unwrap();
    TAGS.iter().for_each(|name| drop(tags.tag(&machine.device(0), name).unwrap()));
    let mut run = Run {
        context,
        machine,
        allocator,
        caching,
        paged,
        host,
        tags,
        blocks: BTreeMap::new(),
        asleep: BTreeMap::new(),
        graphs: Vec::new(),
        next_value: 1,
        is_small,
    };
    for _ in 0..(if is_small { 30 } else { 10 }) + run.context.rng.below(20) {
        run.step();
        run.check();
    }
    run.finish();
}

/// Mostly more than the 64 MiB of a copy chunk, and of odd size.
fn draw_bytes(rng: &mut Rng) -> u64 {
    let odd = 4 * rng.u64_below(MIB / 4);
    match rng.below(8) {
        0 => 1 + rng.u64_below(3 * MIB),
        1 | 2 => (2 + rng.u64_below(20)) * MIB + odd,
        3 => rng.pick(&[63, 64, 127, 128]) * MIB,
        4 => (256 + rng.u64_below(3)) * MIB + odd,
        _ => (64 + rng.u64_below(70)) * MIB + odd,
    }
}

impl Run<'_> {
    fn step(&mut self) {
        match self.context.rng.below(24) {
            0..6 => self.allocate(),
            6..8 => self.free(),
            8..10 => self.use_block(),
            10..14 => self.sleep(),
            14..18 => self.wake(),
            18 => self.capture(),
            19 | 20 => self.replay(),
            21 => self.limit_or_trim(),
            22 => {
                let (stream, pause) = (self.context.rng.below(STREAMS), self.context.rng.one_in(2));
                self.context.step(format!("stream {stream} is paused: {pause}"));
                self.machine.pause_or_resume(self.machine.stream(0, stream), pause);
            }
            _ => {
                self.machine.synchronize();
                self.machine.check_contents();
            }
        }
    }

    fn check(&self) {
        self.machine.check_hazards();
        if let Some(caching) = &self.caching {
            caching.check();
        }
        if let Some(paged) = &self.paged {
            paged.check();
        }
        self.host.check();
        let (mut physical, mut tagged) = (0, 0);
        for info in self.tags.info() {
            physical += info.bytes_device;
            tagged += info.bytes;
            let at = TAGS.iter().position(|name| *name == info.tag).expect("one of the tags");
            let is_asleep = matches!(info.state, TagState::Asleep { .. });
            assert_eq!(is_asleep, self.asleep.contains_key(&at), "whether {} sleeps", info.tag);
        }
        let asleep = self.allocator.stats(device_id(0)).unwrap().asleep_bytes.all.current;
        assert!(asleep + physical >= tagged, "{asleep} bytes sleep, {physical} are awake, of {tagged}");
    }

    fn is_asleep(&self, block: &Block) -> bool {
        self.sleeps(block.tag)
    }

    fn sleeps(&self, tag: Option<usize>) -> bool {
        tag.is_some_and(|tag| self.asleep.contains_key(&tag))
    }

    fn allocate(&mut self) {
        let mut tag = (!self.context.rng.one_in(5)).then(|| self.context.rng.below(TAGS.len()));
        // Replays use what their capture freed, which the pool gives to later requests.
        if tag == Some(GRAPHS) && !self.graphs.is_empty() {
            tag = Some(0);
        }
        let bytes = match self.is_small {
            true => self.context.rng.pick(&[100, 5000, MIB, 3 * MIB, 12 * MIB, 30 * MIB]),
            false => draw_bytes(&mut self.context.rng),
        };
        let stream = self.context.rng.below(STREAMS);
        self.context.step(format!("allocate {bytes} for {tag:?} on stream {stream}"));
        self.context.counts.operations += 1;
        let id = self.machine.stream(0, stream).id();
        let request = Request::new(device_id(0), id, bytes);
        let outcome = self.in_scope(tag, |allocator| allocator.allocate_raw(request));
        match outcome {
            Ok(allocation) => {
                assert!(!self.sleeps(tag), "a sleeping tag serves no request");
                self.context.counts.allocations += 1;
                self.next_value += 1;
                let (value, to) = (self.next_value, self.machine.stream(0, stream));
                self.context.step(format!("  block {value} at {}", allocation.ptr));
                self.machine.write_pages(allocation.ptr, bytes, value, to);
                self.blocks.insert(value, Block { allocation, tag, stream, value: Some(value) });
            }
            Err(Error::TagAsleep { .. }) if self.sleeps(tag) => self.context.made("refused"),
            Err(Error::OutOfMemory(_)) if !self.sleeps(tag) => self.context.counts.out_of_memory += 1,
            Err(error) => panic!("an error without a fault: {error}"),
        }
    }

    /// Runs a call in the scope of a tag.
    fn in_scope<T>(&self, tag: Option<usize>, call: impl FnOnce(&dyn DeviceAllocator) -> Result<T>) -> Result<T> {
        let Some(tag) = tag else { return call(&*self.allocator) };
        let tag = self.tags.tag(&self.machine.device(0), TAGS[tag])?;
        let _scope = tag.enter()?;
        call(&*self.allocator)
    }

    /// A block that no graph uses.
    fn any_block(&mut self) -> Option<u32> {
        let is_used = |number: u32| self.graphs.iter().any(|graph| graph.uses(number));
        let all: Vec<u32> = self.blocks.keys().copied().filter(|&number| !is_used(number)).collect();
        (!all.is_empty()).then(|| self.context.rng.pick(&all))
    }

    /// Frees a block, also one of a sleeping tag.
    fn free(&mut self) {
        let Some(number) = self.any_block() else { return };
        self.check_block(number);
        self.context.step(format!("free block {number}"));
        let block = self.blocks.remove(&number).expect("it is one of them");
        if self.is_asleep(&block) {
            self.context.made("freed asleep");
        }
        self.allocator.free(block.allocation).unwrap();
    }

    /// Queues a check of a block, and a write.
    fn use_block(&mut self) {
        let Some(number) = self.any_block() else { return };
        self.check_block(number);
        if self.is_asleep(&self.blocks[&number]) {
            return;
        }
        self.next_value += 1;
        let (machine, value) = (&self.machine, self.next_value);
        let block = self.blocks.get_mut(&number).expect("it is one of them");
        let Allocation { ptr, bytes_requested, .. } = block.allocation;
        machine.write_pages(ptr, bytes_requested, value, machine.stream(0, block.stream));
        block.value = Some(value);
        self.context.step(format!("block {number} gets {value}"));
    }

    fn check_block(&self, number: u32) {
        let block = &self.blocks[&number];
        if self.is_asleep(block) {
            return;
        }
        let (Allocation { ptr, bytes_requested, .. }, machine) = (block.allocation, &self.machine);
        let stream = machine.stream(0, block.stream);
        match block.value {
            Some(value) => machine.check_pages(ptr, bytes_requested, value, stream),
            None => machine.check_tag(ptr, bytes_requested, 0, stream),
        }
    }

    fn some_tags(&mut self) -> Vec<usize> {
        match self.context.rng.below(6) {
            3 => vec![0, 1],
            4 => vec![0, 2],
            5 => vec![0, 1, 2],
            one => vec![one],
        }
    }

    /// Makes a call, in which driver calls may fail. Returns which did.
    fn call(&mut self, call: impl FnOnce(&Tags) -> Result<SleepReport>) -> (Result<SleepReport>, Vec<Call>) {
        let rng = &mut self.context.rng;
        let code = rng.pick(&[ErrorCode::OutOfMemory, ErrorCode::Unknown(999)]);
        let plan = match rng.below(8) {
            0 => FaultPlan::new().fail_nth_of_all(1 + rng.u64_below(60), code),
            1 => FaultPlan::new().fail_fraction(&CALLS, 0.1, rng.u64(), code),
            2 => FaultPlan::new().fail_fraction(&[rng.pick(&CALLS)], 0.5, rng.u64(), code),
            3 => FaultPlan::new().fail_fraction(&[rng.pick(&CALLS)], 1.0, 0, code),
            _ => FaultPlan::new(),
        };
        let before = self.machine.faulty.injected().len();
        self.machine.faulty.set_plan(plan);
        self.context.counts.operations += 1;
        let outcome = caught(|| call(&self.tags));
        self.machine.suspend();
        let failed: Vec<Call> = self.machine.faulty.injected()[before..].iter().map(|fault| fault.call).collect();
        self.context.counts.faults += failed.len() as u64;
        match outcome {
            Ok(outcome) => (outcome, failed),
            Err(Caught::Failed(message)) => panic!("{message}"),
            Err(Caught::Injected) => panic!("a panic that nobody injected"),
        }
    }

    fn sleep(&mut self) {
        let tags = self.some_tags();
        let keep = if self.context.rng.one_in(4) { Keep::Discard } else { Keep::Host };
        let names: Vec<&str> = tags.iter().map(|&tag| TAGS[tag]).collect();
        let (outcome, failed) = self.call(|all| all.sleep(&names, keep));
        self.context.step(format!("sleep {names:?}, {keep:?}: {:?}, failed {failed:?}", outcome.as_ref().err()));
        match outcome {
            Ok(report) => {
                let is_complete = report.bytes_not_returned == 0 || !report.unchanged.is_empty();
                assert!(is_complete || !failed.is_empty(), "{report:?}");
                self.context.made(if keep == Keep::Host { "slept" } else { "discarded" });
                tags.into_iter().for_each(|tag| self.fell_asleep(tag, keep));
            }
            Err(Error::Sleep(failure)) if failure.is_undone => self.context.made("sleep failed"),
            Err(Error::Sleep(failure)) => {
                assert!(!failed.is_empty(), "{failure}");
                // They sleep, with all contents.
                tags.into_iter().for_each(|tag| self.fell_asleep(tag, Keep::Host));
            }
            Err(error) => assert!(!failed.is_empty(), "an error without a fault: {error}"),
        }
    }

    /// A tag that sleeps already keeps its contents, unless they are discarded now.
    fn fell_asleep(&mut self, tag: usize, keep: Keep) {
        let was = self.asleep.get(&tag).copied();
        let now = if was == Some(Keep::Discard) { Keep::Discard } else { keep };
        self.asleep.insert(tag, now);
        if now == Keep::Discard {
            self.blocks.values_mut().filter(|block| block.tag == Some(tag)).for_each(|block| block.value = None);
        }
    }

    fn wake(&mut self) {
        let tags = self.some_tags();
        let names: Vec<&str> = tags.iter().map(|&tag| TAGS[tag]).collect();
        let (outcome, failed) = self.call(|all| all.wake(&names));
        self.context.step(format!("wake {names:?}: {:?}, failed {failed:?}", outcome.as_ref().err()));
        match outcome {
            Ok(report) => {
                if !report.changed.is_empty() {
                    self.context.made("woken");
                }
                self.asleep.retain(|tag, _| !tags.contains(tag));
                let woken: Vec<u32> = self.blocks.keys().copied().collect();
                woken.into_iter().for_each(|number| self.check_block(number));
            }
            Err(Error::Sleep(_)) => {
                self.context.made("wake failed");
                self.check_returned(&failed);
            }
            Err(error) => assert!(!failed.is_empty(), "an error without a fault: {error}"),
        }
    }

    /// A failed wake returned the memory that it had created, unless the driver refused that.
    fn check_returned(&self, failed: &[Call]) {
        let returns = [Call::VmUnmap, Call::VmRelease, Call::StreamSynchronize, Call::DeviceSynchronize];
        if failed.iter().any(|call| returns.contains(call)) {
            return;
        }
        for info in self.tags.info() {
            let sleeps = matches!(info.state, TagState::Asleep { .. });
            // An earlier call may have left some.
            assert!(!sleeps || info.bytes_device == 0 || self.context.counts.faults > failed.len() as u64, "{info:?}");
        }
    }

    fn limit_or_trim(&mut self) {
        if self.context.rng.one_in(2) {
            self.context.step("trim");
            self.allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        } else {
            let cap = self.context.rng.pick(&[None, Some(60 * MIB), Some(100 * MIB), Some(400 * MIB)]);
            self.context.step(format!("cap {cap:?}"));
            self.set_cap(cap);
            self.context.made("limited");
        }
    }

    fn set_cap(&self, bytes: Option<u64>) {
        if let Some(caching) = &self.caching {
            caching.set_memory_cap(device_id(0), bytes).unwrap();
        }
        if let Some(paged) = &self.paged {
            paged.set_memory_cap(device_id(0), bytes).unwrap();
        }
    }

    /// Checks and frees the blocks of a tag, or those without one.
    fn free_all_of(&mut self, tag: Option<usize>) {
        let of_tag = self.blocks.iter().filter(|(_, block)| block.tag == tag);
        for number in of_tag.map(|(&number, _)| number).collect::<Vec<u32>>() {
            self.check_block(number);
            let block = self.blocks.remove(&number).expect("it is one of them");
            self.allocator.free(block.allocation).unwrap();
        }
    }

    /// Wakes and checks everything, frees it, and checks that nothing is left.
    fn finish(mut self) {
        self.context.step("the end");
        self.set_cap(None);
        self.machine.synchronize();
        self.graphs.clear();
        self.free_all_of(None);
        // One by one, those that are awake first, since there may be too little memory to wake all at once. For those
        // the call completes what earlier calls could not.
        let mut order: Vec<usize> = (0..TAGS.len()).collect();
        order.sort_by_key(|tag| self.asleep.contains_key(tag));
        for tag in order {
            self.tags.wake(&[TAGS[tag]]).unwrap();
            self.asleep.remove(&tag);
            self.free_all_of(Some(tag));
            self.tags.sleep(&[TAGS[tag]], Keep::Discard).unwrap();
        }
        self.machine.synchronize();
        self.machine.check_contents();
        let Self { machine, allocator, caching, paged, host, tags, .. } = self;
        // Releases what dropped graphs still have.
        Graph::new(&allocator, &machine.device(0), GraphOptions::default()).unwrap().reset().unwrap();
        drop(tags);
        allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        let reserved = allocator.stats(device_id(0)).unwrap().reserved_bytes.all.current;
        assert_eq!(reserved, 0, "reserved at the end");
        host.close().unwrap();
        let keeps_addresses = paged.is_some();
        drop((allocator, caching, paged));
        machine.close(keeps_addresses);
    }
}
