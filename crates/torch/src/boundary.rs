//! The boundary between C and Rust. The body of every exported function runs here: a panic becomes an error, and an
//! error becomes the thread's last error.
//!
//! Functions that can report failure return a status. For those that PyTorch calls without checking, the first failure
//! of each function is logged.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::{last_error, recording};

/// Runs `body`. A panic becomes [`Error::Panic`]; an error becomes the thread's last error.
#[inline]
pub(crate) fn run<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safe: shared state is protected by mutexes, and the crates below ignore poisoning on purpose.
    let result = panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panic_error(&*panic)));
    if let Err(error) = &result {
        last_error::set(error, &recording::note(error));
    }
    result
}

/// Runs the hot path of a function: `None` means that the rest of the function is to run. A panic becomes an error, as
/// with [`run`].
#[inline]
pub(crate) fn attempt<T>(body: impl FnOnce() -> Option<T>) -> Result<Option<T>> {
    panic::catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        let error = panic_error(&*panic);
        last_error::set(&error, "");
        error
    })
}

/// Runs `body`: 0 for success, 1 for failure.
pub(crate) fn status(body: impl FnOnce() -> Result<()>) -> c_int {
    c_int::from(run(body).is_err())
}

/// Runs the body of a function that returns no status. Its first failure is logged.
#[inline]
pub(crate) fn run_logged(log: &FailureLog, body: impl FnOnce() -> Result<()>) {
    logged(log, &run(body));
}

/// Logs the first failure of a function.
#[inline]
pub(crate) fn logged<T>(log: &FailureLog, result: &Result<T>) {
    if let Err(error) = result {
        // Logging may panic too, for example while the thread's locals are being destroyed.
        let _ = panic::catch_unwind(AssertUnwindSafe(|| log.failed(error)));
    }
}

/// Logs the first failure of an exported function that returns no status.
pub(crate) struct FailureLog {
    function: &'static str,
    logged: AtomicBool,
}

impl FailureLog {
    pub(crate) const fn new(function: &'static str) -> Self {
        Self { function, logged: AtomicBool::new(false) }
    }

    #[cold]
    fn failed(&self, error: &Error) {
        // In a forked child another thread may have held a lock of the log.
        if matches!(error, Error::Forked) {
            return;
        }
        if !self.logged.swap(true, Ordering::Relaxed) {
            tracing::warn!("{}: {error} (further failures of this function are not logged)", self.function);
        }
    }
}

#[cold]
fn panic_error(panic: &(dyn Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned());
    Error::Panic { text }
}

/// The C string `text` as a `&str`; `argument` names it in errors.
///
/// # Safety
/// `text` is null or a null-terminated string that is valid and unchanged for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, argument: &'static str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::Null { argument });
    }
    // SAFETY: not null, and null-terminated by this function's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::NotUtf8 { argument })
}

/// Copies `text` to a buffer of `length` bytes, null-terminated and truncated if it does not fit. Returns the length
/// of the whole text without the terminator.
///
/// # Safety
/// `buffer` is null or points to `length` writable bytes.
pub(crate) unsafe fn copy_text(text: &str, buffer: *mut c_char, length: usize) -> usize {
    if buffer.is_null() || length == 0 {
        return text.len();
    }
    // Truncates at a character boundary.
    let fits = (0..=text.len().min(length - 1)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    // SAFETY: `fits < length`, and `text` is our own memory, so the ranges do not overlap.
    unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), fits) };
    // SAFETY: `fits < length`.
    let end = unsafe { buffer.add(fits) };
    // SAFETY: `fits < length`, so `end` is inside the buffer.
    unsafe { end.write(0) };
    text.len()
}

/// Writes an output argument; `argument` names it in errors.
///
/// # Safety
/// `out` is null or valid for a write of `T`.
pub(crate) unsafe fn write_output<T>(out: *mut T, argument: &'static str, value: T) -> Result<()> {
    if out.is_null() {
        return Err(Error::Null { argument });
    }
    // SAFETY: not null, and writable by this function's contract.
    unsafe { out.write(value) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_an_error() {
        static LOG: FailureLog = FailureLog::new("a test");
        for body in [|| panic!("three words here"), || panic!("{} {} here", "three", "words")] {
            let Err(Error::Panic { text }) = run::<()>(body) else { panic!("it should be an error") };
            assert_eq!(text, "three words here");
            last_error::with(|text| assert!(text.contains("three words here"), "{text}"));
            assert_eq!(status(body), 1);
            assert!(matches!(attempt::<()>(|| panic!("three words here")), Err(Error::Panic { .. })));
            run_logged(&LOG, body);
        }
        assert!(LOG.logged.load(Ordering::Relaxed));
    }

    #[test]
    fn text_is_truncated_at_a_character_boundary() {
        for (length, expected) in [(0, "####"), (1, "\0###"), (2, "\0###"), (3, "é\0#"), (4, "éa\0"), (9, "éa\0")] {
            let mut buffer = *b"####";
            // SAFETY: the text has three bytes, so at most four are written, whatever `length` is.
            let whole = unsafe { copy_text("éa", buffer.as_mut_ptr().cast(), length) };
            assert_eq!((whole, &buffer[..]), (3, expected.as_bytes()), "{length}");
        }
        // SAFETY: null is allowed.
        assert_eq!(unsafe { copy_text("éa", std::ptr::null_mut(), 9) }, 3);
    }
}
