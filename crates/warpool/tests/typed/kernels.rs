//! Kernels with typed arguments.

use warpool::typed::{BufferError, Kernel, Parameters, Pointer, PointerMut, Slice, SliceMut};
use warpool::{DeviceVec, Error, PinnedVec, Result};

use crate::fixture::{Fixture, KERNELS};

fn load<P: Parameters>(gpu: &Fixture, name: &'static str) -> Result<Kernel<P>> {
    // SAFETY: on the simulated GPU, which checks every access.
    unsafe { Kernel::load(&gpu.device, &KERNELS, name) }
}

#[test]
fn arguments_are_numbers_vectors_and_views() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let saxpy = gpu.saxpy()?;
    let x = DeviceVec::from_slice(&gpu.allocator, &[1.0_f32, 2.0, 3.0, 4.0], &stream)?;
    let mut y = DeviceVec::<f32>::zeroed(&gpu.allocator, 4, &stream)?;
    saxpy.launch_linear(&stream, 4, (10.0, &x, &mut y))?;
    saxpy.launch_linear(&stream, 2, (1.0, x.slice(2..)?, y.slice_mut(..2)?))?;
    assert_eq!(y.to_vec(&stream)?, [13.0, 24.0, 30.0, 40.0]);
    // Pinned memory has one address for the host and all devices.
    let mut pinned = PinnedVec::<f32>::zeroed(&gpu.host, 4)?;
    saxpy.launch_linear(&stream, 4, (1.0, &y, &mut pinned))?;
    assert_eq!(pinned.wait()?, [13.0, 24.0, 30.0, 40.0]);
    // Two parts of one vector.
    let (left, mut right) = y.split_at_mut(2)?;
    saxpy.launch_linear(&stream, 2, (1.0, &left, &mut right))?;
    assert_eq!(y.to_vec(&stream)?, [13.0, 24.0, 43.0, 64.0]);
    gpu.finish()
}

#[test]
fn declarations_are_compared_with_the_loaded_kernel() -> Result<()> {
    let gpu = Fixture::new()?;
    assert!(load::<(PointerMut<u32>, u32)>(&gpu, "increment").is_ok());
    let error = load::<(PointerMut<u32>,)>(&gpu, "increment").expect_err("one is missing");
    let expected = BufferError::ArgumentCount { kernel: "increment", takes: 2, declared: 1 };
    assert_eq!(error, Error::Buffer(expected));
    let error = load::<(PointerMut<u32>, u64)>(&gpu, "increment").expect_err("the second is too large");
    let expected = BufferError::ArgumentSize { kernel: "increment", index: 1, takes: 4, declared: 8 };
    assert_eq!(error, Error::Buffer(expected));
    assert!(load::<(f32, Slice<f32>, SliceMut<f32>)>(&gpu, "saxpy").is_ok());
    let error = load::<(f32, Pointer<f32>, PointerMut<f32>)>(&gpu, "saxpy").expect_err("no lengths");
    assert!(error.is_invalid_argument(), "{error}");
    assert!(load::<(u32,)>(&gpu, "missing").expect_err("there is none").driver().is_some());
    gpu.finish()
}

#[test]
fn a_launch_checks_devices_before_the_driver() -> Result<()> {
    let gpu = Fixture::pair()?;
    let far = gpu.instance.device(1)?.lease_stream()?;
    let saxpy = gpu.saxpy()?;
    let (near, x) = (gpu.stream()?, DeviceVec::<f32>::zeroed(&gpu.allocator, 4, &far)?);
    let mut y = DeviceVec::<f32>::zeroed(&gpu.allocator, 4, &near)?;
    let calls = gpu.gpu.calls_made();
    for (stream, what) in [(&near, "the memory"), (&far, "the kernel")] {
        let error = saxpy.launch_linear(stream, 4, (1.0, &x, &mut y)).expect_err(what);
        assert!(matches!(error, Error::Buffer(BufferError::Device { .. })), "{error}");
    }
    let len = u32::MAX as usize + 1;
    assert!(saxpy.launch_linear(&near, len, (1.0, x.slice(..0)?, &mut y)).is_err());
    assert_eq!(gpu.gpu.calls_made(), calls);
    gpu.finish()
}

#[test]
fn two_sources_of_one_name_are_two_modules() -> Result<()> {
    use warpool::driver::{HostKernel, KernelSource};
    static OTHER: KernelSource = KernelSource {
        host_kernels: &[HostKernel::new("increment", |kernel| {
            let x = kernel.arg_ptr(0)?;
            kernel.write_u32(x, &[100])
        })],
        ..KERNELS_COPY
    };
    const KERNELS_COPY: KernelSource = KernelSource { name: "typed tests", cuda: "", host_kernels: &[] };
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 1, &stream)?;
    let ours = load::<(PointerMut<u32>, u32)>(&gpu, "increment")?;
    // SAFETY: on the simulated GPU, which checks every access.
    let theirs: Kernel<(PointerMut<u32>, u32)> = unsafe { Kernel::load(&gpu.device, &OTHER, "increment")? };
    ours.launch_linear(&stream, 1, (&mut x, 1))?;
    assert_eq!(x.to_vec(&stream)?, [1]);
    theirs.launch_linear(&stream, 1, (&mut x, 1))?;
    assert_eq!(x.to_vec(&stream)?, [100]);
    gpu.finish()
}
