//! A simulated machine with checked memory: every block contains its owner's tag, and kernels check that it is still
//! there.

use std::sync::Arc;

use warpool::driver::DevicePtr;
use warpool::driver::sim::{Latencies, ObjectCounts, SimConfig, SimDriver};
use warpool::{Instance, Stream, StreamLease};
use warpool_testing::Tags;

use crate::common::rng::Rng;

const MIB: u64 = 1 << 20;

/// The machine.
pub struct Machine {
    pub sim: Arc<SimDriver>,
    pub instance: Instance,
    /// The streams of each device.
    pub streams: Vec<Vec<Stream>>,
    leases: Vec<StreamLease>,
    /// The tags of each device.
    tags: Vec<Tags>,
    start: ObjectCounts,
}

impl Machine {
    /// `devices` devices with `streams` streams each; the rest is drawn from the seed.
    pub fn new(seed: u64, devices: u32, streams: usize) -> Self {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let mut config =
            SimConfig::default().with_seed(seed).with_devices(devices).with_capacity(rng.pick(&[150, 300, 1000]) * MIB);
        for device in &mut config.devices {
            device.bytes_context = 2 * MIB;
        }
        config.queue_depth = rng.pick(&[3, 20, 1024]);
        config.latencies = if rng.one_in(2) { Latencies::flat(0) } else { Latencies::h200() };
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(sim.clone()).unwrap();
        let (mut leases, mut tags, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for device in instance.devices() {
            let own: Vec<StreamLease> = (0..streams).map(|_| device.lease_stream().unwrap()).collect();
            all.push(own.iter().map(|lease| lease.stream().clone()).collect::<Vec<Stream>>());
            leases.extend(own);
            tags.push(Tags::new(&sim, device.id()));
        }
        let start = sim.object_counts();
        Self { sim, instance, streams: all, leases, tags, start }
    }

    /// Enqueues a write of a tag into a block.
    pub fn write_tag(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        self.tags[stream.device_id().0 as usize].write(ptr, bytes, tag, stream.id());
    }

    /// Enqueues a check that a block still contains its tag.
    pub fn check_tag(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        self.tags[stream.device_id().0 as usize].check(ptr, bytes, tag, stream.id());
    }

    pub fn stream(&self, device: usize, index: usize) -> &Stream {
        &self.streams[device][index]
    }

    /// At the end, after everything was freed: no tag was overwritten, no hazard, no leak.
    pub fn expect_clean(&self) {
        for device in self.instance.devices() {
            device.synchronize().unwrap();
            device.event_pool().trim().unwrap();
        }
        self.tags.iter().for_each(Tags::expect_intact);
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
        assert_eq!(
            self.sim.object_counts(),
            self.start,
            "driver objects at the end and at the start; {} leases",
            self.leases.len()
        );
    }
}
