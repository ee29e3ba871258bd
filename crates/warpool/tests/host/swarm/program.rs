//! The steps of a random program, each correct by itself: what streams do with a block is in order, and recorded or
//! waited for before the block goes back. So any tag that is gone, and any hazard that the device reports, is the
//! allocator's doing.

use std::collections::BTreeSet;
use std::sync::Arc;

use warpool::graph::{Graph, GraphOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, HostAllocator, Settings};
use warpool::{Error, Stream};

use super::capture::Captured;
use super::machine::{DEVICES, Machine, parts, pattern};
use super::model::{Held, Model};
use super::whole::draw_settings;
use crate::common::failing_seed::FailingSeed;
use crate::common::rng::Rng;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// How often each thing happened.
#[derive(Debug, Default)]
pub struct Tally {
    pub allocations: u64,
    pub uses: u64,
    pub held: u64,
    /// Blocks that went back while streams might still use them.
    pub waited: u64,
    pub trims: u64,
    /// Requests that a cap refused.
    pub caps: u64,
    /// Blocks that were given back and came again, without the driver.
    pub pairs: u64,
    pub captures: u64,
    pub replays: u64,
    pub pinned: u64,
}

/// A program under way.
pub struct Run<'a> {
    pub machine: Machine,
    pub host: HostAllocator,
    /// For the graphs.
    pub device_memory: Arc<CachingAllocator>,
    pub model: Model,
    pub graphs: Vec<Captured>,
    pub next_graph: u32,
    next_tag: u32,
    /// The largest request.
    pub most: u64,
    pub rng: Rng,
    pub failing: FailingSeed,
    pub tally: &'a mut Tally,
}

/// One program.
pub fn run(seed: u64, tally: &mut Tally) {
    let mut rng = Rng::new(seed);
    let machine = Machine::new(seed);
    let settings = draw_settings(&mut rng);
    let host = HostAllocator::new(&machine.instance, settings.clone());
    let device_memory = Arc::new(CachingAllocator::new(&machine.instance, Settings::default()));
    let mut failing = FailingSeed::new(seed);
    failing.push(format!("{settings:?}"));
    let model = Model::new(rng.one_in(2));
    let most = if settings.use_cuda_host_register { 4 * MIB } else { rng.pick(&[64 * KIB, 4 * MIB, 64 * MIB]) };
    let graphs = Vec::new();
    let mut run =
        Run { machine, host, device_memory, model, graphs, next_graph: 1, next_tag: 1, most, rng, failing, tally };
    run.model.capped(settings.cap_bytes, settings.device_cap_bytes, &run.host.stats());
    for _ in 0..30 + run.rng.below(60) {
        run.step();
        run.check();
    }
    run.finish();
}

impl Run<'_> {
    fn step(&mut self) {
        match self.rng.below(64) {
            0..16 => self.allocate(),
            16..26 => self.use_on_stream(),
            26..36 => self.give_back_one(),
            36..38 => self.touch(),
            38..41 => self.pair(),
            41..44 => self.hold_or_let_go(),
            44..47 => self.pass_time(),
            47..49 => self.settle(),
            49..51 => self.trim(),
            51 => self.change_settings(),
            52 => self.ask_nonsense(),
            53 => self.process_pending(),
            54..57 => self.capture(),
            57..61 => self.replay(),
            61 | 62 => self.drop_graph(),
            _ => {
                self.model.check_snapshot(&self.machine, &self.host);
            }
        }
    }

    fn check(&mut self) {
        self.model.graphs = self.graphs.len();
        self.model.check(&self.machine, &self.host);
        let settings = self.host.settings();
        self.model.tighten(settings.cap_bytes, settings.device_cap_bytes, &self.host.stats());
    }

    pub fn tag(&mut self) -> u32 {
        self.next_tag += 1;
        // Every byte of it differs from the next one's.
        self.next_tag.wrapping_mul(0x0103_0507)
    }

    /// A size: of every order of magnitude, often at an edge, often one that was seen.
    pub fn bytes(&mut self) -> u64 {
        let most = self.most;
        let bytes = match self.rng.below(8) {
            0 => self.rng.pick(&[1, 64, 512, 513, 4096, 64 * KIB, MIB, MIB + 1, 2 * MIB]),
            1 => self.rng.pick(&[700, 3000, 100_000, 300_000, 3 * MIB]),
            _ => {
                let power = self.rng.below(most.ilog2() as usize + 1);
                (1 << power) + self.rng.u64() % (1 << power)
            }
        };
        bytes.min(most)
    }

    pub fn any_stream(&mut self) -> usize {
        self.rng.below(self.machine.streams.len())
    }

    fn allocate(&mut self) {
        let bytes = self.bytes();
        let Some(held) = self.try_allocate(bytes) else { return };
        self.model.held.push(held);
    }

    /// A block with its tag in it.
    fn try_allocate(&mut self, bytes: u64) -> Option<Held> {
        let way = self.rng.below(4);
        let device =
            self.machine.instance.device(u32::try_from(self.rng.below(DEVICES as usize)).expect("few")).unwrap();
        let stream = self.any_stream();
        self.failing.push(format!("allocate {bytes}, way {way}, for {} or on stream {stream}", device.id()));
        let outcome = match way {
            0 => self.host.allocate_for(bytes, &device),
            1 => self.host.allocate_on(bytes, &self.machine.streams[stream]),
            _ => self.host.allocate(bytes),
        };
        let block = match outcome {
            Ok(block) => block,
            Err(Error::PinnedCap(report)) => {
                self.failing.push(format!("  refused: {report}"));
                self.tally.caps += 1;
                assert_eq!(report.bytes_requested, bytes);
                self.judge_refusal(bytes, report.device.map(|device| device.0 as usize));
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        self.tally.allocations += 1;
        self.model.gave(&self.machine, &block, bytes, false);
        let mut held = Held::new(block, self.tag());
        self.failing.push(format!("  {:#x} at {:x?}", held.tag, held.range()));
        if self.rng.one_in(3) {
            // A stream is the first to touch it.
            self.machine.copy_in(held.block.ptr(), bytes, held.tag, stream);
            held.writer = Some(stream);
            self.record(&mut held, stream);
        } else {
            write(&held);
        }
        Some(held)
    }

    /// After a cap stood in the way: nothing that could have been given back would have helped.
    fn judge_refusal(&mut self, bytes: u64, device: Option<usize>) {
        self.check();
        if !self.model.nobody_waits() {
            return;
        }
        self.host.trim(0).unwrap();
        let (stats, settings) = (self.host.stats(), self.host.settings());
        match device {
            Some(device) => {
                let cap = settings.device_cap_bytes.expect("a device's cap refused it");
                self.model.refusal_is_right(bytes, stats.pinned_bytes_by_device[device], cap);
            }
            None => {
                let cap = settings.cap_bytes.expect("the cap on all refused it");
                self.model.refusal_is_right(bytes, stats.allocated_bytes.current, cap);
            }
        }
    }

    /// Tells the allocator of a stream, in one way or the other, if it was not told.
    fn record(&mut self, held: &mut Held, stream: usize) {
        if !held.recorded.insert(stream) && !self.rng.one_in(4) {
            return;
        }
        let to = &self.machine.streams[stream];
        if self.rng.one_in(3) {
            assert!(self.host.record_use_at(held.block.ptr(), to).unwrap(), "its own block is not known");
        } else {
            held.block.record_use(to).unwrap();
        }
    }

    /// A stream reads or writes a block, in order with the others that do.
    fn use_on_stream(&mut self) {
        if self.model.held.is_empty() {
            return;
        }
        let (at, stream) = (self.rng.below(self.model.held.len()), self.any_stream());
        // Graphs may be replayed over those, and only read them.
        let mut held = self.model.held.swap_remove(at);
        let writes = held.graph.is_none() && self.rng.one_in(2);
        let tag = if writes { self.tag() } else { held.tag };
        self.failing.push(format!("stream {stream} {} {:#x}", if writes { "writes over" } else { "reads" }, held.tag));
        let early = self.rng.one_in(2);
        if early {
            self.record(&mut held, stream);
        }
        let before: BTreeSet<usize> = if writes { held.users() } else { held.writer.into_iter().collect() };
        for other in before.into_iter().filter(|&other| other != stream) {
            self.machine.streams[stream].wait_stream(&self.machine.streams[other]).unwrap();
        }
        let (ptr, bytes) = (held.block.ptr(), held.block.bytes());
        if writes {
            held.tag = tag;
            self.machine.copy_in(ptr, bytes, tag, stream);
            // The others came before, so waiting for this one is waiting for them.
            held.readers.clear();
            held.writer = Some(stream);
        } else {
            self.machine.copy_out(ptr, bytes, tag, stream);
            held.readers.insert(stream);
        }
        if !early {
            self.record(&mut held, stream);
        }
        self.model.held.push(held);
        self.tally.uses += 1;
    }

    /// The host looks at a block, or writes to it, once it is its own again.
    fn touch(&mut self) {
        if self.model.held.is_empty() {
            return;
        }
        let at = self.rng.below(self.model.held.len());
        let mut held = self.model.held.swap_remove(at);
        self.failing.push(format!("the host looks at {:#x}", held.tag));
        self.wait_for_users(&mut held);
        look(&held);
        if held.graph.is_none() && self.rng.one_in(2) {
            held.tag = self.tag();
            write(&held);
        }
        self.model.held.push(held);
    }

    fn wait_for_users(&mut self, held: &mut Held) {
        for stream in held.users() {
            self.machine.wait_for(stream);
        }
        held.readers.clear();
        held.writer = None;
    }

    fn give_back_one(&mut self) {
        if self.model.held.is_empty() {
            return;
        }
        let at = self.rng.below(self.model.held.len());
        let held = self.model.held.swap_remove(at);
        self.give_back(held, true);
    }

    /// Gives a block back, freed or dropped. Blocks that graphs have too stay theirs.
    pub fn give_back(&mut self, mut held: Held, may_wait: bool) {
        if may_wait && self.rng.one_in(4) {
            self.wait_for_users(&mut held);
        }
        if held.users().is_empty() {
            look(&held);
        }
        let drops = self.rng.one_in(2);
        self.failing.push(format!(
            "{} {:#x}, recorded {:?}",
            if drops { "drop" } else { "free" },
            held.tag,
            held.recorded
        ));
        let range = held.range();
        let recorded = held.recorded.clone();
        let marks = self.model.mark(&self.machine, &recorded);
        self.tally.waited += u64::from(!marks.is_empty());
        if drops {
            drop(held.block);
        } else {
            held.block.free().unwrap();
        }
        let behind = self.model.mark(&self.machine, &recorded);
        self.model.went(range, marks, behind, drops);
    }

    fn hold_or_let_go(&mut self) {
        let stream = self.any_stream();
        if self.machine.is_held(stream) {
            self.failing.push(format!("stream {stream} goes on"));
            self.machine.let_go(stream);
        } else {
            self.failing.push(format!("stream {stream} is stuck"));
            self.machine.pause_stream(stream);
            self.tally.held += 1;
        }
    }

    fn pass_time(&mut self) {
        let stream = self.any_stream();
        match self.rng.below(3) {
            0 if self.machine.is_held(stream) => {
                let count = 1 + self.rng.below(4) as u64;
                self.failing.push(format!("{count} pieces of stream {stream} are done"));
                self.machine.sim.run_paused(self.machine.streams[stream].id(), count).unwrap();
            }
            0 | 1 => {
                self.failing.push(format!("ask for stream {stream}"));
                self.machine.streams[stream].query().unwrap();
            }
            _ if !self.machine.is_held(stream) => {
                self.failing.push(format!("wait for stream {stream}"));
                self.machine.wait_for(stream);
            }
            _ => {}
        }
    }

    pub fn stream(&self, index: usize) -> Stream {
        self.machine.streams[index].clone()
    }

    /// Everything goes back, and nothing is left.
    fn finish(mut self) {
        self.failing.push("the end".into());
        while !self.graphs.is_empty() {
            self.drop_graph();
        }
        while let Some(held) = self.model.held.pop() {
            self.give_back(held, true);
            self.check();
        }
        for stream in self.machine.held.clone() {
            self.machine.let_go(stream);
        }
        self.settle();
        let reserved = self.host.settings().reserve_segment_bytes;
        self.host.trim(0).unwrap();
        let left = self.machine.sim.object_counts().bytes_pinned;
        assert!(left <= reserved, "{left} bytes are pinned, for nobody");
        self.tally.pinned += self.host.stats().num_host_alloc;
        self.host.close().unwrap();
        let memory: Arc<dyn DeviceAllocator> = self.device_memory.clone();
        for device in self.machine.instance.devices() {
            // What destructors of graphs left to do.
            Graph::new(&memory, &device, GraphOptions::default()).unwrap().reset().unwrap();
        }
        self.machine.expect_clean(std::mem::take(&mut self.model.marks));
    }
}

/// The host writes a block's tag to it.
pub fn write(held: &Held) {
    for (offset, len) in parts(held.block.bytes()) {
        held.block.write(offset, &pattern(held.tag, len)).unwrap();
    }
}

/// The host looks whether a block's tag is still there. Nobody may be at work on it.
fn look(held: &Held) {
    for (offset, len) in parts(held.block.bytes()) {
        let mut seen = vec![0; usize::try_from(len).expect("a few")];
        held.block.read(offset, &mut seen).unwrap();
        assert_eq!(seen, pattern(held.tag, len), "at {offset} of the block with tag {:#x}", held.tag);
    }
}
