//! What went wrong last, per thread: the text that `warpool_last_error` gives. It stays until the thread's next
//! failure.
//!
//! It is kept with a zero behind it, so that code that cannot own anything, because it is about to be unwound, can
//! point to it.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Remembers a failure.
pub(crate) fn set(text: &str) {
    // A zero inside would end the text early; there is none in anything that we write, but names and paths come from
    // outside.
    let text = CString::new(text.replace('\0', "\u{fffd}")).expect("no zeros are left");
    // At the very end of a thread nobody asks any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// Where the text stands until the thread's next failure.
pub(crate) fn pointer() -> *const c_char {
    const ENDING: &CStr = c"a call failed while its thread was ending";
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(ENDING.as_ptr())
}

/// Shows the text to `read`.
pub(crate) fn with<R>(read: impl FnOnce(&str) -> R) -> R {
    let mut read = Some(read);
    let shown = LAST.try_with(|last| {
        let text = last.borrow();
        read.take().map(|read| read(text.to_str().unwrap_or_default()))
    });
    match shown {
        Ok(Some(result)) => result,
        _ => read.take().expect("it was not called yet")(""),
    }
}
