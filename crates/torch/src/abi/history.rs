//! Snapshots and the history of allocations.

use std::ffi::{c_char, c_int};
use std::path::Path;
use std::sync::atomic::Ordering;

use warpool::memory::report::{Frame, HistoryOptions, StackLevel, set_user_metadata};

use crate::boundary;
use crate::error::{Error, Result};
use crate::runtime::{self, Runtime};
use crate::{snapshot, stacks};

/// Pushes the frames of the calling thread with `warpool_push_frame`, innermost first.
pub type StackHook = Option<extern "C" fn()>;

/// Writes the state of every device, and the history if it is recorded, to a file, in the format of
/// `torch.cuda.memory._dump_snapshot`. On failure no partial file is left.
///
/// # Safety
/// `path` is NULL, which is an error, or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_snapshot(path: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: `path` is null or null-terminated by this function's contract.
        let path = unsafe { boundary::text(path, "path") }?;
        let content = runtime::get()?.snapshot()?;
        snapshot::write(&content, Path::new(path))
    })
}

/// Starts recording the history, keeping the newest `max_entries` entries per device; if `on` is 0, stops and drops it.
///
/// `stack_level` selects where call stacks are collected, each level including those below: 0 nowhere, 1 for allocated
/// blocks, 2 for entries of allocations, 3 for entries of frees. `skip_actions` is NULL or a comma-separated list of
/// actions that are not recorded. If `clear` is not 0, earlier entries are dropped.
///
/// # Safety
/// `skip_actions` is NULL or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_record_history(
    on: c_int,
    max_entries: u64,
    stack_level: c_int,
    skip_actions: *const c_char,
    clear: c_int,
) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        if on == 0 {
            runtime.history_on.store(false, Ordering::Relaxed);
            runtime.annotations.set_limit(0);
            runtime.allocator().record_history(None)?;
            return runtime.recorder.resume(runtime);
        }
        // SAFETY: `skip_actions` is not null here, and null-terminated by this function's contract.
        let skip = if skip_actions.is_null() { "" } else { unsafe { boundary::text(skip_actions, "skip_actions") }? };
        let options = history_options(runtime, max_entries, stack_level, skip)?;
        if clear != 0 {
            runtime.allocator().record_history(None)?;
            runtime.annotations.set_limit(0);
        }
        runtime.annotations.set_limit(options.entries_max);
        runtime.allocator().record_history(Some(options))?;
        runtime.history_on.store(true, Ordering::Relaxed);
        Ok(())
    })
}

/// Collects call stacks for the history with `hook`; NULL collects none. The hook is called on the thread that
/// allocates or frees, without locks held. On return no other thread runs the previous hook, unless it ran for longer
/// than two seconds. In a forked child no hook is called, and NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_set_stack_hook(hook: StackHook) -> c_int {
    boundary::status(|| match runtime::get() {
        Ok(runtime) => {
            runtime.set_stack_hook(hook);
            Ok(())
        }
        Err(Error::Forked) if hook.is_none() => Ok(()),
        Err(error) => Err(error),
    })
}

/// Adds a frame to the call stack that the hook running on this thread collects; does nothing outside a hook. A NULL
/// string is taken as empty, and invalid UTF-8 is replaced.
///
/// # Safety
/// `name` and `file` are NULL or null-terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_push_frame(name: *const c_char, file: *const c_char, line: u64) {
    let _ = boundary::run(|| {
        // SAFETY: `name` is null or null-terminated by this function's contract.
        let name = unsafe { lossy_text(name) };
        // SAFETY: `file` is null or null-terminated by this function's contract.
        let filename = unsafe { lossy_text(file) };
        stacks::push(Frame { name, filename, line });
        Ok(())
    });
}

/// Sets the user metadata of the history entries that the calling thread adds from now on; NULL or an empty string for
/// none.
///
/// # Safety
/// `text` is NULL or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_set_user_metadata(text: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: `text` is not null where it is read, and null-terminated by this function's contract.
        set_user_metadata(if text.is_null() { "" } else { unsafe { boundary::text(text, "text") }? });
        Ok(())
    })
}

pub(super) fn history_options(runtime: &Runtime, max_entries: u64, level: c_int, skip: &str) -> Result<HistoryOptions> {
    let stacks = match level {
        0 => StackLevel::Never,
        1 => StackLevel::State,
        2 => StackLevel::Alloc,
        3 => StackLevel::All,
        _ => return Err(Error::StackLevel { level }),
    };
    let entries_max = usize::try_from(max_entries).unwrap_or(usize::MAX);
    let options = HistoryOptions { entries_max, stacks, skip: Vec::new(), epoch_us: runtime.epoch_us() };
    let names: Vec<&str> = skip.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    Ok(options.skipping(&names)?)
}

/// # Safety
/// `text` is null or a null-terminated string.
unsafe fn lossy_text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, and null-terminated by this function's contract.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
