//! Blocks shared with other processes.

use std::ffi::{c_int, c_void};

use super::{c_pointer, device_ptr};
use crate::backend::Sharing;
use crate::boundary;
use crate::error::Error;
use crate::runtime;

/// A block as another process can open it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SharedBlock {
    /// The handle of the allocation that it is in.
    pub handle: [u8; 64],
    /// Where it starts there.
    pub offset: usize,
}

/// Writes to `shared` how another process can open the memory at `ptr`. The block must stay allocated as long as others
/// use it.
///
/// # Safety
/// `shared` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_share(ptr: *mut c_void, shared: *mut SharedBlock) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let (base, _) = runtime.segment_of(device_ptr(ptr))?;
        let handle = Sharing::export(&**runtime.instance().driver(), base)?.0;
        let offset = (device_ptr(ptr).0 - base.0) as usize;
        // SAFETY: null or writable by this function's contract.
        unsafe { boundary::write_output(shared, "shared", SharedBlock { handle, offset }) }
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
        let runtime = runtime::get()?;
        let opened = runtime.sharing.open(&**runtime.instance().driver(), runtime.device_id(device)?, handle)?;
        // SAFETY: not null, and writable by this function's contract.
        unsafe { ptr.write(c_pointer(opened)) };
        Ok(())
    })
}

/// Ends a use of opened memory; after the last it is closed, behind all work of the device. In a forked child nothing
/// happens.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_close_shared(ptr: *mut c_void) -> c_int {
    boundary::status(|| match runtime::get() {
        Ok(runtime) => runtime.sharing.close(&**runtime.instance().driver(), device_ptr(ptr)),
        Err(Error::Forked) => Ok(()),
        Err(error) => Err(error),
    })
}
