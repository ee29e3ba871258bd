//! The kernels that checks launch: CUDA C++ text, and beside it the host implementation of each for the simulated GPU.
//! Loaded once per run, since compiling them takes longer than most checks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{
    DeviceId, DevicePtr, Driver, FunctionId, HostKernel, KernelArg, KernelFault, KernelScope, KernelSource,
    LaunchShape, ModuleId, Pattern,
};

use super::unsafe_calls::launch_kernel;
use crate::expect::CheckResult;
use crate::sync::lock;

/// Kernels that every device can run.
pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "conformance",
    cuda: r#"
extern "C" __global__ void spin(unsigned long long nanos) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begun < nanos);
}
extern "C" __global__ void append(unsigned int *log, unsigned int value) {
    unsigned int n = log[0];
    log[1 + n] = value;
    log[0] = n + 1;
}
extern "C" __global__ void add_u32(unsigned int *data, unsigned int n, unsigned int value) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += value;
}
extern "C" __global__ void write_sequence(unsigned int *data, unsigned int n, unsigned int first) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = first + i;
}
extern "C" __global__ void add_sequence(unsigned int *to, const unsigned int *from, unsigned int n,
                                        unsigned int value) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i] + value;
}
extern "C" __global__ void count_differences(const unsigned int *data, unsigned int n, unsigned int first,
                                             unsigned int *count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && data[i] != first + i) atomicAdd(count, 1u);
}
extern "C" __global__ void mix_u32(unsigned int *to, const unsigned int *from, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = to[i] * 5u + from[i];
}
extern "C" __global__ void axpy_f32(float *y, const float *x, float a, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __fadd_rn(__fmul_rn(a, x[i]), y[i]);
}
extern "C" __global__ void echo(unsigned long long *out, unsigned int a, int b, unsigned long long c, long long d,
                                float e, double f) {
    out[0] = a;
    out[1] = (unsigned long long)(long long)b;
    out[2] = c;
    out[3] = (unsigned long long)d;
    out[4] = __float_as_uint(e);
    out[5] = (unsigned long long)__double_as_longlong(f);
}
extern "C" __global__ void shape(unsigned int *out) {
    atomicAdd(out + 0, 1u);
    if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x + threadIdx.y + threadIdx.z == 0) {
        out[1] = gridDim.x; out[2] = gridDim.y; out[3] = gridDim.z;
        out[4] = blockDim.x; out[5] = blockDim.y; out[6] = blockDim.z;
    }
}
"#,
    host_kernels: &[
        HostKernel { name: "spin", run: |_| Ok(()), nanos: Some(spin_nanos) },
        HostKernel::new("append", append),
        HostKernel::new("add_u32", add_u32),
        HostKernel::new("write_sequence", write_sequence),
        HostKernel::new("add_sequence", add_sequence),
        HostKernel::new("count_differences", count_differences),
        HostKernel::new("mix_u32", mix_u32),
        HostKernel::new("axpy_f32", axpy_f32),
        HostKernel::new("echo", echo),
        HostKernel::new("shape", shape),
    ],
};

/// Kernels that set the values of conditional nodes. A module of their own, since older devices cannot load them.
const CONDITIONAL_SOURCE: KernelSource = KernelSource {
    name: "conformance conditional nodes",
    cuda: r#"
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
extern "C" __global__ void set_flag(unsigned long long flag, const unsigned int *value) {
    cudaGraphSetConditional(flag, *value);
}
extern "C" __global__ void count_down(unsigned long long flag, unsigned int *left) {
    if (*left > 0) *left -= 1;
    cudaGraphSetConditional(flag, *left > 0 ? 1 : 0);
}
"#,
    host_kernels: &[HostKernel::new("set_flag", set_flag), HostKernel::new("count_down", count_down)],
};

type KernelResult = Result<(), KernelFault>;

fn spin_nanos(_: &LaunchShape, args: &[KernelArg]) -> u64 {
    match args.first() {
        Some(&KernelArg::U64(nanos)) => nanos,
        _ => 0,
    }
}

fn append(scope: &mut KernelScope<'_>) -> KernelResult {
    let (log, value) = (scope.arg_ptr(0)?, scope.arg_u32(1)?);
    let n = scope.read_u32(log, 1)?[0];
    scope.write_u32(log.offset(4 * (1 + u64::from(n))), &[value])?;
    scope.write_u32(log, &[n + 1])
}

fn add_u32(scope: &mut KernelScope<'_>) -> KernelResult {
    let (data, n, value) = (scope.arg_ptr(0)?, scope.arg_u32(1)?, scope.arg_u32(2)?);
    let mut values = scope.read_u32(data, n as usize)?;
    values.iter_mut().for_each(|each| *each = each.wrapping_add(value));
    scope.write_u32(data, &values)
}

fn write_sequence(scope: &mut KernelScope<'_>) -> KernelResult {
    let (data, n, first) = (scope.arg_ptr(0)?, scope.arg_u32(1)?, scope.arg_u32(2)?);
    let words: Vec<u32> = (0..n).map(|i| first.wrapping_add(i)).collect();
    scope.write_u32(data, &words)
}

fn add_sequence(scope: &mut KernelScope<'_>) -> KernelResult {
    let (to, from, n, value) = (scope.arg_ptr(0)?, scope.arg_ptr(1)?, scope.arg_u32(2)?, scope.arg_u32(3)?);
    let words: Vec<u32> = scope.read_u32(from, n as usize)?.into_iter().map(|word| word.wrapping_add(value)).collect();
    scope.write_u32(to, &words)
}

fn count_differences(scope: &mut KernelScope<'_>) -> KernelResult {
    let (data, n, first, count) = (scope.arg_ptr(0)?, scope.arg_u32(1)?, scope.arg_u32(2)?, scope.arg_ptr(3)?);
    let words = scope.read_u32(data, n as usize)?;
    let different = (0..).zip(&words).filter(|&(i, &word)| word != first.wrapping_add(i)).count();
    let different = u32::try_from(different).map_err(|_| KernelFault::new("more words than a u32 counts"))?;
    let before = scope.read_u32(count, 1)?[0];
    scope.write_u32(count, &[before + different])
}

fn mix_u32(scope: &mut KernelScope<'_>) -> KernelResult {
    let (to, from, n) = (scope.arg_ptr(0)?, scope.arg_ptr(1)?, scope.arg_u32(2)? as usize);
    let (old, other) = (scope.read_u32(to, n)?, scope.read_u32(from, n)?);
    scope.write_u32(to, &mix_u32_on_host(&old, &other))
}

/// What `mix_u32` computes, on the host.
pub(crate) fn mix_u32_on_host(to: &[u32], from: &[u32]) -> Vec<u32> {
    to.iter().zip(from).map(|(to, from)| to.wrapping_mul(5).wrapping_add(*from)).collect()
}

fn axpy_f32(scope: &mut KernelScope<'_>) -> KernelResult {
    let (y, x, a, n) = (scope.arg_ptr(0)?, scope.arg_ptr(1)?, scope.arg_f32(2)?, scope.arg_u32(3)? as usize);
    let (old, xs) = (scope.read_f32(y, n)?, scope.read_f32(x, n)?);
    let sums: Vec<f32> = old.iter().zip(&xs).map(|(y, x)| a * x + y).collect();
    scope.write_f32(y, &sums)
}

fn echo(scope: &mut KernelScope<'_>) -> KernelResult {
    let words = [
        u64::from(scope.arg_u32(1)?),
        i64::from(scope.arg_i32(2)?).cast_unsigned(),
        scope.arg_u64(3)?,
        scope.arg_i64(4)?.cast_unsigned(),
        u64::from(scope.arg_f32(5)?.to_bits()),
        scope.arg_f64(6)?.to_bits(),
    ];
    let out = scope.arg_ptr(0)?;
    scope.write_u64(out, &words)
}

fn shape(scope: &mut KernelScope<'_>) -> KernelResult {
    let out = scope.arg_ptr(0)?;
    let LaunchShape { grid, block, .. } = scope.shape;
    let threads =
        u32::try_from(scope.shape.threads()).map_err(|_| KernelFault::new("more threads than a u32 counts"))?;
    let before = scope.read_u32(out, 1)?[0];
    scope.write_u32(out, &[before + threads, grid[0], grid[1], grid[2], block[0], block[1], block[2]])
}

fn set_flag(scope: &mut KernelScope<'_>) -> KernelResult {
    let (flag, ptr) = (scope.arg_conditional(0)?, scope.arg_ptr(1)?);
    let value = scope.read_u32(ptr, 1)?[0];
    scope.memory.set_conditional(flag, value)
}

fn count_down(scope: &mut KernelScope<'_>) -> KernelResult {
    let (flag, ptr) = (scope.arg_conditional(0)?, scope.arg_ptr(1)?);
    let left = scope.read_u32(ptr, 1)?[0].saturating_sub(1);
    scope.write_u32(ptr, &[left])?;
    scope.memory.set_conditional(flag, u32::from(left > 0))
}

/// Declares the functions of a module, by the names of its kernels.
macro_rules! functions {
    ($($(#[$doc:meta])* $module:ident: $($function:ident)*;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $module {
            $(pub(crate) $function: FunctionId,)*
        }

        impl $module {
            fn of(driver: &dyn Driver, module: ModuleId) -> warpool_driver::Result<Self> {
                Ok(Self { $($function: driver.function_get(module, stringify!($function))?,)* })
            }
        }
    )*};
}

functions! {
    /// The functions of [`SOURCE`].
    Kernels: spin append add_u32 write_sequence add_sequence count_differences mix_u32 axpy_f32 echo shape;
    /// The functions of [`CONDITIONAL_SOURCE`].
    ConditionalKernels: set_flag count_down;
}

/// Words for the results of `count_differences`: the number of counts that can be in flight at once.
const COUNTERS: u64 = 1024;

/// The kernels of one run: loaded at first use, unloaded when dropped.
pub(crate) struct KernelCache {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    plain: Mutex<Option<Plain>>,
    conditional: Mutex<Option<(ModuleId, ConditionalKernels)>>,
    next_counter: AtomicU64,
}

#[derive(Clone, Copy)]
struct Plain {
    module: ModuleId,
    kernels: Kernels,
    counters: DevicePtr,
}

impl KernelCache {
    pub(crate) fn new(driver: Arc<dyn Driver>, device: DeviceId) -> Self {
        let (plain, conditional) = (Mutex::new(None), Mutex::new(None));
        Self { driver, device, plain, conditional, next_counter: AtomicU64::new(0) }
    }

    /// The kernels of [`SOURCE`]. The first call must not be made during a capture.
    pub(super) fn kernels(&self) -> CheckResult<Kernels> {
        Ok(self.plain()?.kernels)
    }

    /// A word for the result of one `count_differences`.
    pub(super) fn next_counter(&self) -> CheckResult<DevicePtr> {
        let index = self.next_counter.fetch_add(1, Ordering::Relaxed) % COUNTERS;
        Ok(self.plain()?.counters.offset(4 * index))
    }

    fn plain(&self) -> CheckResult<Plain> {
        let mut slot = lock(&self.plain);
        if let Some(plain) = *slot {
            return Ok(plain);
        }
        let (module, kernels) = self.load(&SOURCE, Kernels::of)?;
        let counters = match self.driver.mem_alloc(self.device, 4 * COUNTERS) {
            Ok(counters) => counters,
            Err(error) => {
                self.driver.module_unload(module)?;
                return Err(error.into());
            }
        };
        let plain = Plain { module, kernels, counters };
        *slot = Some(plain);
        self.warm_up(&plain)?;
        Ok(plain)
    }

    /// The kernels of [`CONDITIONAL_SOURCE`].
    pub(super) fn conditional_kernels(&self) -> CheckResult<ConditionalKernels> {
        let mut slot = lock(&self.conditional);
        if let Some((_, kernels)) = *slot {
            return Ok(kernels);
        }
        let loaded = self.load(&CONDITIONAL_SOURCE, ConditionalKernels::of)?;
        *slot = Some(loaded);
        Ok(loaded.1)
    }

    /// Loads a module and looks up its functions. Unloads it again if one is missing.
    fn load<T>(
        &self,
        source: &KernelSource,
        functions: impl FnOnce(&dyn Driver, ModuleId) -> warpool_driver::Result<T>,
    ) -> CheckResult<(ModuleId, T)> {
        let module = self.driver.module_load(self.device, source)?;
        let functions = functions(&*self.driver, module);
        if functions.is_err() {
            self.driver.module_unload(module)?;
        }
        Ok((module, functions?))
    }

    /// Runs every kernel and every fill once. CUDA loads code at its first launch, and loading may wait for running
    /// work: a check that needs two things to run at once would see them run one after the other.
    fn warm_up(&self, plain: &Plain) -> CheckResult {
        let (driver, kernels) = (&*self.driver, &plain.kernels);
        let stream = driver.stream_default(self.device)?;
        let scratch = driver.mem_alloc(self.device, 4096)?;
        let worked = (|| {
            driver.fill(scratch, Pattern::U8(0), 4096, stream)?;
            driver.fill(scratch, Pattern::U16(0), 8, stream)?;
            driver.fill(scratch, Pattern::U32(0), 4, stream)?;
            driver.copy(scratch.offset(2048).into(), scratch.into(), 64, stream)?;
            let (ptr, other, one) = (KernelArg::Ptr(scratch), KernelArg::Ptr(scratch.offset(64)), KernelArg::U32(1));
            let (i32, u64, i64) = (KernelArg::I32(1), KernelArg::U64(1), KernelArg::I64(1));
            let (f32, f64) = (KernelArg::F32(1.0), KernelArg::F64(1.0));
            let all: [(FunctionId, &[KernelArg]); 10] = [
                (kernels.append, &[ptr, one]),
                (kernels.add_u32, &[ptr, one, one]),
                (kernels.write_sequence, &[ptr, one, one]),
                (kernels.add_sequence, &[ptr, other, one, one]),
                (kernels.count_differences, &[ptr, one, one, other]),
                (kernels.mix_u32, &[ptr, other, one]),
                (kernels.axpy_f32, &[ptr, other, f32, one]),
                (kernels.echo, &[ptr, one, i32, u64, i64, f32, f64]),
                (kernels.shape, &[ptr]),
                (kernels.spin, &[KernelArg::U64(0)]),
            ];
            for (function, args) in all {
                launch_kernel(driver, function, LaunchShape::ONE, args, stream)?;
            }
            driver.stream_synchronize(stream)
        })();
        Ok(worked.and(driver.mem_free(scratch))?)
    }
}

impl Drop for KernelCache {
    fn drop(&mut self) {
        // These fail only on a device that the destructive suite made unusable.
        if let Some(plain) = lock(&self.plain).take() {
            let _ = self.driver.mem_free(plain.counters);
            let _ = self.driver.module_unload(plain.module);
        }
        if let Some((module, _)) = lock(&self.conditional).take() {
            let _ = self.driver.module_unload(module);
        }
    }
}
