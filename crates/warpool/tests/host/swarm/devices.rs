//! Two simulated devices with streams, and work on pinned memory whose result can be checked: copies of tags to and
//! from small device buffers. The caller orders the work; the model tracks what may be in flight.

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
/// The bytes at each end of a block that hold its tag.
const END: u64 = 64;
const SLOTS: usize = 8;

pub struct Devices {
    pub sim: Arc<SimDriver>,
    pub instance: Instance,
    /// The streams of all devices.
    pub streams: Vec<Stream>,
    _leases: Vec<StreamLease>,
    buffers: Vec<Buffer>,
    /// Paused streams, by number.
    pub paused: BTreeSet<usize>,
    start: ObjectCounts,
}

/// A stream's device memory: slots that tags are copied to, and after them the source of copies to blocks.
struct Buffer {
    ptr: DevicePtr,
    /// The expected content of each slot once the stream is done: the tag, and how many bytes of it.
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

/// The parts of a block that hold its tag: both ends, at multiples of four.
pub fn parts(bytes: u64) -> Vec<(u64, u64)> {
    if bytes <= 2 * END {
        return vec![(0, bytes)];
    }
    let last = (bytes - END) / 4 * 4;
    vec![(0, END), (last, bytes - last)]
}

/// A tag, repeated.
pub fn pattern(tag: u32, bytes: u64) -> Vec<u8> {
    tag.to_le_bytes().into_iter().cycle().take(usize::try_from(bytes).expect("a small number")).collect()
}

impl Devices {
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
        Self { sim, instance, streams, _leases: leases, buffers, paused: BTreeSet::new(), start }
    }

    /// Copies a block's tag to the stream's buffer, where it is checked once the stream is done.
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

    /// A new event, recorded in a stream.
    pub fn record_event(&self, stream: usize) -> EventId {
        let stream = &self.streams[stream];
        let event = self.sim.event_create(stream.device_id(), EventOptions::default()).unwrap();
        self.sim.event_record(event, stream.id(), EventScope::Plain).unwrap();
        event
    }

    /// Whether an event has passed.
    pub fn has_passed(&self, event: EventId) -> bool {
        self.sim.event_query(event).unwrap()
    }

    /// Waits for a stream, and checks what it copied. A paused one runs its work, and stays paused.
    pub fn wait_for(&mut self, stream: usize) {
        self.streams[stream].synchronize().unwrap();
        let device = self.streams[stream].device_id();
        for slot in 0..SLOTS {
            let Some((tag, len)) = self.buffers[stream].expected[slot].take() else { continue };
            let mut read = vec![0; usize::try_from(len).expect("a small number")];
            self.sim.download(device, self.buffers[stream].slot(slot), &mut read).unwrap();
            assert_eq!(read, pattern(tag, len), "what stream {stream} copied from the block with tag {tag:#x}");
        }
    }

    /// Whether work that is enqueued in `stream` now does not start.
    pub fn is_paused(&self, stream: usize) -> bool {
        self.paused.contains(&stream)
    }

    pub fn pause_stream(&mut self, stream: usize) {
        self.sim.pause_stream(self.streams[stream].id()).unwrap();
        self.paused.insert(stream);
    }

    pub fn resume_stream(&mut self, stream: usize) {
        self.sim.resume_stream(self.streams[stream].id()).unwrap();
        self.paused.remove(&stream);
    }

    /// At the end, after everything is freed: no hazard, no objects left.
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
        assert_eq!(self.sim.object_counts(), self.start, "objects left, and objects before");
    }

    pub fn expect_no_hazards(&self) {
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
    }
}
