//! Code shared by the examples: opening a GPU by one flag, and the check at the end.
//!
//! ```text
//! cargo run -p warpool-examples --bin saxpy             # on the simulated GPU
//! cargo run -p warpool-examples --bin saxpy -- --cuda   # on a GPU
//! ```

use std::error::Error;
use std::sync::Arc;

use warpool::Instance;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool_cuda::CudaDriver;

/// The result of an example.
pub type Outcome = Result<(), Box<dyn Error>>;

/// A GPU, simulated or real.
#[derive(Debug)]
pub struct Gpu {
    instance: Instance,
    simulated: Option<Arc<SimDriver>>,
}

impl Gpu {
    /// A simulated GPU, or with the argument `--cuda` a real one.
    pub fn from_arguments() -> Result<Self, Box<dyn Error>> {
        match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
            [] => {
                // It also reports reads of memory that was never written.
                let gpu = Arc::new(SimDriver::new(SimConfig::default().with_uninitialized_check()));
                Ok(Self { instance: Instance::new(gpu.clone())?, simulated: Some(gpu) })
            }
            [flag] if flag == "--cuda" => {
                Ok(Self { instance: Instance::new(Arc::new(CudaDriver::open()?))?, simulated: None })
            }
            other => Err(format!("the only argument is --cuda, not {other:?}").into()),
        }
    }

    /// The root of everything on it.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// Waits for all work. On the simulated GPU it then fails if the program had a race, used freed memory, or the
    /// like.
    pub fn finish(self) -> Outcome {
        for device in self.instance.devices() {
            device.synchronize()?;
        }
        let hazards = self.simulated.map_or_else(Vec::new, |gpu| gpu.hazards());
        for hazard in &hazards {
            eprintln!("{hazard}");
        }
        if hazards.is_empty() { Ok(()) } else { Err(format!("{} hazards", hazards.len()).into()) }
    }
}
