//! Allocating and freeing for PyTorch's allocator class: the hot path, and what belongs to a block.

use std::ffi::{c_char, c_int, c_void};

use warpool_driver::{DevicePtr, ForeignStream};

use super::{c_pointer, device_ptr, foreign_stream};
use crate::boundary::{self, FailureLog};
use crate::error::Error;
use crate::runtime;
use crate::torch_pool::TorchPoolId;

/// A block. All sizes are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockDescription {
    /// Its size.
    pub bytes: u64,
    /// The requested size.
    pub bytes_requested: u64,
    /// Its device.
    pub device: c_int,
}

/// Allocates `bytes` on `device` for work on `stream`, from the newest open pool whose filter accepts the stream. 0
/// bytes return NULL. On failure it returns NULL: `warpool_last_error` has the reason, and
/// `warpool_last_error_is_out_of_memory` whether it is out of memory.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as memory that was allocated for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_allocate(bytes: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    match boundary::attempt(|| runtime::allocate_cached(bytes, device, stream)) {
        Ok(Some(ptr)) => c_pointer(ptr),
        Ok(None) => allocate(bytes, device, stream),
        Err(_) => std::ptr::null_mut(),
    }
}

/// Allocates in every other case.
#[inline(never)]
fn allocate(bytes: usize, device: c_int, stream: ForeignStream) -> *mut c_void {
    let allocated = boundary::run(|| runtime::get()?.allocate(bytes as u64, device, stream));
    allocated.map_or(std::ptr::null_mut(), c_pointer)
}

/// Allocates `bytes` at `ptr`, out of a free block of the same stream and pool that contains it. Makes no driver call.
///
/// # Safety
/// As for `warpool_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_allocate_at(
    bytes: usize,
    device: c_int,
    stream: *mut c_void,
    ptr: *mut c_void,
) -> c_int {
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    boundary::status(|| runtime::get()?.allocate_at(bytes as u64, device, stream, device_ptr(ptr)))
}

/// Writes `text` into the history, with the allocated block that starts at `ptr`.
///
/// # Safety
/// `text` is NULL, which is an error, or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_annotate(ptr: *mut c_void, text: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: null or null-terminated by this function's contract.
        let text = unsafe { boundary::text(text, "text") }?;
        runtime::get()?.annotate(device_ptr(ptr), text)
    })
}

/// Frees what `warpool_allocate` returned; NULL is ignored. An address that is not allocated changes nothing. In a
/// forked child nothing happens: the memory is the parent's.
///
/// # Safety
/// The memory at `ptr` belongs to the caller, and nothing uses it afterwards but work that was submitted before on its
/// stream and on recorded ones.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_free_block(ptr: *mut c_void) -> c_int {
    match boundary::attempt(|| runtime::free_cached(device_ptr(ptr)).then_some(())) {
        Ok(Some(())) => 0,
        Ok(None) => free_block(device_ptr(ptr)),
        // It may already be freed, so it is not freed again.
        Err(_) => 1,
    }
}

/// Frees in every other case.
#[inline(never)]
fn free_block(ptr: DevicePtr) -> c_int {
    static LOG: FailureLog = FailureLog::new("warpool_free_block");
    if ptr.is_null() {
        return 0;
    }
    let freed = boundary::run(|| match runtime::get() {
        Ok(runtime) => runtime.free_block(ptr),
        Err(Error::Forked) => Ok(()),
        Err(error) => Err(error),
    });
    boundary::logged(&LOG, &freed);
    c_int::from(freed.is_err())
}

/// Records that work on `stream` of `device` uses the memory at `ptr`: after it is freed, it is not reused before that
/// work is done.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as the memory at `ptr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_record_use(ptr: *mut c_void, device: c_int, stream: *mut c_void) -> c_int {
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    boundary::status(|| runtime::get()?.record_use(device_ptr(ptr), device, stream))
}

/// Says that `stream` of `device` is never destroyed, as a stream of PyTorch's pools. Then memory that it used and that
/// was freed during a capture waits for this stream alone, and not for all work of the device.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as the process uses this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_keep_stream(device: c_int, stream: *mut c_void) -> c_int {
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    // SAFETY: it is never destroyed, by this function's contract.
    boundary::status(|| unsafe { runtime::get()?.keep_stream(device, stream) })
}

/// Describes the allocated block that starts at `ptr`.
///
/// # Safety
/// `block` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_describe_block(ptr: *mut c_void, block: *mut BlockDescription) -> c_int {
    boundary::status(|| {
        let found = runtime::get()?.allocator().find(DevicePtr(ptr.addr() as u64))?;
        let description = BlockDescription {
            bytes: found.bytes,
            bytes_requested: found.bytes_requested,
            device: c_int::try_from(found.device.0).unwrap_or(c_int::MAX),
        };
        // SAFETY: `block` is null or writable by this function's contract.
        unsafe { boundary::write_output(block, "block", description) }
    })
}

/// Returns cached memory to the driver: of the released pool `pool`, or for pool (0, 0) of the default pool and of all
/// released ones, on every device. `stream` of `device` is the caller's current one: while it captures, the default
/// pool stays as it is.
///
/// # Safety
/// `stream` is NULL or a stream of the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_trim(pool: TorchPoolId, device: c_int, stream: *mut c_void) -> c_int {
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    boundary::status(|| runtime::get()?.trim(pool, device, stream))
}

/// Switches caching on or off. Off, every request is a driver call and appears in no statistics. Memory is freed the
/// way it was allocated.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_set_caching(on: c_int) -> c_int {
    boundary::status(|| {
        runtime::get()?.set_caching(on != 0);
        Ok(())
    })
}

/// Writes the free and the total memory of a device.
///
/// # Safety
/// `bytes_free` and `bytes_total` are NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_memory_info(device: c_int, bytes_free: *mut usize, bytes_total: *mut usize) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let memory = runtime.instance().driver().mem_info(runtime.device_id(device)?)?;
        // SAFETY: `bytes_free` is null or writable by this function's contract.
        unsafe { boundary::write_output(bytes_free, "bytes_free", memory.bytes_free as usize) }?;
        // SAFETY: the same for `bytes_total`.
        unsafe { boundary::write_output(bytes_total, "bytes_total", memory.bytes_total as usize) }
    })
}

/// Lets kernels on `device` access the memory on `owner`, now and later.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_enable_peer_access(device: c_int, owner: c_int) -> c_int {
    boundary::status(|| runtime::get()?.enable_peer_access(device, owner))
}

/// Whether memory may be mapped: then a copy between devices without peer access needs `cudaMemcpyPeerAsync`.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_maps_memory() -> c_int {
    boundary::run(|| Ok(runtime::get()?.allocator().maps_memory())).map_or(1, c_int::from)
}
