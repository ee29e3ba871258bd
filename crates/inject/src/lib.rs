//! `libwarpool_inject.so`: counts whose device memory is whose. It is loaded before a program (`LD_PRELOAD`) by
//! `warpool record`, and stands between the program and the CUDA driver: it exports the driver's functions that take
//! memory, and `dlsym`, through which CUDA's runtime and most libraries find them (`symbols.rs`, `versions.rs`).
//!
//! A call is attributed to the first shared object on the call stack that is not CUDA's runtime or driver
//! (`caller.rs`). What the driver took for it is what was asked, as the driver rounds it, for large allocations, and
//! else the difference of what the device has in use (`ledger.rs`): contexts, modules, kernels that are loaded by their
//! first launch, graphs, streams.
//!
//! The rules: a call reaches the driver with its arguments, once, whatever happens here, and its result is returned. No
//! lock of this library is held meanwhile. In a forked child every call only passes through.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod caller;
mod calls;
mod driver;
mod forked;
mod ledger;
mod loader;
mod report;
mod symbols;
mod versions;
