//! Starting, and what there is to know about the library itself.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use super::memory::give;
use crate::boundary::{self, Hook};
use crate::{last_error, runtime};

/// The version, with a zero at its end.
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version has no zeros"),
};

/// Reads the environment and opens the driver, unless that is done. Without it the first call that needs a driver does
/// it. After a failure it can be called again.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_start() -> c_int {
    boundary::status(|| runtime::get().map(drop))
}

/// `warpool_start`, as PyTorch calls it. The number of devices is the driver's own; 0 of them is the call that PyTorch
/// makes before it knows any, and starts nothing.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_init(device_count: c_int) {
    static ABOUT: Hook = Hook::new("warpool_init");
    if device_count > 0 {
        boundary::hook(&ABOUT, || runtime::get().map(drop));
    }
}

/// How many devices the driver has.
///
/// # Safety
/// `count` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_device_count(count: *mut c_int) -> c_int {
    boundary::status(|| {
        let found = c_int::try_from(runtime::get()?.instance().device_count()).unwrap_or(c_int::MAX);
        // SAFETY: the caller's promise.
        unsafe { give(count, "count", found) }
    })
}

/// Writes what went wrong last on the calling thread to `buffer`, with a zero at its end, cut off where the buffer
/// ends. Returns the length of the whole text without the zero. It stays until the thread's next failure; before the
/// first it is empty.
///
/// # Safety
/// `buffer` is NULL or has `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_last_error(buffer: *mut c_char, length: usize) -> usize {
    // SAFETY: the caller's promise.
    last_error::with(|text| unsafe { boundary::give_text(text, buffer, length) })
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
