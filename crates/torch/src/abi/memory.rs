//! Allocating and freeing: the functions of PyTorch's allocator.

use std::ffi::{c_int, c_void};

use super::{c_pointer, device_ptr, foreign_stream};
use crate::boundary::{self, FailureLog};
use crate::error::Error;
use crate::exception::{self, Failure};
use crate::{last_error, runtime};

/// Allocates `size` bytes on `device` for work on `stream`, a `cudaStream_t`. 0 bytes return NULL.
///
/// On failure it throws if PyTorch is loaded: `c10::OutOfMemoryError` for out of memory, `c10::Error` otherwise.
/// Without PyTorch it returns NULL, and `warpool_last_error` has the reason.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as memory that was allocated for it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn warpool_malloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    // SAFETY: `stream` is as `allocate` requires by this function's contract.
    match unsafe { allocate(size, device, stream) } {
        Ok(ptr) => ptr,
        // SAFETY: this frame owns nothing, and its callers are C++.
        Err(failure) => unsafe { exception::throw(failure) },
    }
}

/// Like `warpool_malloc`, but never throws: NULL on failure, and `warpool_last_error` has the reason.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as memory that was allocated for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_try_malloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    // SAFETY: `stream` is as `allocate` requires by this function's contract.
    unsafe { allocate(size, device, stream) }.unwrap_or(std::ptr::null_mut())
}

/// Frees memory. NULL is ignored. `device` is searched first; `size` and `stream` are not used. An address that is not
/// allocated changes nothing, and `warpool_last_error` names it. In a forked child nothing happens: the memory is the
/// parent's.
///
/// # Safety
/// The memory at `ptr` belongs to the caller, and nothing uses it afterwards but work that was submitted before on its
/// stream and on recorded ones.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_free(ptr: *mut c_void, size: isize, device: c_int, stream: *mut c_void) {
    static LOG: FailureLog = FailureLog::new("warpool_free");
    let _ = (size, stream);
    if !ptr.is_null() {
        boundary::run_logged(&LOG, || match runtime::get() {
            Ok(runtime) => runtime.free(device_ptr(ptr), device),
            Err(Error::Forked) => Ok(()),
            Err(error) => Err(error),
        });
    }
}

/// Records that work on `stream` uses the memory at `ptr`: after it is freed, it is not reused before that work is
/// done.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as the memory at `ptr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    static LOG: FailureLog = FailureLog::new("warpool_record_stream");
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    boundary::run_logged(&LOG, || runtime::get()?.record_stream(device_ptr(ptr), stream));
}

/// The start of the segment that contains `ptr`; its size is written to `size` unless that is NULL. NULL if no segment
/// contains it.
///
/// # Safety
/// `size` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_base_alloc(ptr: *mut c_void, size: *mut usize) -> *mut c_void {
    let found = boundary::run(|| runtime::get()?.segment_of(device_ptr(ptr)));
    let Ok((start, bytes)) = found else { return std::ptr::null_mut() };
    if !size.is_null() {
        // SAFETY: not null, and writable by this function's contract.
        unsafe { size.write(usize::try_from(bytes).unwrap_or(usize::MAX)) };
    }
    c_pointer(start)
}

/// Returns all cached memory to the driver, on every device.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_empty_cache() -> c_int {
    boundary::status(|| runtime::get()?.empty_cache())
}

/// `warpool_empty_cache`, with the signature that PyTorch calls.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_reset() {
    static LOG: FailureLog = FailureLog::new("warpool_reset");
    boundary::run_logged(&LOG, || runtime::get()?.empty_cache());
}

/// Writes the size of the largest request that would succeed without returning cached memory to the driver: the larger
/// of the device's free memory and the largest cached block.
///
/// # Safety
/// `bytes` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_largest_available(device: c_int, bytes: *mut usize) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let found = runtime.allocator().largest_available(runtime.device(device)?.id())?;
        // SAFETY: `bytes` is null or writable by this function's contract.
        unsafe { boundary::write_output(bytes, "bytes", usize::try_from(found).unwrap_or(usize::MAX)) }
    })
}

/// # Safety
/// As for [`warpool_malloc`].
unsafe fn allocate(size: isize, device: c_int, stream: *mut c_void) -> Result<*mut c_void, Failure> {
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    let result = boundary::run(|| runtime::get()?.malloc(size, device, stream));
    result.map(c_pointer).map_err(|error| failure(&error))
}

#[cold]
fn failure(error: &Error) -> Failure {
    // SAFETY: the pointer is valid until this thread's next failure, and the caller throws or drops it before that.
    unsafe { Failure::new(error.is_out_of_memory(), last_error::pointer()) }
}
