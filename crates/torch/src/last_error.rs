//! The last error of each thread, for `warpool_last_error`. It is kept until the thread's next failure.
//!
//! It is null-terminated, so that a frame that an exception is about to pass can hold a plain pointer to it.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};

use crate::error::Error;

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
    static OUT_OF_MEMORY: Cell<bool> = const { Cell::new(false) };
}

/// Whether the last error of this thread is out of memory.
pub(crate) fn is_out_of_memory() -> bool {
    OUT_OF_MEMORY.get()
}

/// Sets the last error of this thread; `note` is added to its text.
#[cold]
pub(crate) fn set(error: &Error, note: &str) {
    OUT_OF_MEMORY.set(error.is_out_of_memory());
    // Names and paths from outside may contain a null character, which would truncate the text.
    let text = CString::new(format!("{error}{note}").replace('\0', "\u{fffd}")).expect("null characters are replaced");
    // Fails while the thread's locals are being destroyed; then the text is dropped.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// The last error of this thread as a C string, valid until the thread's next failure.
pub(crate) fn pointer() -> *const c_char {
    const THREAD_ENDING: &CStr = c"a call failed while its thread was ending";
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(THREAD_ENDING.as_ptr())
}

/// Calls `read` with the last error of this thread; empty if there is none.
pub(crate) fn with<R>(read: impl FnOnce(&str) -> R) -> R {
    let mut read = Some(read);
    let result = LAST.try_with(|last| {
        let text = last.borrow();
        read.take().map(|read| read(text.to_str().unwrap_or_default()))
    });
    match result {
        Ok(Some(result)) => result,
        _ => read.take().expect("it was not called yet")(""),
    }
}
