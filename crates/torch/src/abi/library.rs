//! Start, version, driver, and the last error.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use warpool::memory::settings::Backend;

use crate::boundary::{self, FailureLog};
use crate::error::Error;
use crate::{last_error, runtime};

/// The version, null-terminated.
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version has no null characters"),
};

/// Reads the environment and opens the driver, unless that is done. Optional: the first call that needs a driver does
/// the same. Can be called again after a failure.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_start() -> c_int {
    boundary::status(|| runtime::get().map(drop))
}

/// Like `warpool_start`, with another backend than `native` if the settings name none: `paged` or `cudaMallocAsync`.
/// Where a GPU cannot have `paged`, it is `native`, with a warning. If the driver is open already, nothing changes.
///
/// # Safety
/// `backend` is NULL, which is an error, or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_start_with(backend: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: `backend` is null or null-terminated by this function's contract.
        let name = unsafe { boundary::text(backend, "backend") }?;
        let named = Backend::ALL.into_iter().find(|backend| backend.name() == name);
        runtime::start_with(named.ok_or_else(|| Error::UnknownBackend { name: name.to_owned() })?).map(drop)
    })
}

/// `warpool_start`, with the signature that PyTorch calls. `device_count` is not used, except that 0 starts nothing:
/// PyTorch calls it so before it has counted the devices.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_init(device_count: c_int) {
    static LOG: FailureLog = FailureLog::new("warpool_init");
    if device_count > 0 {
        boundary::run_logged(&LOG, || runtime::get().map(drop));
    }
}

/// Writes the number of devices to `count`.
///
/// # Safety
/// `count` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_device_count(count: *mut c_int) -> c_int {
    boundary::status(|| {
        let found = c_int::try_from(runtime::get()?.instance().device_count()).unwrap_or(c_int::MAX);
        // SAFETY: `count` is null or writable by this function's contract.
        unsafe { boundary::write_output(count, "count", found) }
    })
}

/// Copies the last error of the calling thread to `buffer`, null-terminated and truncated if it does not fit. Returns
/// the length of the whole text without the terminator. The text is kept until the thread's next failure; before the
/// first it is empty.
///
/// # Safety
/// `buffer` is NULL or points to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_last_error(buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: `buffer` is null or has `length` bytes by this function's contract.
    last_error::with(|text| unsafe { boundary::copy_text(text, buffer, length) })
}

/// Whether the last error of the calling thread is out of memory.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_last_error_is_out_of_memory() -> c_int {
    c_int::from(last_error::is_out_of_memory())
}

/// The version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_version() -> *const c_char {
    VERSION.as_ptr()
}

/// The driver that is open, `cuda` or `sim`; NULL before the start.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_driver() -> *const c_char {
    match runtime::started().map(|runtime| runtime.instance().driver().kind()) {
        Some("sim") => c"sim".as_ptr(),
        Some("cuda") => c"cuda".as_ptr(),
        Some(_) => c"other".as_ptr(),
        None => ptr::null(),
    }
}
