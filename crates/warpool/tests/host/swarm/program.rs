//! The steps of a random program, each correct by itself: work of streams on a block is ordered, and recorded or waited
//! for before the block is freed. So an overwritten tag, or a hazard that the device reports, is a bug of the
//! allocator.

use std::collections::BTreeSet;
use std::sync::Arc;

use warpool::graph::{Graph, GraphOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, HostAllocator, Settings};
use warpool::{Error, Stream};
use warpool_testing::FailingSeed;

use super::allocator_steps::random_settings;
use super::capture::Captured;
use super::devices::{DEVICES, Devices, parts, pattern};
use super::model::{LiveBlock, Model};
use crate::common::rng::Rng;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// How often each operation happened.
#[derive(Debug, Default)]
pub struct Counts {
    pub allocations: u64,
    pub uses: u64,
    pub pauses: u64,
    /// Blocks that were freed while streams might still use them.
    pub pending: u64,
    pub trims: u64,
    /// Requests that a cap refused.
    pub refusals: u64,
    /// Blocks that were freed and reused without a driver call.
    pub pairs: u64,
    pub captures: u64,
    pub replays: u64,
    pub pinned: u64,
}

/// A running program.
pub struct Run<'a> {
    pub devices: Devices,
    pub host: HostAllocator,
    /// The allocator of the graphs.
    pub device_memory: Arc<CachingAllocator>,
    pub model: Model,
    pub graphs: Vec<Captured>,
    pub next_graph: u32,
    next_tag: u32,
    /// The size of the largest request.
    pub max: u64,
    pub rng: Rng,
    pub failing: FailingSeed,
    pub counts: &'a mut Counts,
}

/// Runs one program.
pub fn run(seed: u64, counts: &mut Counts) {
    let mut rng = Rng::new(seed);
    let devices = Devices::new(seed);
    let settings = random_settings(&mut rng);
    let host = HostAllocator::new(&devices.instance, settings.clone());
    let device_memory = Arc::new(CachingAllocator::new(&devices.instance, Settings::default()));
    let mut failing = FailingSeed::new(seed);
    failing.push(format!("{settings:?}"));
    let model = Model::new(rng.one_in(2));
    let max = if settings.use_cuda_host_register { 4 * MIB } else { rng.pick(&[64 * KIB, 4 * MIB, 64 * MIB]) };
    let graphs = Vec::new();
    let mut run =
        Run { devices, host, device_memory, model, graphs, next_graph: 1, next_tag: 1, max, rng, failing, counts };
    run.model.set_caps(settings.cap_bytes, settings.device_cap_bytes, &run.host.stats());
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
            26..36 => self.free_one(),
            36..38 => self.host_access(),
            38..41 => self.pair(),
            41..44 => self.pause_or_resume(),
            44..47 => self.pass_time(),
            47..49 => self.drain(),
            49..51 => self.trim(),
            51 => self.change_settings(),
            52 => self.invalid_requests(),
            53 => self.process_pending(),
            54..57 => self.capture(),
            57..61 => self.replay(),
            61 | 62 => self.drop_graph(),
            _ => {
                self.model.check_snapshot(&self.devices, &self.host);
            }
        }
    }

    fn check(&mut self) {
        self.model.graphs = self.graphs.len();
        self.model.check(&self.devices, &self.host);
        let settings = self.host.settings();
        self.model.lower_allowed(settings.cap_bytes, settings.device_cap_bytes, &self.host.stats());
    }

    pub fn tag(&mut self) -> u32 {
        self.next_tag += 1;
        // Every byte differs from that of the next tag.
        self.next_tag.wrapping_mul(0x0103_0507)
    }

    /// A size of any order of magnitude, often at a limit, often one that was used before.
    pub fn bytes(&mut self) -> u64 {
        let max = self.max;
        let bytes = match self.rng.below(8) {
            0 => self.rng.pick(&[1, 64, 512, 513, 4096, 64 * KIB, MIB, MIB + 1, 2 * MIB]),
            1 => self.rng.pick(&[700, 3000, 100_000, 300_000, 3 * MIB]),
            _ => {
                let power = self.rng.below(max.ilog2() as usize + 1);
                (1 << power) + self.rng.u64() % (1 << power)
            }
        };
        bytes.min(max)
    }

    pub fn any_stream(&mut self) -> usize {
        self.rng.below(self.devices.streams.len())
    }

    fn allocate(&mut self) {
        let bytes = self.bytes();
        let Some(live) = self.try_allocate(bytes) else { return };
        self.model.live.push(live);
    }

    /// An allocated block that holds its tag.
    fn try_allocate(&mut self, bytes: u64) -> Option<LiveBlock> {
        let method = self.rng.below(4);
        let device = self
            .devices
            .instance
            .device(u32::try_from(self.rng.below(DEVICES as usize)).expect("a small number"))
            .unwrap();
        let stream = self.any_stream();
        self.failing.push(format!("allocate {bytes}, method {method}, for {} or on stream {stream}", device.id()));
        let outcome = match method {
            0 => self.host.allocate_for(bytes, &device),
            1 => self.host.allocate_on(bytes, &self.devices.streams[stream]),
            _ => self.host.allocate(bytes),
        };
        let block = match outcome {
            Ok(block) => block,
            Err(Error::PinnedCap(report)) => {
                self.failing.push(format!("  refused: {report}"));
                self.counts.refusals += 1;
                assert_eq!(report.bytes_requested, bytes);
                self.check_refusal(bytes, report.device.map(|device| device.0 as usize));
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        self.counts.allocations += 1;
        self.model.allocated(&self.devices, &block, bytes, false);
        let mut live = LiveBlock::new(block, self.tag());
        self.failing.push(format!("  {:#x} at {:x?}", live.tag, live.range()));
        if self.rng.one_in(3) {
            // A stream is the first to use it.
            self.devices.copy_in(live.block.ptr(), bytes, live.tag, stream);
            live.writer = Some(stream);
            self.record(&mut live, stream);
        } else {
            write_tag(&live);
        }
        Some(live)
    }

    /// After a refusal by a cap: unpinning cached segments would not have helped.
    fn check_refusal(&mut self, bytes: u64, device: Option<usize>) {
        self.check();
        if !self.model.nothing_pending() {
            return;
        }
        self.host.trim(0).unwrap();
        let (stats, settings) = (self.host.stats(), self.host.settings());
        match device {
            Some(device) => {
                let cap = settings.device_cap_bytes.expect("refused by a device's cap");
                self.model.expect_justified(bytes, stats.pinned_bytes_by_device[device], cap);
            }
            None => {
                let cap = settings.cap_bytes.expect("refused by the cap over all devices");
                self.model.expect_justified(bytes, stats.allocated_bytes.current, cap);
            }
        }
    }

    /// Records a use by a stream, through the block or by address, if it was not recorded yet.
    fn record(&mut self, live: &mut LiveBlock, stream: usize) {
        if !live.recorded.insert(stream) && !self.rng.one_in(4) {
            return;
        }
        let to = &self.devices.streams[stream];
        if self.rng.one_in(3) {
            assert!(self.host.record_use_at(live.block.ptr(), to).unwrap(), "a live block");
        } else {
            live.block.record_use(to).unwrap();
        }
    }

    /// A stream reads or writes a block, ordered with other streams that use it.
    fn use_on_stream(&mut self) {
        if self.model.live.is_empty() {
            return;
        }
        let (at, stream) = (self.rng.below(self.model.live.len()), self.any_stream());
        // Graphs only read their blocks, and may be replayed at any time.
        let mut live = self.model.live.swap_remove(at);
        let writes = live.graph.is_none() && self.rng.one_in(2);
        let tag = if writes { self.tag() } else { live.tag };
        self.failing.push(format!("stream {stream} {} {:#x}", if writes { "writes" } else { "reads" }, live.tag));
        let early = self.rng.one_in(2);
        if early {
            self.record(&mut live, stream);
        }
        let before: BTreeSet<usize> = if writes { live.users() } else { live.writer.into_iter().collect() };
        for other in before.into_iter().filter(|&other| other != stream) {
            self.devices.streams[stream].wait_stream(&self.devices.streams[other]).unwrap();
        }
        let (ptr, bytes) = (live.block.ptr(), live.block.bytes());
        if writes {
            live.tag = tag;
            self.devices.copy_in(ptr, bytes, tag, stream);
            // This one waits for the others.
            live.readers.clear();
            live.writer = Some(stream);
        } else {
            self.devices.copy_out(ptr, bytes, tag, stream);
            live.readers.insert(stream);
        }
        if !early {
            self.record(&mut live, stream);
        }
        self.model.live.push(live);
        self.counts.uses += 1;
    }

    /// The host reads a block, or writes to it, after waiting for its users.
    fn host_access(&mut self) {
        if self.model.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.model.live.len());
        let mut live = self.model.live.swap_remove(at);
        self.failing.push(format!("the host reads {:#x}", live.tag));
        self.wait_for_users(&mut live);
        expect_tag(&live);
        if live.graph.is_none() && self.rng.one_in(2) {
            live.tag = self.tag();
            write_tag(&live);
        }
        self.model.live.push(live);
    }

    fn wait_for_users(&mut self, live: &mut LiveBlock) {
        for stream in live.users() {
            self.devices.wait_for(stream);
        }
        live.readers.clear();
        live.writer = None;
    }

    fn free_one(&mut self) {
        if self.model.live.is_empty() {
            return;
        }
        let at = self.rng.below(self.model.live.len());
        let live = self.model.live.swap_remove(at);
        self.free(live, true);
    }

    /// Frees or drops a block. Graphs that use it keep it.
    pub fn free(&mut self, mut live: LiveBlock, may_wait: bool) {
        if may_wait && self.rng.one_in(4) {
            self.wait_for_users(&mut live);
        }
        if live.users().is_empty() {
            expect_tag(&live);
        }
        let drops = self.rng.one_in(2);
        self.failing.push(format!(
            "{} {:#x}, recorded {:?}",
            if drops { "drop" } else { "free" },
            live.tag,
            live.recorded
        ));
        let range = live.range();
        let recorded = live.recorded.clone();
        let events = self.model.record_events(&self.devices, &recorded);
        self.counts.pending += u64::from(!events.is_empty());
        if drops {
            drop(live.block);
        } else {
            live.block.free().unwrap();
        }
        let later_events = self.model.record_events(&self.devices, &recorded);
        self.model.freed(range, events, later_events, drops);
    }

    fn pause_or_resume(&mut self) {
        let stream = self.any_stream();
        if self.devices.is_paused(stream) {
            self.failing.push(format!("resume stream {stream}"));
            self.devices.resume_stream(stream);
        } else {
            self.failing.push(format!("pause stream {stream}"));
            self.devices.pause_stream(stream);
            self.counts.pauses += 1;
        }
    }

    fn pass_time(&mut self) {
        let stream = self.any_stream();
        match self.rng.below(3) {
            0 if self.devices.is_paused(stream) => {
                let count = 1 + self.rng.below(4) as u64;
                self.failing.push(format!("run {count} operations of stream {stream}"));
                self.devices.sim.run_paused(self.devices.streams[stream].id(), count).unwrap();
            }
            0 | 1 => {
                self.failing.push(format!("query stream {stream}"));
                self.devices.streams[stream].query().unwrap();
            }
            _ if !self.devices.is_paused(stream) => {
                self.failing.push(format!("wait for stream {stream}"));
                self.devices.wait_for(stream);
            }
            _ => {}
        }
    }

    pub fn stream(&self, index: usize) -> Stream {
        self.devices.streams[index].clone()
    }

    /// Frees everything. Nothing is left.
    fn finish(mut self) {
        self.failing.push("finish".into());
        while !self.graphs.is_empty() {
            self.drop_graph();
        }
        while let Some(live) = self.model.live.pop() {
            self.free(live, true);
            self.check();
        }
        for stream in self.devices.paused.clone() {
            self.devices.resume_stream(stream);
        }
        self.drain();
        let reserved = self.host.settings().reserve_segment_bytes;
        self.host.trim(0).unwrap();
        let left = self.devices.sim.object_counts().bytes_pinned;
        assert!(left <= reserved, "{left} bytes are left pinned");
        self.counts.pinned += self.host.stats().num_host_alloc;
        self.host.close().unwrap();
        let memory: Arc<dyn DeviceAllocator> = self.device_memory.clone();
        for device in self.devices.instance.devices() {
            // Destroys what dropped graphs left.
            Graph::new(&memory, &device, GraphOptions::default()).unwrap().reset().unwrap();
        }
        self.devices.expect_clean(std::mem::take(&mut self.model.events));
    }
}

/// The host writes a block's tag.
pub fn write_tag(live: &LiveBlock) {
    for (offset, len) in parts(live.block.bytes()) {
        live.block.write(offset, &pattern(live.tag, len)).unwrap();
    }
}

/// The host checks a block's tag. No stream may be using it.
fn expect_tag(live: &LiveBlock) {
    for (offset, len) in parts(live.block.bytes()) {
        let mut read = vec![0; usize::try_from(len).expect("a small number")];
        live.block.read(offset, &mut read).unwrap();
        assert_eq!(read, pattern(live.tag, len), "at {offset} of the block with tag {:#x}", live.tag);
    }
}
