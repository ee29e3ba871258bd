//! The settings of a simulated GPU. The defaults describe one H200.

use super::cost::{Latencies, WorkCosts};
use crate::{DeviceProperties, Library};

const MIB: u64 = 1 << 20;

/// A simulated machine: its devices, and how it behaves.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Where luck comes from. The same seed and the same calls give the same run.
    pub seed: u64,
    /// The devices, in the order of their numbers. Who reaches whom stands in their `peers`.
    pub devices: Vec<SimDevice>,
    /// How long work on the device takes.
    pub timing: Timing,
    /// How long calls take on the host.
    pub latencies: Latencies,
    /// What the durations of work on the device are made of.
    pub work: WorkCosts,
    /// Whether reading memory that nobody has written since it was allocated is a hazard. Off: programs do
    /// that on purpose, when they copy more than they filled.
    pub check_uninitialized: bool,
    /// How much work a stream holds before a call that adds more waits, as a real driver's queue does.
    pub queue_depth: usize,
    /// How many hazards are kept; later ones are only counted.
    pub max_hazards: usize,
    /// Whether suballocations are tracked. Without it the simulation is faster, and cannot tell the users of one
    /// allocation apart.
    pub track_suballocations: bool,
    /// Libraries that are not installed.
    pub missing_libraries: Vec<Library>,
}

/// One simulated device.
#[derive(Clone, Debug)]
pub struct SimDevice {
    /// What it says of itself.
    pub properties: DeviceProperties,
    /// What the context takes of its memory once there is one.
    pub bytes_context: u64,
    /// What streams of it can be ranked by.
    pub priorities: crate::PriorityRange,
}

/// How long work on the device takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// As the cost model says, times a factor between 1/8 and 8 that the seed draws for each piece of work: other
    /// seeds, other interleavings.
    Seeded,
    /// As the cost model says.
    Model,
}

impl SimDevice {
    /// The H200 that `measured` costs were taken on.
    #[must_use]
    pub fn h200() -> Self {
        Self {
            properties: DeviceProperties {
                name: "Simulated H200".to_owned(),
                compute_capability: (9, 0),
                bytes_total: 150_109_880_320,
                multiprocessors: 132,
                granularity: 2 * MIB,
                virtual_memory: true,
                host_registration: true,
                async_pools: true,
                conditional_nodes: true,
                ipc_events: true,
                share_posix_fd: true,
                share_fabric: false,
                rdma: true,
                peers: Vec::new(),
            },
            // Measured: what was missing of the total once a context was there and nothing else.
            bytes_context: 552_402_944,
            priorities: crate::PriorityRange { least: 0, greatest: -5 },
        }
    }
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            devices: vec![SimDevice::h200()],
            timing: Timing::Seeded,
            latencies: Latencies::h200(),
            work: WorkCosts::h200(),
            check_uninitialized: false,
            queue_depth: 1024,
            max_hazards: 1000,
            track_suballocations: true,
            missing_libraries: Vec::new(),
        }
    }
}

impl SimConfig {
    /// With another seed.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// With `count` devices like the first, each a peer of every other.
    #[must_use]
    pub fn with_devices(mut self, count: u32) -> Self {
        let first = self.devices.first().cloned().unwrap_or_else(SimDevice::h200);
        self.devices = (0..count)
            .map(|this| {
                let mut device = first.clone();
                device.properties.peers = (0..count).filter(|&d| d != this).map(crate::DeviceId).collect();
                device
            })
            .collect();
        self
    }

    /// With `bytes` of memory on each device.
    #[must_use]
    pub fn with_capacity(mut self, bytes: u64) -> Self {
        for device in &mut self.devices {
            device.properties.bytes_total = bytes;
        }
        self
    }

    /// With work that takes as long as the cost model says.
    #[must_use]
    pub fn with_timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Without tracking of suballocations.
    #[must_use]
    pub fn without_suballocation_tracking(mut self) -> Self {
        self.track_suballocations = false;
        self
    }

    /// With a library that is not installed.
    #[must_use]
    pub fn without_library(mut self, library: Library) -> Self {
        self.missing_libraries.push(library);
        self
    }

    /// With reads of never-written memory reported.
    #[must_use]
    pub fn with_uninitialized_check(mut self) -> Self {
        self.check_uninitialized = true;
        self
    }
}
