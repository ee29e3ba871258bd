//! Two streams and pinned staging memory: while one chunk is computed, the next is copied to the device and the last
//! one back. The streams need no explicit waits or recorded uses: each vector tracks the streams that use it.

use std::sync::Arc;

use warpool::driver::{HostKernel, KernelSource};
use warpool::memory::{CachingAllocator, HostAllocator, PinnedSettings, Settings};
use warpool::typed::{Kernel, Slice, SliceMut};
use warpool::{DeviceVec, PinnedVec, Result};
use warpool_examples::{Gpu, Outcome};

const CHUNK: usize = 1 << 16;
const CHUNKS: usize = 12;
/// Chunks under way at the same time.
const SLOTS: usize = 3;

static SOURCE: KernelSource = KernelSource {
    name: "staging example",
    cuda: r#"
    extern "C" __global__ void square(
        const unsigned* x, unsigned long long xs, unsigned* y, unsigned long long ys) {
        unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
        if (i < xs && i < ys) y[i] = x[i] * x[i];
    }"#,
    host_kernels: &[HostKernel::new("square", |kernel| {
        let (x, y) = (kernel.arg_ptr(0)?, kernel.arg_ptr(2)?);
        let len = kernel.arg_u64(1)?.min(kernel.arg_u64(3)?) as usize;
        let squares: Vec<u32> = kernel.read_u32(x, len)?.iter().map(|x| x.wrapping_mul(*x)).collect();
        kernel.write_u32(y, &squares)
    })],
};

/// The buffers of one chunk in progress.
struct Slot {
    host: PinnedVec<u32>,
    input: DeviceVec<u32>,
    output: DeviceVec<u32>,
}

fn value(chunk: usize, index: usize) -> u32 {
    (chunk * CHUNK + index) as u32
}

fn main() -> Outcome {
    let gpu = Gpu::from_arguments()?;
    let device = gpu.instance().device(0)?;
    let allocator = Arc::new(CachingAllocator::new(gpu.instance(), Settings::default()));
    let host = HostAllocator::new(gpu.instance(), PinnedSettings::default());
    let (copies, compute) = (device.lease_stream()?, device.lease_stream()?);
    copies.set_label("copies");
    compute.set_label("compute");
    // SAFETY: these are its parameters, and it stays within its slices.
    let square: Kernel<(Slice<u32>, SliceMut<u32>)> = unsafe { Kernel::load(&device, &SOURCE, "square")? };

    let slot = |_| {
        Ok(Slot {
            host: PinnedVec::zeroed(&host, CHUNK)?.with_label("staging"),
            input: DeviceVec::uninit(&allocator, CHUNK, &copies)?.with_label("input"),
            output: DeviceVec::uninit(&allocator, CHUNK, &compute)?.with_label("output"),
        })
    };
    let mut slots = (0..SLOTS).map(slot).collect::<Result<Vec<_>>>()?;
    let mut waits = 0;
    for chunk in 0..CHUNKS + SLOTS {
        let slot = &mut slots[chunk % SLOTS];
        // The result in this slot. The copy back may still run, and the vector waits for it.
        if let Some(finished) = chunk.checked_sub(SLOTS) {
            waits += usize::from(slot.host.try_slice().is_err());
            let results = slot.host.wait()?;
            assert!(results.iter().enumerate().all(|(i, &y)| y == value(finished, i).wrapping_mul(value(finished, i))));
        }
        if chunk < CHUNKS {
            slot.host.iter_mut().enumerate().for_each(|(index, x)| *x = value(chunk, index));
            copies.copy(&slot.host, &mut slot.input)?;
            square.launch_linear(&compute, CHUNK, (&slot.input, &mut slot.output))?; // waits for the copy
            copies.copy(&slot.output, &mut slot.host)?; // waits for the kernel
        }
    }
    println!("{CHUNKS} chunks of {CHUNK} elements squared; the host had to wait {waits} times");
    drop(slots);
    gpu.finish()
}
