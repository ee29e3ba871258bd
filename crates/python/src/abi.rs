//! The C interface, which `python/warpool/_library.py` declares for ctypes. Everything unsafe is here.
//!
//! ```c
//! warpool_call *call = warpool_call_new();
//! int failed = warpool_call_run(call, request, request_size, inputs, input_count);
//! size_t size;
//! const char *json = warpool_call_json(call, &size);
//! warpool_call_free(call);
//! ```

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::slice;

use warpool_report::request::{Call, Source};

/// The version, which must be that of the Python package.
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("the version has no zero in it"),
};

/// A recording of a request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// Its bytes, or the path of its file: as the system has it, and on Windows in UTF-8.
    pub data: *const u8,
    /// How many.
    pub size: usize,
    /// Whether it is a path.
    pub is_path: c_int,
}

/// The version of this library, a text that stays.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_answers_version() -> *const c_char {
    VERSION.as_ptr()
}

/// A new call, to be freed with [`warpool_call_free`].
#[unsafe(no_mangle)]
pub extern "C" fn warpool_call_new() -> *mut Call {
    Box::into_raw(Box::default())
}

/// Frees a call with its answer; null is allowed.
///
/// # Safety
/// `call` is from [`warpool_call_new`], is not running, and no one uses it or its texts any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_call_free(call: *mut Call) {
    if !call.is_null() {
        // SAFETY: it came from `Box::into_raw` in `warpool_call_new`, and the caller gives it up.
        drop(unsafe { Box::from_raw(call) });
    }
}

/// Runs a call, once. Returns 0 if there is an answer, 1 if there is an error in its place.
///
/// # Safety
/// `call` is from [`warpool_call_new`]. `request` has `request_size` bytes, `inputs` has `input_count` elements and
/// each of these the bytes that it says; nothing changes them before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_call_run(
    call: *const Call,
    request: *const u8,
    request_size: usize,
    inputs: *const Input,
    input_count: usize,
) -> c_int {
    // SAFETY: the caller says so; a call is only read through shared references until it is freed.
    let call = unsafe { &*call };
    // SAFETY: the caller says so.
    let request = unsafe { bytes(request, request_size) };
    // SAFETY: the caller says so.
    let inputs = if input_count == 0 { &[] } else { unsafe { slice::from_raw_parts(inputs, input_count) } };
    let source = |input: &Input| {
        // SAFETY: the caller says so.
        let data = unsafe { bytes(input.data, input.size) };
        if input.is_path == 0 { Source::Bytes(data) } else { Source::Path(path(data)) }
    };
    let sources: Vec<Source<'_>> = inputs.iter().map(source).collect();
    c_int::from(!call.run(request, &sources))
}

/// Asks a call to stop, from any thread; it ends soon after, with an error. Does nothing if it has ended.
///
/// # Safety
/// `call` is from [`warpool_call_new`] and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_call_stop(call: *const Call) {
    // SAFETY: the caller says so.
    unsafe { &*call }.work().stop.stop();
}

/// How far a call is, from any thread: `stage`, `done` and `total`. Stages are 0 (not started), 1 (reading),
/// 2 (replaying) and 3 (writing a page); a total of 0 is not known.
///
/// # Safety
/// `call` is from [`warpool_call_new`] and not freed; `progress` has room for three numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_call_progress(call: *const Call, progress: *mut u64) {
    // SAFETY: the caller says so.
    let (stage, done, total) = unsafe { &*call }.work().progress();
    // SAFETY: the caller says that there is room.
    unsafe { progress.cast::<[u64; 3]>().write([u64::from(stage), done, total]) };
}

/// The answer as JSON, or an object with `error`: UTF-8, `size` bytes, until the call is freed. Null before it has run.
///
/// # Safety
/// `call` is from [`warpool_call_new`] and not freed; `size` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_call_json(call: *const Call, size: *mut usize) -> *const u8 {
    // SAFETY: the caller says so.
    let call = unsafe { &*call };
    // SAFETY: the caller says so.
    unsafe { text(call.json(), size) }
}

/// The page as HTML, likewise. Null if there is none.
///
/// # Safety
/// As [`warpool_call_json`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_call_page(call: *const Call, size: *mut usize) -> *const u8 {
    // SAFETY: the caller says so.
    let call = unsafe { &*call };
    // SAFETY: the caller says so.
    unsafe { text(call.page(), size) }
}

/// # Safety
/// `size` can be written.
unsafe fn text(text: &str, size: *mut usize) -> *const u8 {
    // SAFETY: the caller says so.
    unsafe { size.write(text.len()) };
    if text.is_empty() { ptr::null() } else { text.as_ptr() }
}

/// # Safety
/// `data` has `size` bytes that do not change for as long as the result is used. With a size of 0 it may be null.
unsafe fn bytes<'a>(data: *const u8, size: usize) -> &'a [u8] {
    if size == 0 {
        return &[];
    }
    // SAFETY: the caller says so.
    unsafe { slice::from_raw_parts(data, size) }
}

#[cfg(unix)]
fn path(bytes: &[u8]) -> std::path::PathBuf {
    use std::os::unix::ffi::OsStrExt as _;
    std::ffi::OsStr::from_bytes(bytes).into()
}

#[cfg(not(unix))]
fn path(bytes: &[u8]) -> std::path::PathBuf {
    String::from_utf8_lossy(bytes).into_owned().into()
}
