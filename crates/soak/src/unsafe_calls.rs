//! The calls of programs that Rust cannot check.
#![expect(
    unsafe_code,
    reason = "streams of other libraries, the declaration of a kernel, forks, and free memory of the C heap"
)]

#[cfg(target_os = "linux")]
use std::ffi::c_int;

use warpool::driver::{DevicePtr, Driver, ForeignStream, FunctionId, HostKernel, KernelSource, LaunchShape, RawHandle};
use warpool::generator::Target;
use warpool::graph::{Capture, GraphArg};
use warpool::typed::{Kernel, Slice, SliceMut};
use warpool::{Device, Result, Stream};

/// A kernel that adds one slice to another.
pub type Add = Kernel<(Slice<u32>, SliceMut<u32>)>;

static KERNELS: KernelSource = KernelSource {
    name: "soak",
    cuda: r#"extern "C" __global__ void add(
        const unsigned* x, unsigned long long x_len, unsigned* y, unsigned long long y_len) {}"#,
    host_kernels: &[HostKernel::new("add", |kernel| {
        let (x, y) = (kernel.arg_ptr(0)?, kernel.arg_ptr(2)?);
        let len = kernel.arg_u64(1)?.min(kernel.arg_u64(3)?) as usize;
        let (x, mut values) = (kernel.read_u32(x, len)?, kernel.read_u32(y, len)?);
        values.iter_mut().zip(x).for_each(|(y, x)| *y = y.wrapping_add(x));
        kernel.write_u32(y, &values)
    })],
};

#[cfg(target_os = "linux")]
unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn alarm(seconds: u32) -> u32;
    fn _exit(status: c_int) -> !;
}

/// Runs `act` in a child of this process, which is killed if it hangs. Returns whether it returned `true`.
#[cfg(target_os = "linux")]
pub fn in_child(act: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has one thread, which only runs `act`; the test is about what that must not do after a fork.
    let pid = unsafe { fork() };
    assert!(pid >= 0, "no child can be started");
    if pid == 0 {
        // SAFETY: takes no pointers.
        unsafe { alarm(30) };
        let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or(false);
        // SAFETY: ends the child.
        unsafe { _exit(c_int::from(!passed)) }
    }
    let mut status = 0;
    // SAFETY: writes the status of a child of this process.
    let waited = unsafe { waitpid(pid, &raw mut status, 0) };
    waited == pid && status == 0
}

/// Forks are tested on Linux.
#[cfg(not(target_os = "linux"))]
pub fn in_child(_: impl FnOnce() -> bool) -> bool {
    true
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe extern "C" {
    fn malloc_trim(pad: usize) -> c_int;
}

/// Makes the C heap return the pages that hold nothing. By itself it keeps them, in one arena per thread.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn trim_heap() {
    // SAFETY: takes no pointers, and may be called at any time.
    unsafe { malloc_trim(0) };
}

/// Other C libraries have no such call.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn trim_heap() {}

/// The handle of a stream that the program created and destroys itself.
pub fn foreign_stream(raw: RawHandle) -> ForeignStream {
    // SAFETY: the simulated GPU checks every handle; the program does not use a stream that it has destroyed.
    unsafe { ForeignStream::new(raw) }
}

/// Captures a kernel of one thread.
pub fn capture_kernel(
    capture: &mut Capture<'_>,
    function: FunctionId,
    args: &[GraphArg],
    stream: &Stream,
) -> Result<()> {
    assert_eq!(stream.instance().driver().kind(), "sim");
    // SAFETY: the simulated GPU checks every access of a kernel.
    unsafe { capture.launch(function, LaunchShape::ONE, args, stream) }
}

/// A target of random numbers at any address.
pub fn raw_target(driver: &dyn Driver, ptr: DevicePtr, count: u64) -> Target {
    assert_eq!(driver.kind(), "sim");
    // SAFETY: the simulated GPU checks every access of a kernel.
    unsafe { Target::raw(ptr, count) }
}

/// The kernel on a device.
pub fn load_add(device: &Device) -> Result<Add> {
    // SAFETY: these are its parameters, and it stays within both slices.
    unsafe { Kernel::load(device, &KERNELS, "add") }
}
