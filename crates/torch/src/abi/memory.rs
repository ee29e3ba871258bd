//! Memory: what PyTorch's allocator is made of.

use std::ffi::{c_int, c_void};

use warpool_driver::{DevicePtr, RawHandle};

use crate::boundary::{self, Hook};
use crate::error::{Error, Result};
use crate::raise::{self, Failure};
use crate::{last_error, runtime};

/// Memory of `size` bytes on `device` for work on `stream`, a `cudaStream_t`. 0 bytes are NULL.
///
/// On failure it throws into PyTorch, if that is in the process: `c10::OutOfMemoryError` for lack of memory,
/// `c10::Error` otherwise. Without PyTorch it returns NULL, and `warpool_last_error` says why.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn warpool_malloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    // Nothing that has to be dropped may be alive here when the exception passes.
    match allocate(size, device, stream) {
        Ok(ptr) => ptr,
        Err(failure) => raise::raise(failure),
    }
}

/// The same, but it never throws: NULL on failure, and `warpool_last_error` says why.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_try_malloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    allocate(size, device, stream).unwrap_or(std::ptr::null_mut())
}

/// Takes memory back. NULL is nothing. Size, device and stream are those of the allocation; the device says where to
/// look first. An unknown address changes nothing; `warpool_last_error` names it.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_free(ptr: *mut c_void, size: isize, device: c_int, stream: *mut c_void) {
    static ABOUT: Hook = Hook::new("warpool_free");
    let _ = (size, stream);
    if !ptr.is_null() {
        boundary::hook(&ABOUT, || runtime::get()?.free(address(ptr), device));
    }
}

/// Notes that work on `stream` uses the memory at `ptr`: freed, it is not given out again before that work is done.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    static ABOUT: Hook = Hook::new("warpool_record_stream");
    boundary::hook(&ABOUT, || runtime::get()?.record_stream(address(ptr), handle(stream)));
}

/// Where the segment starts that `ptr` lies in, and, if `size` is not NULL, how many bytes it has. NULL for an unknown
/// address.
///
/// # Safety
/// `size` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_base_alloc(ptr: *mut c_void, size: *mut usize) -> *mut c_void {
    let found = boundary::run(|| runtime::get()?.segment_of(address(ptr)));
    let Ok((start, bytes)) = found else { return std::ptr::null_mut() };
    if !size.is_null() {
        // SAFETY: the caller's promise.
        unsafe { size.write(usize::try_from(bytes).unwrap_or(usize::MAX)) };
    }
    pointer(start)
}

/// Gives all cached memory that nobody uses back to the driver, on every device.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_empty_cache() -> c_int {
    boundary::status(|| runtime::get()?.empty_cache())
}

/// `warpool_empty_cache`, as PyTorch calls it.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_reset() {
    static ABOUT: Hook = Hook::new("warpool_reset");
    boundary::hook(&ABOUT, || runtime::get()?.empty_cache());
}

/// How large a request could be met without giving anything back: the larger of what the device has free and the
/// largest cached block.
///
/// # Safety
/// `bytes` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_largest_available(device: c_int, bytes: *mut usize) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let found = runtime.allocator().largest_available(runtime.device(device)?.id())?;
        // SAFETY: the caller's promise.
        unsafe { give(bytes, "bytes", usize::try_from(found).unwrap_or(usize::MAX)) }
    })
}

fn allocate(size: isize, device: c_int, stream: *mut c_void) -> std::result::Result<*mut c_void, Failure> {
    let outcome = boundary::run(|| runtime::get()?.malloc(size, device, handle(stream)));
    outcome.map(pointer).map_err(|error| failure(&error))
}

#[cold]
fn failure(error: &Error) -> Failure {
    Failure { out_of_memory: error.is_out_of_memory(), text: last_error::pointer() }
}

/// Writes an answer.
///
/// # Safety
/// `to` is null or can be written to.
pub(super) unsafe fn give<T>(to: *mut T, what: &'static str, value: T) -> Result<()> {
    if to.is_null() {
        return Err(Error::Null { what });
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

fn address(ptr: *mut c_void) -> DevicePtr {
    DevicePtr(ptr.addr() as u64)
}

fn handle(stream: *mut c_void) -> RawHandle {
    RawHandle(stream.addr() as u64)
}

/// An address of the device, as C's functions pass it. Nobody on the host follows it.
fn pointer(ptr: DevicePtr) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(ptr.0).expect("addresses have 64 bits"))
}
