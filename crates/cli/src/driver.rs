//! Opens a driver by its name. There is no fallback to another one.

use std::sync::Arc;

use clap::builder::ValueParser;
use warpool_cuda::CudaDriver;
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{DeviceId, Driver};

use crate::output::{CommandError, Result};
use crate::size;

/// The names of the drivers.
pub const NAMES: &[&str] = &["sim", "cuda"];

/// Settings of the simulated GPU.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SimArgs {
    /// Number of simulated GPUs, all peers of each other [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    sim_devices: Option<u32>,
    /// Memory of each simulated GPU, for example 80GiB, from 1GiB to 16TiB [default: that of an H200]
    #[arg(long, value_name = "SIZE", value_parser = ValueParser::new(sim_memory))]
    sim_memory: Option<u64>,
}

/// At least 1 GiB because a context takes 0.5 GiB; at most 16 TiB because the selftest must be able to request more
/// than there is.
const SIM_MEMORY: std::ops::RangeInclusive<u64> = 1 << 30..=16 << 40;

fn sim_memory(text: &str) -> std::result::Result<u64, String> {
    let bytes = size::parse(text)?;
    if SIM_MEMORY.contains(&bytes) {
        return Ok(bytes);
    }
    let (min, max) = (size::format(*SIM_MEMORY.start()), size::format(*SIM_MEMORY.end()));
    Err(format!("a simulated GPU has from {min} to {max}"))
}

impl SimArgs {
    /// The configuration of the simulated GPU. Two devices by default, so that there are peers.
    pub fn config(&self, seed: u64) -> SimConfig {
        let config = SimConfig::default().with_seed(seed).with_devices(self.sim_devices.unwrap_or(2));
        match self.sim_memory {
            Some(bytes) => config.with_capacity(bytes),
            None => config,
        }
    }

    fn first_given(&self) -> Option<&'static str> {
        match (self.sim_devices, self.sim_memory) {
            (Some(_), _) => Some("--sim-devices"),
            (_, Some(_)) => Some("--sim-memory"),
            (None, None) => None,
        }
    }
}

/// Opens the driver with that name.
pub fn open(name: &str, sim: &SimArgs, seed: u64) -> Result<Arc<dyn Driver>> {
    match name {
        "sim" => Ok(Arc::new(SimDriver::new(sim.config(seed)))),
        "cuda" => Ok(open_cuda(sim)?),
        _ => Err(unknown(name)),
    }
}

/// Opens the driver 'cuda'; options of the simulated GPU are an error.
pub fn open_cuda(sim: &SimArgs) -> Result<Arc<CudaDriver>> {
    if let Some(option) = sim.first_given() {
        return Err(CommandError::Usage(format!("{option} is for --driver sim, not for cuda")));
    }
    CudaDriver::open().map(Arc::new).map_err(|error| {
        CommandError::Usage(format!("the driver 'cuda' cannot be opened: {error} (--driver sim needs none)"))
    })
}

/// The error for an unknown driver name.
pub fn unknown(name: &str) -> CommandError {
    CommandError::Usage(format!("unknown driver '{name}': choose one of {}", NAMES.join(", ")))
}

/// The device with that number, if the driver has it.
pub fn device(driver: &dyn Driver, number: u32) -> Result<DeviceId> {
    match driver.device_count()? {
        count if number < count => Ok(DeviceId(number)),
        0 => Err(CommandError::Usage(format!("the driver '{}' has no device", driver.kind()))),
        1 => Err(CommandError::Usage(format!(
            "there is no device {number}: the driver '{}' has only device 0",
            driver.kind()
        ))),
        count => Err(CommandError::Usage(format!(
            "there is no device {number}: the driver '{}' has devices 0 to {}",
            driver.kind(),
            count - 1
        ))),
    }
}
