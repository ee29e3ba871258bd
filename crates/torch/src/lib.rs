//! Warpool as PyTorch's allocator: `libwarpool_torch.so`, with a C interface that PyTorch, Python and C programs call.
//!
//! The header is `include/warpool_torch.h`, made from `abi/` and committed. `exports.txt` lists every symbol that the
//! library has; there are no others.
//!
//! # What a caller may rely on
//! - Any thread may call anything at any time, also one without a CUDA context.
//! - The environment is read by the first call, or by `warpool_start`: `WARPOOL_DRIVER` (`cuda`, the default, or
//!   `sim`), `WARPOOL_CONF`, else `PYTORCH_CUDA_ALLOC_CONF`, else `PYTORCH_ALLOC_CONF`, and `WARPOOL_SIM` for the
//!   simulated GPU. A start that failed can be tried again.
//! - No panic leaves. Only `warpool_malloc` throws, and only into a process that has PyTorch's `libc10.so`.
//! - Nothing is torn down at the end of the process.
//!
//! # In Rust
//! The same calls are methods of [`Runtime`], which tests make on a simulated GPU of their own.

pub mod abi;
mod boundary;
mod captures;
mod environment;
mod error;
mod last_error;
mod raise;
mod runtime;
mod snapshot;
mod stacks;
mod streams;

pub use captures::TorchPool;
pub use error::{Error, Result};
pub use runtime::{Runtime, get, started};
