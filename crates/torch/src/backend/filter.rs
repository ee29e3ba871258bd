//! A predicate of the C++ layer over streams: PyTorch's filter of an open pool.

use std::ffi::{c_int, c_void};

use crate::error::{Error, Result};

/// A C function with its argument, and how the argument is deleted.
pub(crate) struct Filter {
    matches: unsafe extern "C" fn(user: *mut c_void, stream: *const c_void) -> c_int,
    delete: Option<unsafe extern "C" fn(user: *mut c_void)>,
    user: *mut c_void,
}

// SAFETY: by the contract of `new`, any thread may call the functions with the argument, also several at once.
unsafe impl Send for Filter {}
// SAFETY: as above.
unsafe impl Sync for Filter {}

impl Filter {
    /// # Safety
    /// Until it is dropped, any thread may call `matches` with `user` and a stream; then `delete` is called once.
    pub(crate) unsafe fn new(
        matches: unsafe extern "C" fn(user: *mut c_void, stream: *const c_void) -> c_int,
        delete: Option<unsafe extern "C" fn(user: *mut c_void)>,
        user: *mut c_void,
    ) -> Self {
        Self { matches, delete, user }
    }

    /// Whether it accepts a stream. The caller and the C++ layer agree on what `stream` points to.
    pub(crate) fn matches(&self, stream: *const c_void) -> Result<bool> {
        // SAFETY: callable by the contract of `new`.
        match unsafe { (self.matches)(self.user, stream) } {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Error::Filter),
        }
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        if let Some(delete) = self.delete {
            // SAFETY: called once, here, by the contract of `new`.
            unsafe { delete(self.user) };
        }
    }
}

impl std::fmt::Debug for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Filter")
    }
}
