//! The edge between C and Rust: every exported function's body runs through here, so that no panic leaves and every
//! failure is remembered.
//!
//! Functions that can say that they failed return a status; those that PyTorch calls without asking only log it, once
//! per function.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::last_error;

/// Runs `body`; a panic becomes an error. A failure is the thread's last error.
#[inline]
pub(crate) fn run<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // Whatever a panic left behind is behind locks that expect it: see `lock` in the crates below.
    let outcome = panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(said(&*panic)));
    if let Err(error) = &outcome {
        last_error::set(&error.to_string());
    }
    outcome
}

/// Runs `body`: 0 if it went well.
pub(crate) fn status(body: impl FnOnce() -> Result<()>) -> c_int {
    c_int::from(run(body).is_err())
}

/// Runs the body of a function that has no way to say that it failed. The first failure of each function is logged.
#[inline]
pub(crate) fn hook(about: &Hook, body: impl FnOnce() -> Result<()>) {
    if let Err(error) = run(body) {
        // Also what logs must not panic through here, as it might at the end of a thread.
        let _ = panic::catch_unwind(AssertUnwindSafe(|| about.failed(&error)));
    }
}

/// A function that cannot say that it failed.
pub(crate) struct Hook {
    name: &'static str,
    logged: AtomicBool,
}

impl Hook {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, logged: AtomicBool::new(false) }
    }

    #[cold]
    fn failed(&self, error: &Error) {
        if !self.logged.swap(true, Ordering::Relaxed) {
            tracing::warn!("{}: {error} (further failures of this function are not logged)", self.name);
        }
    }
}

#[cold]
fn said(panic: &(dyn Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without words".to_owned());
    Error::Panic { text }
}

/// The text at an address.
///
/// # Safety
/// `text` is null or points to a text with a zero at its end, which nobody changes for as long as `'a` lasts.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &'static str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::Null { what });
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::NotText { what })
}

/// Writes `text` to a buffer of `length` bytes, with a zero behind it, cut off where the buffer ends. Returns its
/// length without the zero.
///
/// # Safety
/// `buffer` is null or has `length` writable bytes.
pub(crate) unsafe fn give_text(text: &str, buffer: *mut c_char, length: usize) -> usize {
    if buffer.is_null() || length == 0 {
        return text.len();
    }
    // Whole characters only.
    let fits = (0..=text.len().min(length - 1)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    // SAFETY: at most `length - 1` bytes are written, and the two cannot overlap: one of them is ours.
    unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), fits) };
    // SAFETY: `fits` is less than `length`.
    let end = unsafe { buffer.add(fits) };
    // SAFETY: and so is one more.
    unsafe { end.write(0) };
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error() {
        static ABOUT: Hook = Hook::new("a test");
        for body in [|| panic!("three words here"), || panic!("{} {} here", "three", "words")] {
            let Err(Error::Panic { text }) = run::<()>(body) else { panic!("it should be an error") };
            assert_eq!(text, "three words here");
            last_error::with(|text| assert!(text.contains("three words here"), "{text}"));
            assert_eq!(status(body), 1);
            hook(&ABOUT, body);
        }
        assert!(ABOUT.logged.load(Ordering::Relaxed));
    }

    #[test]
    fn texts_are_cut_where_the_buffer_ends() {
        for (length, expected) in [(0, "####"), (1, "\0###"), (2, "\0###"), (3, "é\0#"), (4, "éa\0"), (9, "éa\0")] {
            let mut buffer = *b"####";
            // SAFETY: no more than the buffer has is written, for a text of three bytes.
            let whole = unsafe { give_text("éa", buffer.as_mut_ptr().cast(), length) };
            assert_eq!((whole, &buffer[..]), (3, expected.as_bytes()), "{length}");
        }
        // SAFETY: null is allowed.
        assert_eq!(unsafe { give_text("éa", std::ptr::null_mut(), 9) }, 3);
    }
}
