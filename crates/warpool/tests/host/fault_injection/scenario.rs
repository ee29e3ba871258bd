//! A scenario with pinned memory, on a driver with injected faults. It continues after an error.
//!
//! It panics if the counters disagree with the driver, if blocks overlap, if a tag is overwritten, or if a call fails
//! without an injected fault.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{
    CaptureState, Captures as _, Copies as _, DeviceId, DevicePtr, HostMemory as _, HostPtr, Memory as _,
};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, HostAllocator, HostBlock, PinnedSettings, Settings};
use warpool::{Error, Instance, Result, Stream, StreamLease};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
/// The size of each stream's part of a buffer.
const PART: u64 = 64;

/// An allocator on two devices, over a driver with injected faults.
pub struct TestContext {
    pub sim: Arc<SimDriver>,
    pub faulty: Arc<Faulty>,
    instance: Instance,
    pub host: HostAllocator,
    memory: Arc<dyn DeviceAllocator>,
    pub streams: [Stream; 3],
    /// One for each device.
    buffers: [DevicePtr; 2],
    _leases: Vec<StreamLease>,
    /// The allocated ranges, with their tags.
    live: RefCell<Vec<(HostPtr, u64, u8)>>,
    next_tag: Cell<u8>,
    start: ObjectCounts,
}

/// An allocated block with a tag at both ends. Removed from the list when it is freed.
pub struct Tagged<'a> {
    context: &'a TestContext,
    block: Option<HostBlock>,
}

impl Tagged<'_> {
    fn block(&self) -> &HostBlock {
        self.block.as_ref().expect("freed once")
    }

    /// Removes it from the list and checks its tag, through the driver without faults.
    fn remove(&mut self) -> Option<HostBlock> {
        let block = self.block.take()?;
        let mut live = self.context.live.borrow_mut();
        let at = live.iter().position(|(ptr, ..)| *ptr == block.ptr()).expect("it is in the list");
        let (ptr, bytes, tag) = live.swap_remove(at);
        let mut read = [0; 2];
        self.context.sim.host_read(ptr, &mut read[..1]).unwrap();
        self.context.sim.host_read(HostPtr(ptr.0 + bytes - 1), &mut read[1..]).unwrap();
        assert_eq!(read, [tag; 2], "the tag of {bytes} bytes at {ptr}");
        Some(block)
    }

    fn free(mut self) -> Result<()> {
        self.remove().expect("freed once").free()
    }
}

impl Drop for Tagged<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.remove();
        }
    }
}

impl TestContext {
    pub fn new(settings: PinnedSettings) -> Self {
        let mut config = SimConfig::default().with_devices(2).with_capacity(300 * MIB);
        for device in &mut config.devices {
            device.bytes_context = 2 * MIB;
        }
        let sim = Arc::new(SimDriver::new(config));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let devices = [0, 0, 1].map(|index| instance.device(index).unwrap());
        let leases: Vec<StreamLease> = devices.iter().map(|device| device.lease_stream().unwrap()).collect();
        let streams = [0, 1, 2].map(|index: usize| leases[index].stream().clone());
        let buffers = [0, 1].map(|device| sim.mem_alloc(DeviceId(device), 4 * KIB).unwrap());
        for device in instance.devices() {
            device.synchronize().unwrap();
        }
        let memory: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let host = HostAllocator::new(&instance, settings);
        let start = sim.object_counts();
        let (live, next_tag) = (RefCell::default(), Cell::new(1));
        Self { sim, faulty, instance, host, memory, streams, buffers, _leases: leases, live, next_tag, start }
    }

    /// The counters agree with each other and with the driver.
    pub fn check(&self) {
        self.host.check();
        let (stats, counts) = (self.host.stats(), self.sim.object_counts());
        let counted = (stats.allocations.current, stats.allocated_bytes.current);
        assert_eq!(
            counted,
            (counts.pinned as u64, counts.bytes_pinned),
            "{:?}: pinned by the counters, and by the driver",
            self.faulty.injected()
        );
    }

    /// Adds a block to the list, which must not overlap another, and writes its tag without faults.
    fn tagged(&self, block: HostBlock) -> Tagged<'_> {
        let (start, end) = (block.ptr().0, block.ptr().0 + block.bytes_usable());
        let mut live = self.live.borrow_mut();
        let met = live.iter().find(|(ptr, bytes, _)| start < ptr.0 + bytes && ptr.0 < end);
        assert_eq!(met, None, "{:?}: {block:?} overlaps another", self.faulty.injected());
        let tag = self.next_tag.get();
        self.next_tag.set(tag.wrapping_add(1));
        self.sim.host_write(block.ptr(), &[tag]).unwrap();
        self.sim.host_write(HostPtr(end - block.bytes_usable() + block.bytes() - 1), &[tag]).unwrap();
        live.push((block.ptr(), block.bytes(), tag));
        Tagged { context: self, block: Some(block) }
    }

    fn allocate(&self, bytes: u64) -> Result<Tagged<'_>> {
        let block = self.host.allocate(bytes);
        self.check();
        Ok(self.tagged(block?))
    }

    /// A stream copies from a block, after the use was recorded.
    fn use_on(&self, block: &Tagged<'_>, stream: usize) -> Result<()> {
        block.block().record_use(&self.streams[stream])?;
        let buffer = self.buffers[self.streams[stream].device_id().0 as usize].offset(PART * stream as u64);
        Ok(self.faulty.copy(buffer.into(), block.block().ptr().into(), 1, self.streams[stream].id())?)
    }

    /// Runs all parts. Errors are ignored if `tolerant`.
    pub fn scenario(&self, tolerant: bool) {
        let expect = |outcome: Result<()>| match outcome {
            Err(error) if !tolerant => panic!("no fault was injected: {error}"),
            _ => self.check(),
        };
        expect(self.sizes());
        expect(self.devices());
        expect(self.uses());
        expect(self.caps());
        expect(self.changed_settings());
        expect(self.capture());
        expect(self.host.process_pending());
        expect(self.host.trim(3 * MIB).map(drop));
        expect(self.host.trim(0).map(drop));
    }

    fn sizes(&self) -> Result<()> {
        let mut outcome = Ok(());
        let mut blocks = Vec::new();
        for bytes in [1, 700, 5 * KIB, 200 * KIB, 300 * KIB, MIB, 3 * MIB, 200 * KIB] {
            match self.allocate(bytes) {
                Ok(block) => blocks.push(block),
                Err(error) => outcome = Err(error),
            }
        }
        // Through the driver with faults: an error, or what was written.
        if let Some(block) = blocks.last() {
            let written = block.block().write(1, &[9; 16]);
            let mut bytes = [0; 16];
            let read = block.block().read(1, &mut bytes);
            if written.is_ok() && read.is_ok() {
                assert_eq!(bytes, [9; 16]);
            }
            outcome = outcome.and(written).and(read);
        }
        let mut index = 0;
        blocks.retain(|_| {
            index += 1;
            index % 2 == 0
        });
        outcome = outcome.and(self.host.trim(0).map(drop));
        self.check();
        for block in blocks {
            outcome = outcome.and(block.free());
            self.check();
        }
        outcome
    }

    fn devices(&self) -> Result<()> {
        let mut outcome = Ok(());
        let mut blocks = Vec::new();
        for device in self.instance.devices() {
            match self.host.allocate_for(2 * MIB, &device) {
                Ok(block) => blocks.push(self.tagged(block)),
                Err(error) => outcome = Err(error),
            }
            self.check();
        }
        match self.host.allocate_on(64 * KIB, &self.streams[2]) {
            Ok(block) => blocks.push(self.tagged(block)),
            Err(error) => outcome = Err(error),
        }
        drop(blocks);
        outcome
    }

    /// Streams use blocks, which are freed or dropped.
    fn uses(&self) -> Result<()> {
        let mut outcome = Ok(());
        for round in 0..6 {
            match self.allocate(100 * KIB * (1 + round % 3)) {
                Ok(block) => {
                    let used = self.use_on(&block, round as usize % 3).and_then(|()| self.use_on(&block, 2));
                    let freed = if round % 2 == 0 {
                        drop(block);
                        Ok(())
                    } else {
                        block.free()
                    };
                    outcome = outcome.and(used).and(freed);
                }
                Err(error) => outcome = Err(error),
            }
            self.check();
        }
        for stream in &self.streams {
            outcome = outcome.and(stream.synchronize());
        }
        let processed = self.host.process_pending();
        outcome.and(processed).and(self.allocate(100 * KIB).map(drop))
    }

    /// Requests above a cap, and requests for which cached segments are unpinned.
    fn caps(&self) -> Result<()> {
        let settings = self.host.settings();
        self.host.set_settings(PinnedSettings { cap_bytes: Some(12 * MIB), ..settings.clone() });
        let mut outcome = Ok(());
        let mut blocks = Vec::new();
        for bytes in [5 * MIB, 4 * MIB, 9 * MIB] {
            match self.allocate(bytes) {
                Ok(block) => blocks.push(block),
                Err(Error::PinnedCap(report)) => assert_eq!(report.bytes_cap, 12 * MIB),
                Err(error) => outcome = Err(error),
            }
            assert!(
                self.sim.object_counts().bytes_pinned <= 12 * MIB + settings.reserve_segment_bytes,
                "the cap is exceeded"
            );
        }
        drop(blocks);
        // It fits only if the others are unpinned.
        match self.allocate(9 * MIB) {
            Ok(block) => drop(block),
            Err(Error::PinnedCap(_)) if settings.reserve_segment_bytes > 0 => {}
            Err(error) => outcome = Err(error),
        }
        self.host.set_settings(settings);
        outcome
    }

    /// Blocks that are not kept, and a change of the pin method.
    fn changed_settings(&self) -> Result<()> {
        let settings = self.host.settings();
        let before = self.allocate(2 * MIB);
        let other = !settings.use_cuda_host_register;
        self.host.set_settings(PinnedSettings {
            use_cuda_host_register: other,
            max_cached_bytes: Some(MIB),
            max_round_threshold_bytes: Some(KIB),
            ..settings.clone()
        });
        let between = self.allocate(3 * MIB);
        let used = between.as_ref().map_or(Ok(()), |block| self.use_on(block, 0));
        let freed = between.and_then(Tagged::free);
        let first = before.and_then(Tagged::free);
        let waited = self.streams[0].synchronize();
        let processed = self.host.process_pending();
        self.host.set_settings(settings);
        self.check();
        used.and(freed).and(first).and(waited).and(processed)
    }

    /// A graph that copies from pinned memory: captured, replayed and dropped.
    fn capture(&self) -> Result<()> {
        let stream = &self.streams[0];
        let outside = self.allocate(64 * KIB);
        let used = outside.as_ref().map_or(Ok(()), |block| self.use_on(block, 1));
        let mut graph = Graph::new(&self.memory, &stream.device(), GraphOptions::default())?;
        let kept = graph.capture(stream, CaptureOptions::default(), |_| {
            let block = self.tagged(self.host.allocate_on(5 * KIB, stream)?);
            self.use_on(&block, 0)?;
            let spare = self.tagged(self.host.allocate_on(400 * KIB, stream)?);
            let eager = self.allocate(MIB)?;
            drop(outside);
            self.host.process_pending()?;
            eager.free()?;
            drop(spare);
            Ok(block)
        });
        let replayed = kept.and_then(|block| {
            let range = (block.block().ptr(), block.block().bytes_usable());
            block.free()?;
            let replayed = graph.replay(stream);
            // The graph keeps it.
            let other = self.allocate(5 * KIB)?;
            let ptr = other.block().ptr().0;
            assert!(
                ptr + other.block().bytes_usable() <= range.0.0 || range.0.0 + range.1 <= ptr,
                "the graph's memory"
            );
            replayed
        });
        // Ending the capture may have failed too. The next graph ends it; until then the stream cannot be waited for.
        let ended = self.sim.capture_state(stream.id()).unwrap() == CaptureState::None;
        let waited = if ended { stream.synchronize() } else { Ok(()) };
        let reset = graph.reset();
        drop(graph);
        self.check();
        used.and(replayed).and(waited).and(reset)
    }

    /// Without faults everything is released, and the scenario succeeds.
    pub fn expect_recovered(self, about: &str) {
        self.faulty.clear_plan();
        self.check();
        self.expect_clean(about);
        self.scenario(false);
        self.expect_clean(about);
        let reserved = self.host.settings().reserve_segment_bytes;
        let Self { sim, host, start, .. } = self;
        host.close().unwrap();
        assert_eq!(
            sim.object_counts().pinned,
            start.pinned,
            "{about}: pinned after close, with {reserved} bytes reserved before"
        );
    }

    pub fn expect_clean(&self, about: &str) {
        for device in self.instance.devices() {
            // Destroys what dropped graphs left.
            Graph::new(&self.memory, &device, GraphOptions::default()).unwrap().reset().unwrap();
        }
        for _ in 0..2 {
            for device in self.instance.devices() {
                device.synchronize().unwrap();
            }
            self.host.process_pending().unwrap();
        }
        let active = self.host.stats().active_requests;
        assert_eq!(active.current, 0, "{about}: blocks are leaked");
        self.host.trim(0).unwrap();
        self.check();
        for device in self.instance.devices() {
            self.memory.trim(device.id(), warpool::memory::MemPoolId::DEFAULT).unwrap();
            device.event_pool().trim().unwrap();
        }
        let mut now = self.sim.object_counts();
        assert!(now.bytes_pinned <= self.host.settings().reserve_segment_bytes, "{about}: {now:?}");
        (now.pinned, now.bytes_pinned) = (self.start.pinned, self.start.bytes_pinned);
        assert_eq!(now, self.start, "{about}: objects left, and objects before");
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{about}: {hazards:#?}");
    }
}
