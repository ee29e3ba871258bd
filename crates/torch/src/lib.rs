//! Warpool as PyTorch's CUDA allocator: `libwarpool_torch.so`, a C interface for PyTorch, Python and C programs.
//!
//! The header is `include/warpool_torch.h`, generated from `abi/` and committed. `exports.txt` lists every exported
//! symbol.
//!
//! # Guarantees to callers
//! - Every function may be called from any thread at any time, also from a thread without a CUDA context.
//! - The environment is read by the first call that needs a driver, or by `warpool_start`: `WARPOOL_DRIVER` (`cuda`,
//!   the default, or `sim`), `PYTORCH_CUDA_ALLOC_CONF`, else `PYTORCH_ALLOC_CONF`, `WARPOOL_CONF` on top of either,
//!   `WARPOOL_SIM` for the simulated GPU, `WARPOOL_PUBLISH` and `WARPOOL_PAGES` for the page that `warpool top` reads,
//!   and for recordings `WARPOOL_RECORD_DIR` and the job's variables with the rank. A failed start can be repeated.
//! - A thread of the library's own writes that page, unless `WARPOOL_PUBLISH` is `False`.
//! - No panic crosses the boundary. Only `warpool_malloc` throws, and only if PyTorch's `libc10.so` is loaded.
//! - Nothing is freed or destroyed at process exit.
//! - With `record:oom` in the settings, out of memory is recorded in files (`recorder/`). A failure of that changes
//!   nothing but the text of the error.
//! - A child that was forked after the start gets an error from every function that needs the driver; freeing what it
//!   inherited does nothing. No function takes a lock there, so none hangs.
//!
//! # In Rust
//! The same operations are methods of [`Runtime`]; tests create one over a simulated GPU.

pub mod abi;
mod account;
mod allocator;
mod backend;
mod boundary;
mod captures;
mod elastic;
mod environment;
mod error;
mod exception;
mod last_error;
mod publish;
mod recorder;
mod recording;
mod runtime;
mod snapshot;
mod stacks;
mod streams;
mod tags;
mod torch_pool;

pub use error::{Error, Result};
pub use recorder::{PythonInterface, PythonObject};
pub use runtime::{Runtime, get, start_with, started};
pub use torch_pool::TorchPoolId;
