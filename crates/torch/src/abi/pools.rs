//! Pools of graphs, as PyTorch calls them around a capture.

use std::ffi::{c_int, c_void};

use crate::boundary::{self, Hook};
use crate::captures::TorchPool;
use crate::runtime;

/// A capture is about to begin: what it asks for comes from that pool, and nothing else does. PyTorch calls it before
/// `cudaStreamBeginCapture`. The filter is a `std::function` by its address, and is not touched.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_begin_allocate_to_pool(device: c_int, id: TorchPool, filter: *mut c_void) {
    static ABOUT: Hook = Hook::new("warpool_begin_allocate_to_pool");
    let _ = filter;
    boundary::hook(&ABOUT, || runtime::get()?.begin_pool(device, id));
}

/// The capture is over.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_end_allocate_to_pool(device: c_int, id: TorchPool) {
    static ABOUT: Hook = Hook::new("warpool_end_allocate_to_pool");
    boundary::hook(&ABOUT, || runtime::get()?.end_pool(device, id));
}

/// A graph of that pool is gone. Without the last of its graphs a pool's memory can be given back.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_release_pool(device: c_int, id: TorchPool) {
    static ABOUT: Hook = Hook::new("warpool_release_pool");
    boundary::hook(&ABOUT, || runtime::get()?.release_pool(device, id));
}
