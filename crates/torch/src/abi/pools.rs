//! Pools of CUDA graphs: the functions that PyTorch calls around a capture.

use std::ffi::{c_int, c_void};

use crate::boundary::{self, FailureLog};
use crate::runtime;
use crate::torch_pool::TorchPoolId;

/// A capture is about to begin: its allocations, and no others, come from that pool. PyTorch calls it before
/// `cudaStreamBeginCapture`. `filter` is the address of a `std::function` and is not used.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_begin_allocate_to_pool(device: c_int, id: TorchPoolId, filter: *mut c_void) {
    static LOG: FailureLog = FailureLog::new("warpool_begin_allocate_to_pool");
    let _ = filter;
    boundary::run_logged(&LOG, || runtime::get()?.begin_pool(device, id));
}

/// The capture has ended.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_end_allocate_to_pool(device: c_int, id: TorchPoolId) {
    static LOG: FailureLog = FailureLog::new("warpool_end_allocate_to_pool");
    boundary::run_logged(&LOG, || runtime::get()?.end_pool(device, id));
}

/// A graph of that pool was destroyed. After the last one, the pool's memory can be returned to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_release_pool(device: c_int, id: TorchPoolId) {
    static LOG: FailureLog = FailureLog::new("warpool_release_pool");
    boundary::run_logged(&LOG, || runtime::get()?.release_pool(device, id));
}
