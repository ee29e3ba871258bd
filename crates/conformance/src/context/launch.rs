//! Kernel launches for checks.

use warpool_driver::{DevicePtr, FunctionId, KernelArg, LaunchShape, StreamId};

use super::TestContext;
use super::kernels::{ConditionalKernels, Kernels};
use crate::expect::{CheckResult, expect_eq, skip};

/// How long [`TestContext::keep_busy`] occupies a stream: long for a host thread, short for a suite.
const BUSY_NANOS: u64 = 150_000_000;

/// How long [`TestContext::delay`] occupies a stream: long enough that a missing wait shows.
const DELAY_NANOS: u64 = 5_000_000;

/// A list in device memory that kernels append to. Its entries are in the order in which the kernels ran.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelLog {
    pub(crate) ptr: DevicePtr,
    capacity: u32,
}

impl TestContext {
    /// The kernels that every device can run. The first call of a run loads them, and must not be made during a
    /// capture.
    pub(crate) fn kernels(&self) -> CheckResult<Kernels> {
        self.kernel_cache.kernels()
    }

    /// The kernels for conditional nodes. Skips the check where there are none.
    pub(crate) fn conditional_kernels(&self) -> CheckResult<ConditionalKernels> {
        if !self.properties()?.conditional_nodes {
            return skip("graphs of this device have no conditional nodes");
        }
        self.kernel_cache.conditional_kernels()
    }

    /// Launches a kernel over `n` elements.
    pub(crate) fn launch(&self, function: FunctionId, n: u32, args: &[KernelArg], stream: StreamId) -> CheckResult {
        Ok(self.launch_kernel(function, LaunchShape::linear(n), args, stream)?)
    }

    /// Launches a kernel of one thread.
    pub(crate) fn launch_single(&self, function: FunctionId, args: &[KernelArg], stream: StreamId) -> CheckResult {
        Ok(self.launch_kernel(function, LaunchShape::ONE, args, stream)?)
    }

    /// Occupies `stream` long enough that everything else the check does finishes first.
    pub fn keep_busy(&self, stream: StreamId) -> CheckResult {
        self.launch_single(self.kernels()?.spin, &[KernelArg::U64(BUSY_NANOS)], stream)
    }

    /// Occupies `stream` for a short time: work that fails to wait for it runs too early.
    pub(crate) fn delay(&self, stream: StreamId) -> CheckResult {
        self.launch_single(self.kernels()?.spin, &[KernelArg::U64(DELAY_NANOS)], stream)
    }

    /// Adds `value` to `n` words.
    pub(crate) fn add_u32(&self, ptr: DevicePtr, n: u32, value: u32, stream: StreamId) -> CheckResult {
        self.launch(self.kernels()?.add_u32, n, &[ptr.into(), KernelArg::U32(n), KernelArg::U32(value)], stream)
    }

    /// Writes 0, 1, 2 and so on into `n` words.
    pub(crate) fn fill_index(&self, ptr: DevicePtr, n: u32, stream: StreamId) -> CheckResult {
        let args = [ptr.into(), KernelArg::U32(n), KernelArg::U32(0)];
        self.launch(self.kernels()?.write_sequence, n, &args, stream)
    }

    /// An empty log. Also loads the kernels, which must not happen during a capture.
    pub(crate) fn kernel_log(&self, capacity: u32) -> CheckResult<KernelLog> {
        self.kernels()?;
        let ptr = self.alloc_words(&vec![0; capacity as usize + 1])?;
        Ok(KernelLog { ptr, capacity })
    }

    pub(crate) fn append(&self, log: KernelLog, value: u32, stream: StreamId) -> CheckResult {
        self.launch_single(self.kernels()?.append, &[log.ptr.into(), KernelArg::U32(value)], stream)
    }

    /// The entries of a log must be `want`, in this order.
    #[track_caller]
    pub(crate) fn expect_log(&self, log: KernelLog, want: &[u32]) -> CheckResult {
        let words = self.read_words(log.ptr, log.capacity as usize + 1)?;
        let n = words[0].min(log.capacity) as usize;
        expect_eq("the order of work", &words[1..=n], want)
    }
}
