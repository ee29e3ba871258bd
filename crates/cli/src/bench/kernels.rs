//! The kernels of the benchmarks.

use warpool_driver::{HostKernel, KernelSource};

/// `warpool_bench_empty` does nothing; `warpool_bench_set` writes a number.
pub static KERNELS: KernelSource = KernelSource {
    name: "bench",
    cuda: r#"
extern "C" __global__ void warpool_bench_empty() {}
extern "C" __global__ void warpool_bench_set(unsigned int* out, unsigned int value) { *out = value; }
"#,
    host_kernels: &[
        HostKernel::new("warpool_bench_empty", |_| Ok(())),
        HostKernel::new("warpool_bench_set", |scope| {
            let (out, value) = (scope.arg_ptr(0)?, scope.arg_u32(1)?);
            scope.memory.write(out, &value.to_le_bytes())
        }),
    ],
};
