//! The C interface, by subject. Each function converts its arguments, makes one call, and converts the result.
//!
//! Unless documented otherwise, a function that returns `int` returns 0 for success and 1 for failure, and
//! `warpool_last_error` has the reason. Functions are `unsafe` if an argument is a pointer that is followed, or a
//! `cudaStream_t`, which the driver follows.

pub mod account;
pub mod blocks;
pub mod checkpoints;
pub mod device_stats;
pub mod elastic;
pub mod history;
pub mod library;
pub mod memory;
pub mod observers;
pub mod pinned;
pub mod pinned_history;
pub mod pools;
pub mod recorder;
pub mod settings;
pub mod sharing;
pub mod sleep;
pub mod snapshot;
pub mod stats;

use std::ffi::c_void;

use warpool_driver::{DevicePtr, ForeignStream, RawHandle};

/// # Safety
/// `stream` is null or a stream of the driver, and stays alive as long as the result is used.
#[inline]
unsafe fn foreign_stream(stream: *mut c_void) -> ForeignStream {
    // SAFETY: by this function's contract.
    unsafe { ForeignStream::new(RawHandle(stream.addr() as u64)) }
}

/// A device address as a C pointer, which the host does not follow.
#[inline]
fn c_pointer(ptr: DevicePtr) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(ptr.0).expect("addresses have 64 bits"))
}

/// A C pointer to device memory as an address.
#[inline]
fn device_ptr(ptr: *mut c_void) -> DevicePtr {
    DevicePtr(ptr.addr() as u64)
}
