//! The kernels that checks run: CUDA C++ text, and beside it the same in Rust.
//! Loaded once for a whole run, since compiling them takes longer than most checks.

use std::sync::Mutex;

use crate::expect::Checked;
use crate::launch::launch_kernel;
use warpool_driver::{
    DeviceId, Driver, FunctionId, KernelArg, KernelFault, KernelMirror, KernelScope, KernelSource, LaunchShape,
    ModuleId,
};

/// Kernels that every device can run.
pub(super) const PLAIN: KernelSource = KernelSource {
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
extern "C" __global__ void fill_index(unsigned int *data, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = i;
}
extern "C" __global__ void mix_u32(unsigned int *to, const unsigned int *from, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = to[i] * 5u + from[i];
}
extern "C" __global__ void axpy_f32(float *y, const float *x, float a, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __fadd_rn(__fmul_rn(a, x[i]), y[i]);
}
extern "C" __global__ void echo(unsigned long long *out, unsigned int a, int b, unsigned long long c, long long d, float e, double f) {
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
    mirrors: &[
        KernelMirror { name: "spin", run: |_| Ok(()), nanos: Some(spin_nanos) },
        KernelMirror { name: "append", run: append, nanos: None },
        KernelMirror { name: "add_u32", run: add_u32, nanos: None },
        KernelMirror { name: "fill_index", run: fill_index, nanos: None },
        KernelMirror { name: "mix_u32", run: mix_u32, nanos: None },
        KernelMirror { name: "axpy_f32", run: axpy_f32, nanos: None },
        KernelMirror { name: "echo", run: echo, nanos: None },
        KernelMirror { name: "shape", run: shape, nanos: None },
    ],
};

/// Kernels that set flags of conditional nodes. Apart, since older devices cannot load them.
pub(super) const CONDITIONAL: KernelSource = KernelSource {
    name: "conformance conditionals",
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
    mirrors: &[
        KernelMirror { name: "set_flag", run: set_flag, nanos: None },
        KernelMirror { name: "count_down", run: count_down, nanos: None },
    ],
};

type Ran = Result<(), KernelFault>;

fn spin_nanos(_: &LaunchShape, args: &[KernelArg]) -> u64 {
    match args.first() {
        Some(&KernelArg::U64(nanos)) => nanos,
        _ => 0,
    }
}

fn append(scope: &mut KernelScope<'_>) -> Ran {
    let (log, value) = (scope.arg_ptr(0)?, scope.arg_u32(1)?);
    let n = scope.read_u32(log, 1)?[0];
    scope.write_u32(log.offset(4 * (1 + u64::from(n))), &[value])?;
    scope.write_u32(log, &[n + 1])
}

fn add_u32(scope: &mut KernelScope<'_>) -> Ran {
    let (data, n, value) = (scope.arg_ptr(0)?, scope.arg_u32(1)?, scope.arg_u32(2)?);
    let mut values = scope.read_u32(data, n as usize)?;
    values.iter_mut().for_each(|each| *each = each.wrapping_add(value));
    scope.write_u32(data, &values)
}

fn fill_index(scope: &mut KernelScope<'_>) -> Ran {
    let (data, n) = (scope.arg_ptr(0)?, scope.arg_u32(1)?);
    scope.write_u32(data, &(0..n).collect::<Vec<_>>())
}

fn mix_u32(scope: &mut KernelScope<'_>) -> Ran {
    let (to, from, n) = (scope.arg_ptr(0)?, scope.arg_ptr(1)?, scope.arg_u32(2)? as usize);
    let (old, other) = (scope.read_u32(to, n)?, scope.read_u32(from, n)?);
    scope.write_u32(to, &mixed(&old, &other))
}

/// What `mix_u32` leaves behind, for those who compute it on the host.
pub(super) fn mixed(to: &[u32], from: &[u32]) -> Vec<u32> {
    to.iter().zip(from).map(|(to, from)| to.wrapping_mul(5).wrapping_add(*from)).collect()
}

fn axpy_f32(scope: &mut KernelScope<'_>) -> Ran {
    let (y, x, a, n) = (scope.arg_ptr(0)?, scope.arg_ptr(1)?, scope.arg_f32(2)?, scope.arg_u32(3)? as usize);
    let (old, xs) = (scope.read_f32(y, n)?, scope.read_f32(x, n)?);
    let sums: Vec<f32> = old.iter().zip(&xs).map(|(y, x)| a * x + y).collect();
    scope.write_f32(y, &sums)
}

fn echo(scope: &mut KernelScope<'_>) -> Ran {
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

fn shape(scope: &mut KernelScope<'_>) -> Ran {
    let out = scope.arg_ptr(0)?;
    let LaunchShape { grid, block, .. } = scope.shape;
    let threads =
        u32::try_from(scope.shape.threads()).map_err(|_| KernelFault::new("more threads than a u32 counts"))?;
    let before = scope.read_u32(out, 1)?[0];
    scope.write_u32(out, &[before + threads, grid[0], grid[1], grid[2], block[0], block[1], block[2]])
}

fn set_flag(scope: &mut KernelScope<'_>) -> Ran {
    let (flag, ptr) = (scope.arg_conditional(0)?, scope.arg_ptr(1)?);
    let value = scope.read_u32(ptr, 1)?[0];
    scope.memory.set_conditional(flag, value)
}

fn count_down(scope: &mut KernelScope<'_>) -> Ran {
    let (flag, ptr) = (scope.arg_conditional(0)?, scope.arg_ptr(1)?);
    let left = scope.read_u32(ptr, 1)?[0].saturating_sub(1);
    scope.write_u32(ptr, &[left])?;
    scope.memory.set_conditional(flag, u32::from(left > 0))
}

/// The plain kernels, ready to launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain {
    module: ModuleId,
    pub(super) spin: FunctionId,
    pub(super) append: FunctionId,
    pub(super) add_u32: FunctionId,
    pub(super) fill_index: FunctionId,
    pub(super) mix_u32: FunctionId,
    pub(super) axpy_f32: FunctionId,
    pub(super) echo: FunctionId,
    pub(super) shape: FunctionId,
}

/// The kernels for conditional nodes, ready to launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conditional {
    module: ModuleId,
    pub(super) set_flag: FunctionId,
    pub(super) count_down: FunctionId,
}

/// The kernels of one run, loaded when first asked for and unloaded at its end.
pub(super) struct Kit<'a> {
    driver: &'a dyn Driver,
    device: DeviceId,
    plain: Mutex<Option<Plain>>,
    conditional: Mutex<Option<Conditional>>,
}

impl<'a> Kit<'a> {
    pub(super) fn new(driver: &'a dyn Driver, device: DeviceId) -> Self {
        Self { driver, device, plain: Mutex::new(None), conditional: Mutex::new(None) }
    }

    /// The plain kernels. The first call must not come while something captures.
    pub(super) fn plain(&self) -> Checked<Plain> {
        let mut slot = self.plain.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(plain) = *slot {
            return Ok(plain);
        }
        let plain = self.load(&PLAIN, |module, get| {
            Ok(Plain {
                module,
                spin: get("spin")?,
                append: get("append")?,
                add_u32: get("add_u32")?,
                fill_index: get("fill_index")?,
                mix_u32: get("mix_u32")?,
                axpy_f32: get("axpy_f32")?,
                echo: get("echo")?,
                shape: get("shape")?,
            })
        })?;
        *slot = Some(plain);
        self.warm_up(&plain)?;
        Ok(plain)
    }

    /// The kernels for conditional nodes.
    pub(super) fn conditional(&self) -> Checked<Conditional> {
        let mut slot = self.conditional.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(conditional) = *slot {
            return Ok(conditional);
        }
        let conditional = self.load(&CONDITIONAL, |module, get| {
            Ok(Conditional { module, set_flag: get("set_flag")?, count_down: get("count_down")? })
        })?;
        *slot = Some(conditional);
        Ok(conditional)
    }

    /// Loads a module and looks its functions up; without all of them, none stay.
    fn load<T>(
        &self,
        source: &KernelSource,
        functions: impl Fn(ModuleId, &dyn Fn(&str) -> warpool_driver::Result<FunctionId>) -> warpool_driver::Result<T>,
    ) -> Checked<T> {
        let module = self.driver.module_load(self.device, source)?;
        let found = functions(module, &|name| self.driver.function_get(module, name));
        if found.is_err() {
            self.driver.module_unload(module)?;
        }
        Ok(found?)
    }

    /// Runs every kernel and every fill once. CUDA loads code when it is first launched, and loading may wait for
    /// whatever runs: a check that wants two things at once would then see them one after the other.
    fn warm_up(&self, kernels: &Plain) -> Checked {
        let driver = self.driver;
        let stream = driver.stream_default(self.device)?;
        let scratch = driver.mem_alloc(self.device, 4096)?;
        let worked = (|| {
            driver.fill(scratch, warpool_driver::Pattern::U8(0), 4096, stream)?;
            driver.fill(scratch, warpool_driver::Pattern::U16(0), 8, stream)?;
            driver.fill(scratch, warpool_driver::Pattern::U32(0), 4, stream)?;
            driver.copy(scratch.offset(2048).into(), scratch.into(), 64, stream)?;
            let (ptr, one) = (KernelArg::Ptr(scratch), KernelArg::U32(1));
            let echoed = [
                ptr,
                one,
                KernelArg::I32(1),
                KernelArg::U64(1),
                KernelArg::I64(1),
                KernelArg::F32(1.0),
                KernelArg::F64(1.0),
            ];
            let all: [(FunctionId, &[KernelArg]); 8] = [
                (kernels.append, &[ptr, one]),
                (kernels.add_u32, &[ptr, one, one]),
                (kernels.fill_index, &[ptr, one]),
                (kernels.mix_u32, &[ptr, KernelArg::Ptr(scratch.offset(64)), one]),
                (kernels.axpy_f32, &[ptr, KernelArg::Ptr(scratch.offset(64)), KernelArg::F32(1.0), one]),
                (kernels.echo, &echoed),
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

impl Drop for Kit<'_> {
    fn drop(&mut self) {
        let slots = (
            self.plain.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).map(|plain| plain.module),
            self.conditional.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).map(|those| those.module),
        );
        for module in [slots.0, slots.1].into_iter().flatten() {
            // Fails only on a device that the destructive suite broke.
            let _ = self.driver.module_unload(module);
        }
    }
}
