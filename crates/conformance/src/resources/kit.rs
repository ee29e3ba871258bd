//! Kernels for checks of contents: words that depend on their place are written, added to and counted on the device,
//! and a stream can be kept busy.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::Checked;
use crate::expect::expect_eq;
use crate::launch::launch_kernel;
use warpool_driver::{
    DevicePtr, FunctionId, KernelArg, KernelFault, KernelMirror, KernelScope, KernelSource, LaunchShape, ModuleId,
    Pattern,
};

use super::Bench;
use warpool::Stream;

const SOURCE: KernelSource = KernelSource {
    name: "warpool selftest",
    cuda: r#"
extern "C" __global__ void selftest_busy(unsigned long long nanos) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begun < nanos);
}
extern "C" __global__ void selftest_write(unsigned int *data, unsigned int n, unsigned int first) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = first + i;
}
extern "C" __global__ void selftest_add(unsigned int *to, const unsigned int *from, unsigned int n, unsigned int by) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i] + by;
}
extern "C" __global__ void selftest_count(const unsigned int *data, unsigned int n, unsigned int first, unsigned int *wrong) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && data[i] != first + i) atomicAdd(wrong, 1u);
}
"#,
    mirrors: &[
        KernelMirror { name: "selftest_busy", run: |_| Ok(()), nanos: Some(busy_nanos) },
        KernelMirror { name: "selftest_write", run: write, nanos: None },
        KernelMirror { name: "selftest_add", run: add, nanos: None },
        KernelMirror { name: "selftest_count", run: count, nanos: None },
    ],
};

/// Long for a host thread, short for a suite.
const BUSY_NANOS: u64 = 150_000_000;

/// How many counts can be under way at once.
const SLOTS: u64 = 1024;

fn busy_nanos(_: &LaunchShape, args: &[KernelArg]) -> u64 {
    match args.first() {
        Some(&KernelArg::U64(nanos)) => nanos,
        _ => 0,
    }
}

fn write(scope: &mut KernelScope<'_>) -> Result<(), KernelFault> {
    let (data, n, first) = (scope.arg_ptr(0)?, scope.arg_u32(1)?, scope.arg_u32(2)?);
    let words: Vec<u32> = (0..n).map(|i| first.wrapping_add(i)).collect();
    scope.write_u32(data, &words)
}

fn add(scope: &mut KernelScope<'_>) -> Result<(), KernelFault> {
    let (to, from, n, by) = (scope.arg_ptr(0)?, scope.arg_ptr(1)?, scope.arg_u32(2)?, scope.arg_u32(3)?);
    let words: Vec<u32> = scope.read_u32(from, n as usize)?.into_iter().map(|word| word.wrapping_add(by)).collect();
    scope.write_u32(to, &words)
}

fn count(scope: &mut KernelScope<'_>) -> Result<(), KernelFault> {
    let (data, n, first, out) = (scope.arg_ptr(0)?, scope.arg_u32(1)?, scope.arg_u32(2)?, scope.arg_ptr(3)?);
    let words = scope.read_u32(data, n as usize)?;
    let wrong = words.iter().zip(0..).filter(|&(&word, i)| word != first.wrapping_add(i)).count();
    let before = scope.read_u32(out, 1)?[0];
    let wrong = u32::try_from(wrong).map_err(|_| KernelFault::new("more words than a u32 counts"))?;
    scope.write_u32(out, &[before + wrong])
}

/// The kernels, loaded on the bench's device.
pub(super) struct Kit<'a> {
    bench: &'a Bench,
    module: ModuleId,
    busy: FunctionId,
    write: FunctionId,
    add: FunctionId,
    count: FunctionId,
    /// Where counts go.
    slots: DevicePtr,
    next: AtomicU64,
}

impl<'a> Kit<'a> {
    /// Runs `body` with the kernels, and unloads them.
    pub(super) fn with(bench: &'a Bench, body: impl FnOnce(&Self) -> Checked) -> Checked {
        let kit = Self::load(bench)?;
        let outcome = body(&kit);
        let driver = bench.instance.driver();
        if outcome.is_err() {
            // Whatever it left under way must not touch what goes now. The first failure is the one to report.
            let _ = driver.device_synchronize(bench.device.id());
        }
        driver.mem_free(kit.slots)?;
        driver.module_unload(kit.module)?;
        outcome
    }

    fn load(bench: &'a Bench) -> Checked<Self> {
        let driver = bench.instance.driver();
        let module = driver.module_load(bench.device.id(), &SOURCE)?;
        let kit = Self {
            bench,
            module,
            busy: driver.function_get(module, "selftest_busy")?,
            write: driver.function_get(module, "selftest_write")?,
            add: driver.function_get(module, "selftest_add")?,
            count: driver.function_get(module, "selftest_count")?,
            slots: driver.mem_alloc(bench.device.id(), 4 * SLOTS)?,
            next: AtomicU64::new(0),
        };
        // CUDA loads code at its first launch, which may wait for whatever runs: so that happens here.
        let stream = bench.device.default_stream()?;
        launch_kernel(&**driver, kit.busy, LaunchShape::ONE, &[KernelArg::U64(0)], stream.id())?;
        kit.write(kit.slots, 4, 7, &stream)?;
        kit.add(kit.slots, kit.slots, 4, 0_u32.wrapping_sub(7), &stream)?;
        kit.expect("the kernels' own work", kit.slots, 4, 0, &stream)?;
        Ok(kit)
    }

    /// Keeps `stream` at work for long: what else the check does will be done first.
    pub(super) fn keep_busy(&self, stream: &Stream) -> Checked {
        let args = [KernelArg::U64(BUSY_NANOS)];
        Ok(launch_kernel(&**self.bench.instance.driver(), self.busy, LaunchShape::ONE, &args, stream.id())?)
    }

    /// Writes `first`, `first + 1` and so on, in words, over `bytes` bytes.
    pub(super) fn write(&self, ptr: DevicePtr, bytes: u64, first: u32, stream: &Stream) -> Checked {
        let args = [ptr.into(), KernelArg::U32(words(bytes)), KernelArg::U32(first)];
        Ok(launch_kernel(
            &**self.bench.instance.driver(),
            self.write,
            LaunchShape::linear(words(bytes)),
            &args,
            stream.id(),
        )?)
    }

    /// Sets the words of `to` to those of `from` plus `by`, over `bytes` bytes: what [`write`](Self::write) wrote with
    /// one first word becomes what it writes with another.
    pub(super) fn add(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: u64,
        by: u32,
        stream: &Stream,
    ) -> warpool::Result<()> {
        let args = [to.into(), from.into(), KernelArg::U32(words(bytes)), KernelArg::U32(by)];
        Ok(launch_kernel(
            &**self.bench.instance.driver(),
            self.add,
            LaunchShape::linear(words(bytes)),
            &args,
            stream.id(),
        )?)
    }

    /// Waits for `stream` and expects what [`write`](Self::write) writes, counted by a kernel.
    #[track_caller]
    pub(super) fn expect(&self, what: &str, ptr: DevicePtr, bytes: u64, first: u32, stream: &Stream) -> Checked {
        let driver = self.bench.instance.driver();
        let out = self.slots.offset(4 * (self.next.fetch_add(1, Ordering::Relaxed) % SLOTS));
        let args = [ptr.into(), KernelArg::U32(words(bytes)), KernelArg::U32(first), out.into()];
        let count = || -> Checked<Vec<u8>> {
            driver.fill(out, Pattern::U32(0), 1, stream.id())?;
            launch_kernel(&**driver, self.count, LaunchShape::linear(words(bytes)), &args, stream.id())?;
            stream.synchronize()?;
            self.bench.bytes_at(out, 4)
        };
        expect_eq(&format!("{what}: words that differ"), count()?, vec![0; 4])
    }
}

fn words(bytes: u64) -> u32 {
    u32::try_from(bytes / 4).expect("checks work on less than 16 GiB")
}
