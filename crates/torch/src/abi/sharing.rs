//! Blocks shared with other processes.

use std::ffi::{c_int, c_void};

use super::{c_pointer, device_ptr};
use crate::boundary;
use crate::error::Error;
use crate::runtime;

/// Gets a handle of `length` bytes, which are valid during the call, and an offset.
pub type WriteHandle = Option<unsafe extern "C" fn(user: *mut c_void, handle: *const u8, length: usize, offset: usize)>;

/// Calls `write` once with what another process needs to open the memory at `ptr`: the handle of the memory that
/// contains it, and its offset there. The block must stay allocated as long as others use it. `torch_version` is the
/// version of the handles of PyTorch's own allocator, with which processes can open it too: 2, since PyTorch 2.13 3.
///
/// # Safety
/// `write` is NULL, which is an error, or can be called with `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_share(
    ptr: *mut c_void,
    torch_version: u8,
    write: WriteHandle,
    user: *mut c_void,
) -> c_int {
    boundary::status(|| {
        let write = write.ok_or(Error::Null { argument: "write" })?;
        let (handle, offset) = runtime::get()?.share(device_ptr(ptr), torch_version)?;
        // SAFETY: callable by this function's contract.
        unsafe { write(user, handle.as_ptr(), handle.len(), offset) };
        Ok(())
    })
}

/// Opens memory of another process on `device`, by the `length` bytes at `handle`, and writes its start to `ptr`. Every
/// call is to be paired with one of `warpool_close_shared`.
///
/// # Safety
/// `handle` points to `length` bytes. `ptr` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_open_shared(
    device: c_int,
    handle: *const u8,
    length: usize,
    ptr: *mut *mut c_void,
) -> c_int {
    boundary::status(|| {
        if handle.is_null() || ptr.is_null() {
            return Err(Error::Null { argument: if ptr.is_null() { "ptr" } else { "handle" } });
        }
        // SAFETY: it points to `length` bytes by this function's contract.
        let handle = unsafe { std::slice::from_raw_parts(handle, length) };
        let opened = runtime::get()?.open_shared(device, handle)?;
        // SAFETY: not null, and writable by this function's contract.
        unsafe { ptr.write(c_pointer(opened)) };
        Ok(())
    })
}

/// Ends a use of opened memory. After the last use it is closed, once all work of the device is done; if a pool is
/// open, a later call closes it. In a forked child nothing happens.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_close_shared(ptr: *mut c_void) -> c_int {
    boundary::status(|| match runtime::get() {
        Ok(runtime) => runtime.close_shared(device_ptr(ptr)),
        Err(Error::Forked) => Ok(()),
        Err(error) => Err(error),
    })
}
