//! The choice of a driver, by name. What was asked for is opened or refused; nothing else is ever put in its place.

use std::sync::Arc;

use clap::builder::ValueParser;
use warpool_cuda::CudaDriver;
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{DeviceId, Driver};

use crate::output::{Result, Stop};
use crate::size;

/// The names that a driver can be chosen by.
pub const NAMES: &[&str] = &["sim", "cuda"];

/// Settings of the simulated GPU.
#[derive(Clone, Debug, clap::Args)]
pub struct SimArgs {
    /// How many simulated GPUs there are, each a peer of the others [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    sim_devices: Option<u32>,
    /// The memory of each simulated GPU, as 80GiB or 512MiB [default: that of an H200]
    #[arg(long, value_name = "SIZE", value_parser = ValueParser::new(size::parse))]
    sim_memory: Option<u64>,
}

impl SimArgs {
    /// The simulated GPU as it was asked for. Two devices unless told otherwise, so that peers can be shown.
    pub fn config(&self, seed: u64) -> SimConfig {
        let config = SimConfig::default().with_seed(seed).with_devices(self.sim_devices.unwrap_or(2));
        match self.sim_memory {
            Some(bytes) => config.with_capacity(bytes),
            None => config,
        }
    }

    fn given(&self) -> Option<&'static str> {
        match (self.sim_devices, self.sim_memory) {
            (Some(_), _) => Some("--sim-devices"),
            (_, Some(_)) => Some("--sim-memory"),
            (None, None) => None,
        }
    }
}

/// Opens the driver of that name.
pub fn open(name: &str, sim: &SimArgs, seed: u64) -> Result<Arc<dyn Driver>> {
    match (name, sim.given()) {
        ("sim", _) => Ok(Arc::new(SimDriver::new(sim.config(seed)))),
        ("cuda", Some(option)) => Err(Stop::Usage(format!("{option} is for --driver sim, not for cuda"))),
        ("cuda", None) => match CudaDriver::open() {
            Ok(driver) => Ok(Arc::new(driver)),
            Err(error) => Err(Stop::Usage(format!("the driver 'cuda' cannot be opened: {error}"))),
        },
        _ => Err(Stop::Usage(format!("there is no driver '{name}': choose one of {}", NAMES.join(", ")))),
    }
}

/// The device of that number, if the driver has it.
pub fn device(driver: &dyn Driver, number: u32) -> Result<DeviceId> {
    match driver.device_count()? {
        count if number < count => Ok(DeviceId(number)),
        0 => Err(Stop::Usage(format!("the driver '{}' has no device", driver.kind()))),
        1 => Err(Stop::Usage(format!("there is no device {number}: the driver '{}' has only device 0", driver.kind()))),
        count => Err(Stop::Usage(format!(
            "there is no device {number}: the driver '{}' has devices 0 to {}",
            driver.kind(),
            count - 1
        ))),
    }
}
