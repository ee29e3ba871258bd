//! Handles of libraries, one per thread and device.
//!
//! A handle (of cuBLAS, cuDNN, …) is dear to make, some 200 us on an H200, and must not be used by two threads at once.
//! So each thread has its own, per device, from its first use to its end; then the next thread takes it over. There are
//! never more handles than there were threads at once, and no limit on purpose: with one, threads that hold a handle
//! and wait for what another thread does could wait for ever.
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
//! let handle = pool.current(&device)?; // this thread's; the second time without a lock
//! handle.set_stream(&device.current_stream()?)?; // a library call only if it was another
//! let raw = handle.raw(); // for the library's own functions
//!
//! let lease = pool.lease(&device)?; // for code that hops from thread to thread
//! # drop((handle, lease, raw));
//! # pool.close()
//! # }
//! ```
//!
//! Nothing is destroyed but by [`HandlePool::trim`] and [`HandlePool::close`]: not when a thread ends, not when the
//! pool is dropped, not while the process exits. What is still out then is leaked in silence.
//!
//! # Where it differs from PyTorch
//! - A pool belongs to a [`Instance`](crate::Instance), not to the process, and can be closed. PyTorch destroys the handles of
//!   some libraries while the process exits, and leaks those of others.
//! - A stream is given to a handle when it differs from the last one, not at every fetch, and by whoever wants it:
//!   PyTorch sets the current one each time.
//! - A lease is for code that has no thread of its own; PyTorch has none.
//! - A thread that keeps its handle in another thread-local variable gives it back when that is dropped, if it is the
//!   later.

mod kind;
mod pool;
mod shelf;
mod thread;

pub(crate) use kind::StrayHandles;
pub use kind::{Cublas, CublasLt, Cudnn, Cusolver, Cusparse, LibraryHandle, LibraryKind};
pub use pool::{HandleLease, HandlePool};
pub use thread::ThreadHandle;
