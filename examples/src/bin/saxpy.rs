//! `y += a * x`, and a sum: device memory, kernels with typed arguments, copies, slices, errors. It needs no ids,
//! addresses or byte counts.

use std::sync::Arc;

use warpool::driver::{HostKernel, KernelSource, LaunchShape};
use warpool::memory::{CachingAllocator, Settings};
use warpool::typed::{Kernel, Slice, SliceMut, View};
use warpool::{Device, DeviceVec, Result, Stream};
use warpool_examples::{Gpu, Outcome};

/// The kernels: CUDA C++ for a real GPU, and host implementations for the simulated one. A slice is two arguments, its
/// address and its length.
static SOURCE: KernelSource = KernelSource {
    name: "saxpy example",
    cuda: r#"
    typedef unsigned long long size;
    extern "C" __global__ void saxpy(float a, const float* x, unsigned long long xs, float* y, unsigned long long ys) {
        size i = blockIdx.x * (size)blockDim.x + threadIdx.x;
        if (i < xs && i < ys) y[i] += a * x[i];
    }
    extern "C" __global__ void sum(const float* x, unsigned long long xs, float* total, unsigned long long totals) {
        __shared__ float parts[256];
        float part = 0;
        for (size i = threadIdx.x; i < xs; i += 256) part += x[i];
        parts[threadIdx.x] = part;
        __syncthreads();
        if (threadIdx.x != 0 || totals == 0) return;
        total[0] = 0;
        for (int i = 0; i < 256; i++) total[0] += parts[i];
    }"#,
    host_kernels: &[
        HostKernel::new("saxpy", |kernel| {
            let (a, x, y) = (kernel.arg_f32(0)?, kernel.arg_ptr(1)?, kernel.arg_ptr(3)?);
            let len = kernel.arg_u64(2)?.min(kernel.arg_u64(4)?) as usize;
            let (x, mut values) = (kernel.read_f32(x, len)?, kernel.read_f32(y, len)?);
            values.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
            kernel.write_f32(y, &values)
        }),
        HostKernel::new("sum", |kernel| {
            let (x, len, total) = (kernel.arg_ptr(0)?, kernel.arg_u64(1)? as usize, kernel.arg_ptr(2)?);
            let sum: f32 = kernel.read_f32(x, len)?.iter().sum();
            kernel.write_f32(total, &[sum])
        }),
    ],
};

/// The kernels with the types of their parameters.
struct Kernels {
    saxpy: Kernel<(f32, Slice<f32>, SliceMut<f32>)>,
    sum: Kernel<(Slice<f32>, SliceMut<f32>)>,
}

impl Kernels {
    fn load(device: &Device) -> Result<Self> {
        // SAFETY: these are its parameters, and it stays within its slices.
        let saxpy = unsafe { Kernel::load(device, &SOURCE, "saxpy")? };
        // SAFETY: as above; it runs as one block of 256 threads.
        let sum = unsafe { Kernel::load(device, &SOURCE, "sum")? };
        Ok(Self { saxpy, sum })
    }

    /// The sum of a part of a vector, computed on the device.
    fn sum_of(&self, x: View<'_, f32>, total: &mut DeviceVec<f32>, stream: &Stream) -> Result<f32> {
        let one_block = LaunchShape::linear(256);
        self.sum.launch(stream, one_block, (x, &mut *total))?;
        Ok(total.to_vec(stream)?[0])
    }
}

fn main() -> Outcome {
    let gpu = Gpu::from_arguments()?;
    let device = gpu.instance().device(0)?;
    let allocator = Arc::new(CachingAllocator::new(gpu.instance(), Settings::default()));
    let (stream, kernels) = (device.lease_stream()?, Kernels::load(&device)?);

    let values: Vec<f32> = (0..1000).map(|n| n as f32).collect();
    let x = DeviceVec::from_slice(&allocator, &values, &stream)?.with_label("x");
    let mut y = DeviceVec::zeroed(&allocator, x.len(), &stream)?.with_label("y");
    let mut total = DeviceVec::zeroed(&allocator, 1, &stream)?.with_label("total");

    stream.fill(y.slice_mut(..500)?, 1.0)?;
    kernels.saxpy.launch_linear(&stream, x.len(), (2.0, &x, &mut y))?;
    let expected: Vec<f32> = (0..1000).map(|n| 2.0 * n as f32 + if n < 500 { 1.0 } else { 0.0 }).collect();
    assert_eq!(y.to_vec(&stream)?, expected);
    println!("the first half sums to {}", kernels.sum_of(y.slice(..500)?, &mut total, &stream)?);
    println!("the second half sums to {}", kernels.sum_of(y.slice(500..)?, &mut total, &stream)?);

    // Errors are found before any work is queued.
    let error = stream.copy(&x, y.slice_mut(..500)?).expect_err("the lengths differ");
    println!("an error: {error}");
    drop((x, y, total));
    gpu.finish()
}
