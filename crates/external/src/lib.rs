//! C functions of a shared object, written for PyTorch's `CUDAPluggableAllocator`, as a Warpool
//! [`ExternalAllocator`](warpool::memory::external::ExternalAllocator).
//!
//! ```no_run
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::memory::{DeviceAllocator, PluggableAllocator};
//! use warpool_external::{AllocatorSymbols, LoadedAllocator};
//!
//! # fn allocator(instance: &Instance) -> Result<Arc<dyn DeviceAllocator>, Box<dyn std::error::Error>> {
//! // SAFETY: it is our own allocator, and these are its functions.
//! let loaded = unsafe { LoadedAllocator::open("./liballoc.so", &AllocatorSymbols::new("my_malloc", "my_free")) }?;
//! let external = Arc::new(loaded.on_current_device(instance));
//! let allocator: Arc<dyn DeviceAllocator> = Arc::new(PluggableAllocator::new(instance, external)?);
//! # Ok(allocator)
//! # }
//! ```
//!
//! # The functions
//! | symbol | signature | required |
//! |---|---|---|
//! | `alloc` | `void* (ssize_t size, int device, cudaStream_t stream)` | yes |
//! | `free` | `void (void* ptr, ssize_t size, int device, cudaStream_t stream)` | yes |
//! | `init` | `void (int device_count)` | |
//! | `reset` | `void (void)` | |
//! | `memory_fraction` | `void (double fraction, int device)` | |
//! | `base_alloc` | `void* (void* ptr, size_t* size)` | |
//! | `record_stream` | `void (void* ptr, cudaStream_t stream)` | |
//! | `begin_pool` | `void (int device, pool id, filter)` | |
//! | `end_pool`, `release_pool` | `void (int device, pool id)` | |
//!
//! The pool id is a pair of `uint64_t`, by value; a `std::pair` of them is passed the same way. The filter is a C++
//! `std::function<bool(cudaStream_t)>` by value, which C++ passes as a hidden pointer. Only C++ can create one, so the
//! hook gets a pointer to zeros, which is an empty function in the common standard libraries. It may be copied, and
//! must not be called: Warpool itself decides which requests belong to a pool.
//!
//! The functions must not throw. In PyTorch the device is the thread's current one during a call, and many allocators
//! rely on it: see [`LoadedAllocator::on_current_device`].

mod abi;
mod error;
mod loaded;

pub use error::LoadError;
pub use loaded::{AllocatorSymbols, LoadedAllocator};
