//! Settings of the simulated driver. The defaults describe one H200.

use super::cost::{Latencies, WorkCosts};
use crate::{DeviceProperties, DeviceUuid, Library};

const MIB: u64 = 1 << 20;

/// The devices of a simulated driver, and its behaviour.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The seed of all random numbers. The same seed and the same calls give the same run.
    pub seed: u64,
    /// The devices, by number. Their `peers` say which can reach which.
    pub devices: Vec<SimDevice>,
    /// How long work on the device takes.
    pub timing: Timing,
    /// How long calls take on the host.
    pub latencies: Latencies,
    /// The cost model of work on the device.
    pub work: WorkCosts,
    /// Whether reading memory that was not written since its allocation is a hazard. Off by default: programs do that
    /// on purpose, when they copy more than they filled.
    pub check_uninitialized: bool,
    /// The value of every byte of device memory before it is written. 0 by default; real device memory contains data of
    /// earlier users.
    pub fresh_byte: u8,
    /// How many operations a stream's queue holds before a call that adds one waits, as with a real driver.
    pub queue_depth: usize,
    /// How many hazards are kept; further ones are only counted.
    pub max_hazards: usize,
    /// Whether suballocations are tracked. Without it the simulation is faster, but does not distinguish the users of
    /// one allocation.
    pub track_suballocations: bool,
    /// Libraries that are reported as not installed.
    pub missing_libraries: Vec<Library>,
}

/// One simulated device.
#[derive(Clone, Debug)]
pub struct SimDevice {
    /// Its properties.
    pub properties: DeviceProperties,
    /// The memory that its context takes.
    pub bytes_context: u64,
    /// The stream priorities.
    pub priorities: crate::PriorityRange,
}

/// How long work on the device takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// By the cost model, times a factor between 1/8 and 8 that is drawn for each operation: different seeds give
    /// different interleavings.
    Seeded,
    /// By the cost model.
    Model,
}

/// The same in every process, as those of real cards.
fn simulated_uuid(device: u32) -> DeviceUuid {
    let mut bytes = *b"simulated   \0\0\0\0";
    bytes[12..].copy_from_slice(&device.to_be_bytes());
    DeviceUuid(bytes)
}

impl SimDevice {
    /// The H200 on which the costs were measured.
    #[must_use]
    pub fn h200() -> Self {
        Self {
            properties: DeviceProperties {
                name: "Simulated H200".to_owned(),
                uuid: simulated_uuid(0),
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
                multicast_granularity: 2 * MIB,
                peers: Vec::new(),
            },
            // Measured: the total minus what was free with a context and no allocations.
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
            fresh_byte: 0,
            queue_depth: 1024,
            max_hazards: 1000,
            track_suballocations: true,
            missing_libraries: Vec::new(),
        }
    }
}

impl SimConfig {
    /// Sets the seed.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the number of devices: all like the first, each a peer of every other.
    #[must_use]
    pub fn with_devices(mut self, count: u32) -> Self {
        let first = self.devices.first().cloned().unwrap_or_else(SimDevice::h200);
        self.devices = (0..count)
            .map(|this| {
                let mut device = first.clone();
                device.properties.uuid = simulated_uuid(this);
                device.properties.peers = (0..count).filter(|&d| d != this).map(crate::DeviceId).collect();
                device
            })
            .collect();
        self
    }

    /// Sets the memory of each device.
    #[must_use]
    pub fn with_capacity(mut self, bytes: u64) -> Self {
        for device in &mut self.devices {
            device.properties.bytes_total = bytes;
        }
        self
    }

    /// Sets how long work takes.
    #[must_use]
    pub fn with_timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Turns tracking of suballocations off.
    #[must_use]
    pub fn without_suballocation_tracking(mut self) -> Self {
        self.track_suballocations = false;
        self
    }

    /// Reports a library as not installed.
    #[must_use]
    pub fn without_library(mut self, library: Library) -> Self {
        self.missing_libraries.push(library);
        self
    }

    /// Reports reads of memory that was never written.
    #[must_use]
    pub fn with_uninitialized_check(mut self) -> Self {
        self.check_uninitialized = true;
        self
    }
}
