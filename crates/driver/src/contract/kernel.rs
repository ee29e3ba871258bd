//! Kernels: CUDA C++ source for real devices, and with it host implementations for the simulated one.
//!
//! ```
//! use warpool_driver::sim::{SimConfig, SimDriver};
//! use warpool_driver::*;
//!
//! static DOUBLE: KernelSource = KernelSource {
//!     name: "double",
//!     cuda: r#"extern "C" __global__ void twice(float* x, unsigned n) {
//!         unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
//!         if (i < n) x[i] *= 2;
//!     }"#,
//!     host_kernels: &[HostKernel::new("twice", |kernel| {
//!         let (x, n) = (kernel.arg_ptr(0)?, kernel.arg_u32(1)?);
//!         let values: Vec<f32> = kernel.read_f32(x, n as usize)?.iter().map(|x| x * 2.0).collect();
//!         kernel.write_f32(x, &values)
//!     })],
//! };
//!
//! # fn main() -> Result<()> {
//! let (gpu, device) = (SimDriver::new(SimConfig::default()), DeviceId(0));
//! let stream = gpu.stream_create(device, StreamOptions::default())?;
//! let memory = gpu.mem_alloc(device, 4)?;
//! gpu.upload(device, memory, &1.5_f32.to_le_bytes())?;
//! let module = gpu.module_load(device, &DOUBLE)?;
//! let twice = gpu.function_get(module, "twice")?;
//! gpu.kernel_launch(twice, LaunchShape::linear(1), &[memory.into(), 1_u32.into()], stream)?;
//! gpu.stream_synchronize(stream)?;
//! let mut bytes = [0; 4];
//! gpu.download(device, memory, &mut bytes)?;
//! assert_eq!(f32::from_le_bytes(bytes), 3.0);
//! # Ok(())
//! # }
//! ```

use std::fmt;

use crate::{ConditionalId, DeviceId, DevicePtr, FunctionId, ModuleId, Result, StreamId};

/// The source of a module.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// A name for messages.
    pub name: &'static str,
    /// The CUDA C++ source, for NVRTC: no headers, kernels `extern "C"`.
    pub cuda: &'static str,
    /// Host implementations of the kernels.
    pub host_kernels: &'static [HostKernel],
}

/// The host implementation of a kernel.
#[derive(Clone, Copy)]
pub struct HostKernel {
    /// The kernel's name in the CUDA source.
    pub name: &'static str,
    /// Does what all threads of a launch do, on simulated memory. It must not call the driver (`NotPermitted`).
    pub run: HostFunction,
    /// How many nanoseconds a launch takes, if that depends on its arguments; else the cost model determines it.
    pub nanos: Option<fn(&LaunchShape, &[KernelArg]) -> u64>,
}

/// The function of a host implementation.
pub type HostFunction = fn(&mut KernelScope<'_>) -> std::result::Result<(), KernelFault>;

impl HostKernel {
    /// A kernel that takes as long as the cost model says.
    #[must_use]
    pub const fn new(name: &'static str, run: HostFunction) -> Self {
        Self { name, run, nanos: None }
    }
}

impl fmt::Debug for HostKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKernel({})", self.name)
    }
}

/// The dimensions of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks, in three dimensions.
    pub grid: [u32; 3],
    /// Threads of a block, in three dimensions.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// One thread.
    pub const ONE: Self = Self { grid: [1; 3], block: [1; 3], shared_bytes: 0 };

    /// Enough blocks of 256 threads for `n` elements.
    #[must_use]
    pub const fn linear(n: u32) -> Self {
        let blocks = if n == 0 { 1 } else { n.div_ceil(256) };
        Self { grid: [blocks, 1, 1], block: [256, 1, 1], shared_bytes: 0 }
    }

    /// The number of threads, at most `u64::MAX`.
    #[must_use]
    pub fn threads(&self) -> u64 {
        self.grid.iter().chain(&self.block).fold(1, |threads: u64, &n| threads.saturating_mul(u64::from(n)))
    }
}

/// One argument of a kernel, passed by value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelArg {
    /// A device address.
    Ptr(DevicePtr),
    /// `unsigned int`.
    U32(u32),
    /// `int`.
    I32(i32),
    /// `unsigned long long`.
    U64(u64),
    /// `long long`.
    I64(i64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
    /// The flag of a conditional node, an `unsigned long long` for `cudaGraphSetConditional`.
    Conditional(ConditionalId),
}

/// Declares conversions from values to arguments.
macro_rules! arguments_from {
    ($($ty:ty => $kind:ident,)*) => {$(
        impl From<$ty> for KernelArg {
            fn from(value: $ty) -> Self {
                Self::$kind(value)
            }
        }
    )*};
}

arguments_from! {
    DevicePtr => Ptr,
    u32 => U32,
    i32 => I32,
    u64 => U64,
    i64 => I64,
    f32 => F32,
    f64 => F64,
    ConditionalId => Conditional,
}

/// Why a host implementation failed: an illegal access, or wrong arguments. The device is unusable from then on
/// (`IllegalAddress`), as a real one would be, and the hazard log has the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct KernelFault(Box<str>);

impl KernelFault {
    /// A fault for that reason.
    #[must_use]
    pub fn new(why: impl Into<String>) -> Self {
        Self(why.into().into_boxed_str())
    }
}

/// The memory that a host implementation can access.
pub trait KernelMemory {
    /// Reads memory.
    fn read(&mut self, ptr: DevicePtr, into: &mut [u8]) -> std::result::Result<(), KernelFault>;
    /// Writes memory.
    fn write(&mut self, ptr: DevicePtr, bytes: &[u8]) -> std::result::Result<(), KernelFault>;
    /// Sets a conditional node's flag.
    fn set_conditional(&mut self, conditional: ConditionalId, value: u32) -> std::result::Result<(), KernelFault>;
}

/// A launch as its host implementation sees it: arguments, shape, and memory.
pub struct KernelScope<'a> {
    /// The dimensions of the launch.
    pub shape: LaunchShape,
    /// The arguments.
    pub args: &'a [KernelArg],
    /// The device's memory.
    pub memory: &'a mut dyn KernelMemory,
}

impl fmt::Debug for KernelScope<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelScope").field("shape", &self.shape).field("args", &self.args).finish_non_exhaustive()
    }
}

/// Declares access to typed arguments and values.
macro_rules! scope_methods {
    ($($arg:ident $read:ident $write:ident $kind:ident $ty:ty;)*) => {
        impl KernelScope<'_> {
            $(
                #[doc = concat!("Argument `index`, a `", stringify!($ty), "`; a fault if it is of another type.")]
                pub fn $arg(&self, index: usize) -> std::result::Result<$ty, KernelFault> {
                    match self.args.get(index) {
                        Some(&KernelArg::$kind(value)) => Ok(value),
                        other => Err(wrong_argument(index, other, stringify!($ty))),
                    }
                }

                #[doc = concat!("Reads `count` values of `", stringify!($ty), "`.")]
                pub fn $read(&mut self, ptr: DevicePtr, count: usize) -> std::result::Result<Vec<$ty>, KernelFault> {
                    const SIZE: usize = size_of::<$ty>();
                    let mut bytes = vec![0; count * SIZE];
                    self.memory.read(ptr, &mut bytes)?;
                    Ok(bytes.as_chunks::<SIZE>().0.iter().map(|&chunk| <$ty>::from_le_bytes(chunk)).collect())
                }

                #[doc = concat!("Writes values of `", stringify!($ty), "`.")]
                pub fn $write(&mut self, ptr: DevicePtr, values: &[$ty]) -> std::result::Result<(), KernelFault> {
                    const SIZE: usize = size_of::<$ty>();
                    // Not byte by byte: unoptimised, that was most of the time of the selftest.
                    let mut bytes = vec![0; size_of_val(values)];
                    for (chunk, value) in bytes.as_chunks_mut::<SIZE>().0.iter_mut().zip(values) {
                        *chunk = value.to_le_bytes();
                    }
                    self.memory.write(ptr, &bytes)
                }
            )*

            /// Argument `index`, an address; a fault if it is of another type.
            pub fn arg_ptr(&self, index: usize) -> std::result::Result<DevicePtr, KernelFault> {
                match self.args.get(index) {
                    Some(&KernelArg::Ptr(ptr)) => Ok(ptr),
                    other => Err(wrong_argument(index, other, "address")),
                }
            }

            /// Argument `index`, a conditional's flag; a fault if it is of another type.
            pub fn arg_conditional(&self, index: usize) -> std::result::Result<ConditionalId, KernelFault> {
                match self.args.get(index) {
                    Some(&KernelArg::Conditional(id)) => Ok(id),
                    other => Err(wrong_argument(index, other, "conditional's flag")),
                }
            }
        }
    };
}

scope_methods! {
    arg_u32 read_u32 write_u32 U32 u32;
    arg_i32 read_i32 write_i32 I32 i32;
    arg_u64 read_u64 write_u64 U64 u64;
    arg_i64 read_i64 write_i64 I64 i64;
    arg_f32 read_f32 write_f32 F32 f32;
    arg_f64 read_f64 write_f64 F64 f64;
}

fn wrong_argument(index: usize, got: Option<&KernelArg>, expected: &str) -> KernelFault {
    KernelFault::new(match got {
        Some(got) => format!("argument {index} is {got:?}, but the kernel takes a {expected}"),
        None => format!("argument {index} is missing, a {expected}"),
    })
}

/// Modules and kernels.
pub trait Kernels {
    /// Loads a module for `device`: compiles the CUDA source, or uses the host implementations. `InvalidSource` with
    /// the compiler's log if the source is wrong, `SharedObjectInitFailed` naming the compiler's library if that is
    /// missing. *During capture: free.*
    fn module_load(&self, device: DeviceId, source: &KernelSource) -> Result<ModuleId>;

    /// Unloads a module; its functions are invalid from then on. Kernels already launched complete, and graphs and
    /// executables with kernels of the module stay usable: the code is unloaded when these are destroyed. *During
    /// capture: free.*
    fn module_unload(&self, module: ModuleId) -> Result<()>;

    /// The kernel of that name; the same id each time. `NotFound` if there is none. *During capture: free.*
    fn function_get(&self, module: ModuleId, name: &str) -> Result<FunctionId>;

    /// The sizes of a kernel's arguments in bytes, in order; `None` if the driver does not know them. *During capture:
    /// free.*
    fn function_parameters(&self, function: FunctionId) -> Result<Option<Vec<u64>>>;

    /// Launches a kernel in the order of `stream`. `InvalidValue` for an empty shape, one that the device cannot run,
    /// or arguments of other sizes than the kernel takes, as far as the driver knows them. A kernel that accesses
    /// device memory that it may not access makes the device unusable (`IllegalAddress`, returned by later calls).
    /// *During capture: stream.*
    ///
    /// # Safety
    /// Nothing checks what a kernel on a real device reads and writes. The caller promises:
    /// - The arguments are those that the kernel takes, in number and type.
    /// - Of this process's memory the kernel touches only pinned memory, which stays pinned and has no Rust reference
    ///   into it until the kernel has finished. Where devices reach ordinary host memory (HMM, Grace), a wrong address
    ///   is written like any other.
    ///
    /// A captured kernel runs when a graph is launched; see [`graph_launch`](crate::Graphs::graph_launch).
    unsafe fn kernel_launch(
        &self,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
        stream: StreamId,
    ) -> Result<()>;
}
