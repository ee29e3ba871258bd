//! Settings, in the words of `PYTORCH_CUDA_ALLOC_CONF`.

use std::ffi::{c_char, c_int};

use crate::{boundary, runtime};

/// Puts a further settings string in force, on top of what is. If anything in it is wrong nothing changes, and
/// `warpool_last_error` lists all of it.
///
/// # Safety
/// `conf` is a text with a zero at its end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_set_settings(conf: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: the caller's promise.
        let conf = unsafe { boundary::text(conf, "conf") }?;
        runtime::get()?.set_settings(conf)
    })
}

/// Writes the settings that are in force to `buffer`, as the string that gives them from the defaults, with a zero at
/// its end, cut off where the buffer ends. Returns the length of the whole string without the zero; an allocator that
/// does not start has none.
///
/// # Safety
/// `buffer` is NULL or has `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_settings(buffer: *mut c_char, length: usize) -> usize {
    let text = boundary::run(|| Ok(runtime::get()?.settings().to_conf_string())).unwrap_or_default();
    // SAFETY: the caller's promise.
    unsafe { boundary::give_text(&text, buffer, length) }
}
