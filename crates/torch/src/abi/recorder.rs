//! Recordings that a program writes about itself (`record:oom` in the settings).

use std::ffi::{c_char, c_int};
use std::path::Path;

use crate::error::Error;
use crate::recorder::PythonInterface;
use crate::{boundary, runtime};

/// Recordings go to this folder from here on. It is made when the first one is written.
///
/// # Safety
/// `folder` is NULL, which is an error, or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_set_record_dir(folder: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: `folder` is null or null-terminated by this function's contract.
        let folder = unsafe { boundary::text(folder, "folder") }?;
        runtime::get()?.set_record_folder(Path::new(folder))
    })
}

/// Writes a recording: the state of every device with the last events, and what `explain` says about it in a text with
/// the same name. `path` is NULL for a new file in the folder of recordings. The path of the file is copied to
/// `written`, null-terminated and truncated if it does not fit. An error unless the settings have `record:oom`.
///
/// # Safety
/// `path` is NULL or a null-terminated string; `written` is NULL or points to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_record_now(path: *const c_char, written: *mut c_char, length: usize) -> c_int {
    boundary::status(|| {
        // SAFETY: `path` is not null where it is read, and null-terminated by this function's contract.
        let path = if path.is_null() { None } else { Some(Path::new(unsafe { boundary::text(path, "path") }?)) };
        let found = runtime::get()?.record_now(path)?;
        // SAFETY: `written` is null or has `length` bytes by this function's contract.
        unsafe { boundary::copy_text(&found.to_string_lossy(), written, length) };
        Ok(())
    })
}

/// Writes a recording if the settings have `record_at_exit:True`: to be called when the program ends, while its memory
/// is still allocated.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_record_at_exit() -> c_int {
    boundary::status(|| runtime::get()?.record_at_exit())
}

/// Has recordings show the call stacks of a Python program. NULL ends that: on return no other thread is in the
/// interpreter for it, unless it was for longer than two seconds. It must be called before the interpreter ends, and
/// without its lock (the GIL). In a forked child NULL does nothing.
///
/// # Safety
/// `python` is NULL, or its functions are those of the interpreter of this process, which has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_set_python(python: *const PythonInterface) -> c_int {
    boundary::status(|| {
        // SAFETY: null or valid by this function's contract.
        let python = unsafe { python.as_ref() }.copied();
        match runtime::get() {
            Ok(runtime) => {
                runtime.set_python(python);
                Ok(())
            }
            Err(Error::Forked) if python.is_none() => Ok(()),
            Err(error) => Err(error),
        }
    })
}
