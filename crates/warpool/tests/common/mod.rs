//! Shared code of the integration tests: simulated devices, and work that keeps them busy.
// Not `expect`: the unused items differ between test binaries.
#![allow(clippy::allow_attributes, dead_code, unused_imports, reason = "each test binary uses its own part of this")]

pub mod blas;
pub mod graphs;
pub mod launch;
pub mod logging_allocator;
pub mod memory;
pub mod panics;
pub mod pause;
pub mod rng;
pub mod sizes;

use std::sync::Arc;

use warpool::driver::Pattern;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::{Device, Instance, Stream};

/// A simulated machine, and an `Instance` on it.
pub fn machine(devices: u32) -> (Arc<SimDriver>, Instance) {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(devices)));
    let instance = Instance::new(sim.clone()).expect("a simulated device");
    (sim, instance)
}

/// The only device of a simulated machine.
pub fn device() -> Device {
    machine(1).1.device(0).expect("the first device")
}

/// Queues work that takes longer, on the virtual clock, than the calls of a test do.
pub fn keep_busy(stream: &Stream) {
    const BYTES: u64 = 8 << 20;
    let driver = stream.instance().driver();
    let memory = driver.mem_alloc(stream.device_id(), BYTES).expect("room for the work");
    for _ in 0..100 {
        driver.fill(memory, Pattern::U8(7), BYTES, stream.id()).expect("a fill");
    }
}
