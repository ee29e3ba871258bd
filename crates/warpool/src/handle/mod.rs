//! Handles of libraries, one per thread and device.
//!
//! A handle (of cuBLAS, cuDNN, …) is expensive to create, some 200 us on an H200, and must not be used by two threads
//! at once. So each thread owns one per device, from its first use to its end; then another thread reuses it. There are
//! never more handles than threads that used one at the same time. The number is deliberately unlimited: with a limit,
//! a thread that owns a handle and waits for another thread that needs one could deadlock.
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::Instance;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::handle::{Cusparse, HandlePool};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! let pool = HandlePool::new(&instance, Cusparse);
//! let handle = pool.current(&device)?; // this thread's; from the second call on without a lock
//! handle.set_stream(&device.current_stream()?)?; // a library call only if the stream changes
//! let raw = handle.raw(); // for the library's own functions
//!
//! let lease = pool.lease(&device)?; // for code that moves between threads
//! # drop((handle, lease, raw));
//! # pool.close()
//! # }
//! ```
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::handle::{Cublas, CublasLt, Cudnn, Cusolver, HandlePool, LibraryHandle, LibraryKind};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! /// Any of them: cuBLAS, cuBLASLt, cuDNN, cuSPARSE and cuSOLVER.
//! fn one<K: LibraryKind<Handle = LibraryHandle>>(device: &Device, kind: K) -> warpool::Result<()> {
//!     let pool = HandlePool::new(device.instance(), kind);
//!     println!("{:?}", pool.current(device)?.id());
//!     pool.close()
//! }
//! one(&device, Cublas)?;
//! one(&device, CublasLt)?;
//! one(&device, Cudnn)?;
//! one(&device, Cusolver)?;
//! # Ok(())
//! # }
//! ```
//!
//! Handles are destroyed only by [`HandlePool::trim`] and [`HandlePool::close`]: not when a thread ends, not when the
//! pool is dropped, not while the process exits. Handles in use at that time are leaked without a warning.
//!
//! # Differences from PyTorch
//! - A pool belongs to an [`Instance`](crate::Instance), not to the process, and can be closed. PyTorch destroys the
//!   handles of some libraries while the process exits, and leaks those of others.
//! - The stream of a handle is set when it changes, and by its user. PyTorch sets the current stream at every fetch.
//! - Leases are for code without a thread of its own; PyTorch has none.
//! - A thread that keeps its handle in another thread-local variable returns it when that one is destroyed, if it is
//!   destroyed later.

mod idle;
mod kind;
mod pool;
mod thread;

pub use kind::{Cublas, CublasLt, Cudnn, Cusolver, Cusparse, LibraryHandle, LibraryKind};
pub use pool::{HandleLease, HandlePool};
pub use thread::ThreadHandle;
