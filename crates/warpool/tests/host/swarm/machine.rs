//! Two simulated devices with streams, and work on pinned memory whose outcome can be checked: copies of tags to and
//! from small device buffers.
//!
//! The rule: only what its caller ordered is put into streams. What is in order, and what may be in flight, the model
//! knows.

use std::collections::BTreeSet;
use std::sync::Arc;

use warpool::driver::sim::{Latencies, ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{
    Copies as _, DevicePtr, EventId, EventOptions, EventScope, Events as _, HostPtr, Memory as _, Pattern,
};
use warpool::{Instance, Stream, StreamLease};

use crate::common::rng::Rng;

const MIB: u64 = 1 << 20;
pub const DEVICES: u32 = 2;
const STREAMS_EACH: usize = 2;
/// How much of each end of a block carries its tag.
const END: u64 = 64;
const SLOTS: usize = 8;

/// The machine.
pub struct Machine {
    pub sim: Arc<SimDriver>,
    pub instance: Instance,
    /// Of all devices.
    pub streams: Vec<Stream>,
    _leases: Vec<StreamLease>,
    buffers: Vec<Buffer>,
    /// Streams that are held, by number.
    pub held: BTreeSet<usize>,
    start: ObjectCounts,
}

/// A stream's own device memory: where tags are copied to, and behind that, where they are copied from.
struct Buffer {
    ptr: DevicePtr,
    /// What each slot must hold once the stream is done: the tag, and how many bytes of it.
    expected: [Option<(u32, u64)>; SLOTS],
    next: usize,
}

impl Buffer {
    fn slot(&self, index: usize) -> DevicePtr {
        self.ptr.offset(2 * END * index as u64)
    }

    fn source(&self) -> DevicePtr {
        self.slot(SLOTS)
    }
}

/// The parts of a block that carry its tag: both ends, at multiples of four.
pub fn parts(bytes: u64) -> Vec<(u64, u64)> {
    if bytes <= 2 * END {
        return vec![(0, bytes)];
    }
    let last = (bytes - END) / 4 * 4;
    vec![(0, END), (last, bytes - last)]
}

/// A tag over and over.
pub fn pattern(tag: u32, bytes: u64) -> Vec<u8> {
    tag.to_le_bytes().into_iter().cycle().take(usize::try_from(bytes).expect("a few")).collect()
}

impl Machine {
    /// With rng from the seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let mut config = SimConfig::default().with_seed(seed).with_devices(DEVICES).with_capacity(256 * MIB);
        for device in &mut config.devices {
            device.bytes_context = 2 * MIB;
        }
        config.queue_depth = rng.pick(&[4, 30, 1024]);
        config.latencies = if rng.one_in(2) { Latencies::flat(0) } else { Latencies::h200() };
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(sim.clone()).unwrap();
        let leases: Vec<StreamLease> = instance
            .devices()
            .flat_map(|device| (0..STREAMS_EACH).map(move |_| device.lease_stream().unwrap()).collect::<Vec<_>>())
            .collect();
        let streams: Vec<Stream> = leases.iter().map(|lease| lease.stream().clone()).collect();
        let buffers = streams
            .iter()
            .map(|stream| Buffer {
                ptr: sim.mem_alloc(stream.device_id(), 4096).unwrap(),
                expected: [None; SLOTS],
                next: 0,
            })
            .collect();
        let start = sim.object_counts();
        Self { sim, instance, streams, _leases: leases, buffers, held: BTreeSet::new(), start }
    }

    /// Copies a block's tag to the stream's buffer, where it is looked at once the stream is done.
    pub fn copy_out(&mut self, ptr: HostPtr, bytes: u64, tag: u32, stream: usize) {
        for (offset, len) in parts(bytes) {
            let buffer = &mut self.buffers[stream];
            let slot = buffer.next;
            buffer.next = (slot + 1) % SLOTS;
            buffer.expected[slot] = Some((tag, len));
            let to = buffer.slot(slot);
            self.copy(to.into(), HostPtr(ptr.0 + offset).into(), len, stream);
        }
    }

    /// The stream writes a tag to a block.
    pub fn copy_in(&self, ptr: HostPtr, bytes: u64, tag: u32, stream: usize) {
        let source = self.buffers[stream].source();
        self.sim.fill(source, Pattern::U32(tag), 2 * END / 4, self.streams[stream].id()).unwrap();
        for (offset, len) in parts(bytes) {
            self.copy(HostPtr(ptr.0 + offset).into(), source.into(), len, stream);
        }
    }

    fn copy(&self, to: warpool::driver::Address, from: warpool::driver::Address, bytes: u64, stream: usize) {
        self.sim.copy(to, from, bytes, self.streams[stream].id()).unwrap();
    }

    /// A fresh event, recorded in a stream.
    pub fn mark(&self, stream: usize) -> EventId {
        let stream = &self.streams[stream];
        let event = self.sim.event_create(stream.device_id(), EventOptions::default()).unwrap();
        self.sim.event_record(event, stream.id(), EventScope::Plain).unwrap();
        event
    }

    /// Whether a stream has come past a mark.
    pub fn passed(&self, mark: EventId) -> bool {
        self.sim.event_query(mark).unwrap()
    }

    /// Waits for a stream, and looks at what it copied. A held one is let through, and stays held.
    pub fn wait_for(&mut self, stream: usize) {
        self.streams[stream].synchronize().unwrap();
        let device = self.streams[stream].device_id();
        for slot in 0..SLOTS {
            let Some((tag, len)) = self.buffers[stream].expected[slot].take() else { continue };
            let mut seen = vec![0; usize::try_from(len).expect("a few")];
            self.sim.download(device, self.buffers[stream].slot(slot), &mut seen).unwrap();
            assert_eq!(seen, pattern(tag, len), "what stream {stream} copied from the block with tag {tag:#x}");
        }
    }

    /// Whether work that is put into `stream` now cannot begin.
    pub fn is_held(&self, stream: usize) -> bool {
        self.held.contains(&stream)
    }

    pub fn pause_stream(&mut self, stream: usize) {
        self.sim.pause_stream(self.streams[stream].id()).unwrap();
        self.held.insert(stream);
    }

    pub fn let_go(&mut self, stream: usize) {
        self.sim.resume_stream(self.streams[stream].id()).unwrap();
        self.held.remove(&stream);
    }

    /// At the end, after all was given back: nothing was out of order, nothing is left.
    pub fn expect_clean(mut self, events: Vec<EventId>) {
        for stream in 0..self.streams.len() {
            self.wait_for(stream);
        }
        for event in events {
            self.sim.event_destroy(event).unwrap();
        }
        for device in self.instance.devices() {
            device.event_pool().trim().unwrap();
        }
        self.expect_no_hazards();
        assert_eq!(self.sim.object_counts(), self.start, "what is left, and what there was");
    }

    pub fn expect_no_hazards(&self) {
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
    }
}
