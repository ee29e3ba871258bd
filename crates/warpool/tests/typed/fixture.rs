//! A simulated GPU with an allocator, whose hazard log must be empty at the end.

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{HostKernel, KernelSource};
use warpool::memory::{CachingAllocator, DeviceAllocator, HostAllocator, PinnedSettings, Settings};
use warpool::typed::{Kernel, Slice, SliceMut};
use warpool::{Device, Instance, Result, StreamLease};

pub struct Fixture {
    pub gpu: Arc<SimDriver>,
    pub instance: Instance,
    pub allocator: Arc<dyn DeviceAllocator>,
    pub host: HostAllocator,
    pub device: Device,
}

impl Fixture {
    pub fn new() -> Result<Self> {
        Self::with(SimConfig::default())
    }

    /// Two devices.
    pub fn pair() -> Result<Self> {
        Self::with(SimConfig::default().with_devices(2))
    }

    pub fn with(config: SimConfig) -> Result<Self> {
        let gpu = Arc::new(SimDriver::new(config.with_uninitialized_check()));
        let instance = Instance::new(gpu.clone())?;
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let host = HostAllocator::new(&instance, PinnedSettings::default());
        let device = instance.device(0)?;
        Ok(Self { gpu, instance, allocator, host, device })
    }

    pub fn stream(&self) -> Result<StreamLease> {
        self.device.lease_stream()
    }

    /// Waits for all work, and fails if there was a hazard.
    pub fn finish(self) -> Result<()> {
        for device in self.instance.devices() {
            device.synchronize()?;
        }
        let hazards = self.gpu.hazards();
        assert!(hazards.is_empty(), "{}", hazards.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
        Ok(())
    }

    pub fn saxpy(&self) -> Result<Saxpy> {
        // SAFETY: these are its parameters, and it stays within both slices.
        unsafe { Kernel::load(&self.device, &KERNELS, "saxpy") }
    }
}

pub type Saxpy = Kernel<(f32, Slice<f32>, SliceMut<f32>)>;

pub static KERNELS: KernelSource = KernelSource {
    name: "typed tests",
    cuda: r#"
        extern "C" __global__ void saxpy(
            float a, const float* x, unsigned long long x_len, float* y, unsigned long long y_len) {}
        extern "C" __global__ void increment(unsigned* x, unsigned n) {}
    "#,
    host_kernels: &[
        HostKernel::new("saxpy", |kernel| {
            let (a, x, y) = (kernel.arg_f32(0)?, kernel.arg_ptr(1)?, kernel.arg_ptr(3)?);
            let len = kernel.arg_u64(2)?.min(kernel.arg_u64(4)?) as usize;
            let (x, mut values) = (kernel.read_f32(x, len)?, kernel.read_f32(y, len)?);
            values.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
            kernel.write_f32(y, &values)
        }),
        // Its last argument is the number of elements that it increments, even beyond the end of the slice.
        HostKernel::new("increment", |kernel| {
            let (x, n) = (kernel.arg_ptr(0)?, kernel.arg_u32(1)? as usize);
            let values: Vec<u32> = kernel.read_u32(x, n)?.iter().map(|x| x + 1).collect();
            kernel.write_u32(x, &values)
        }),
    ],
};
