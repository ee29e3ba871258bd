//! Settings, in the format of `PYTORCH_CUDA_ALLOC_CONF`.

use std::ffi::{c_char, c_int};

use crate::{boundary, runtime};

/// Applies a settings string on top of the settings in effect. If anything in it is wrong nothing changes, and
/// `warpool_last_error` lists all problems.
///
/// # Safety
/// `conf` is NULL, which is an error, or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_set_settings(conf: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: `conf` is null or null-terminated by this function's contract.
        let conf = unsafe { boundary::text(conf, "conf") }?;
        runtime::get()?.set_settings(conf)
    })
}

/// Copies the settings in effect to `buffer`, as the string that produces them from the defaults, null-terminated and
/// truncated if it does not fit. Returns the length of the whole string without the terminator; 0 if the start fails.
///
/// # Safety
/// `buffer` is NULL or points to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_settings(buffer: *mut c_char, length: usize) -> usize {
    let text = boundary::run(|| Ok(runtime::get()?.settings().to_conf_string())).unwrap_or_default();
    // SAFETY: `buffer` is null or has `length` bytes by this function's contract.
    unsafe { boundary::copy_text(&text, buffer, length) }
}
