//! Warpool's device memory beside [cudarc] 0.19: memory from any of Warpool's allocators that cudarc's launch
//! builder, copies and cuBLAS wrappers accept, and Warpool's own [`DeviceVec`](warpool::DeviceVec)s in cudarc's calls.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
//! use cudarc::nvrtc::compile_ptx;
//! use warpool::Instance;
//! use warpool::memory::{CachingAllocator, Settings};
//! use warpool_cuda::CudaDriver;
//! use warpool_cudarc::CudarcPool;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = CudaContext::new(0)?;
//! let stream = context.new_stream()?;
//! let double = context
//!     .load_module(compile_ptx("extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }")?)?
//!     .load_function("twice")?;
//!
//! let instance = Instance::new(Arc::new(CudaDriver::open()?))?;
//! let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let pool = CudarcPool::new(&allocator, &context)?;
//!
//! let mut x = pool.clone_htod(&[1.0_f32, 2.0, 3.0], &stream)?;
//! let shape = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (3, 1, 1), shared_mem_bytes: 0 };
//! unsafe { stream.launch_builder(&double).arg(&mut x).launch(shape)? };
//! assert_eq!(stream.clone_dtoh(&x)?, [2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```
//!
//! # Which library waits for what
//! - Inside cudarc nothing changes: a [`PooledSlice`] has a `CudaSlice`, with cudarc's two events, so cudarc's calls in
//!   several streams are ordered as they always are.
//! - When a [`PooledSlice`] is dropped, the stream that it was allocated for waits for these events, as it does before
//!   cudarc's own free; then the memory returns to Warpool's allocator, which reuses it in the order of that stream.
//! - In [`CudarcPool::with`] and [`CudarcPool::with_mut`], cudarc uses a [`DeviceVec`](warpool::DeviceVec): the stream
//!   first waits for the vector's uses in other streams, and at the end for cudarc's events of this use, which is then
//!   recorded with the vector.
//!
//! A cudarc stream that was used here is kept until the process ends, because Warpool's caches are by stream.
//!
//! # candle
//! A candle tensor cannot own Warpool's memory. candle (0.9.2, on cudarc 0.19) offers `Tensor::from_storage`, but its
//! `CudaStorage` holds a `CudaSlice` by value, and a dropped `CudaSlice` is freed by cudarc with `cuMemFreeAsync`. That
//! is an error for memory that was cut from a larger block or mapped, as Warpool's is, and there is no hook for another
//! free. Its own operations always allocate their results through `CudaStream::alloc`. The other direction works:
//! in a `CustomOp`, `CudaStorage::as_cuda_slice` gives cudarc slices to read, and a [`CudarcPool`] gives scratch
//! memory. (candle's `cuda` feature needs `nvcc` to build, so it is not compiled here.)

mod error;
mod lent;
mod pool;
mod slice;

pub use error::{Error, Result};
pub use pool::CudarcPool;
pub use slice::PooledSlice;
