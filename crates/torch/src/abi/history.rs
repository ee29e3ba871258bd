//! Snapshots and the history: what there is, and what happened.

use std::ffi::{c_char, c_int};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use warpool::memory::{Frame, HistoryOptions, StackLevel, set_user_metadata};

use crate::boundary;
use crate::error::{Error, Result};
use crate::runtime::{self, Runtime};
use crate::{snapshot, stacks};

/// A function that pushes the frames of the calling thread with `warpool_push_frame`, innermost first.
pub type StackHook = Option<extern "C" fn()>;

/// Writes the state of every device, and the history if one is recorded, to a file, as
/// `torch.cuda.memory._dump_snapshot` would. The file appears whole or not at all.
///
/// # Safety
/// `path` is a text with a zero at its end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_snapshot(path: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: the caller's promise.
        let path = unsafe { boundary::text(path, "path") }?;
        let content = runtime::get()?.snapshot()?;
        snapshot::write(&content, Path::new(path))
    })
}

/// Starts to write down what happens, at most the newest `max_entries` entries per device; or, if `on` is 0, stops and
/// forgets it.
///
/// `stack_level` says where call stacks are gathered, each with the ones before: 0 nowhere, 1 on blocks that somebody
/// has, 2 in entries of allocations, 3 in entries of frees. `skip_actions` names actions that are not written down,
/// with commas between them, or is NULL. If `clear` is not 0, what was written before is forgotten.
///
/// # Safety
/// `skip_actions` is NULL or a text with a zero at its end.
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
            return Ok(runtime.allocator().record_history(None)?);
        }
        // SAFETY: the caller's promise.
        let skip = if skip_actions.is_null() { "" } else { unsafe { boundary::text(skip_actions, "skip_actions") }? };
        let options = history_options(runtime, max_entries, stack_level, skip)?;
        if clear != 0 {
            runtime.allocator().record_history(None)?;
        }
        Ok(runtime.allocator().record_history(Some(options))?)
    })
}

/// Gathers call stacks with `hook`, where the history asks for them; NULL gathers none. It is called on the thread that
/// allocates or frees, without any lock held. When this returns, no other thread is in the hook that was there before,
/// unless it stayed in it for two seconds.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_set_stack_hook(hook: StackHook) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        runtime.stacks.set_hook(runtime.allocator().observers(), hook);
        Ok(())
    })
}

/// One frame of the call stack that the hook running on this thread gathers. Elsewhere it does nothing. Texts that are
/// NULL are empty, and what is no UTF-8 in them is replaced.
///
/// # Safety
/// `name` and `file` are NULL or texts with a zero at their end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_push_frame(name: *const c_char, file: *const c_char, line: u64) {
    let _ = boundary::run(|| {
        // SAFETY: the caller's promise.
        let name = unsafe { loose_text(name) };
        // SAFETY: the caller's promise.
        let filename = unsafe { loose_text(file) };
        stacks::push(Frame { name, filename, line });
        Ok(())
    });
}

/// Writes `text` beside everything that the calling thread causes from now on; NULL or an empty text is nothing.
///
/// # Safety
/// `text` is NULL or a text with a zero at its end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_set_user_metadata(text: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: the caller's promise.
        set_user_metadata(if text.is_null() { "" } else { unsafe { boundary::text(text, "text") }? });
        Ok(())
    })
}

fn history_options(runtime: &Runtime, max_entries: u64, level: c_int, skip: &str) -> Result<HistoryOptions> {
    let stacks = match level {
        0 => StackLevel::Never,
        1 => StackLevel::State,
        2 => StackLevel::Alloc,
        3 => StackLevel::All,
        _ => return Err(Error::StackLevel { level }),
    };
    let entries_max = usize::try_from(max_entries).unwrap_or(usize::MAX);
    let options = HistoryOptions { entries_max, stacks, skip: Vec::new(), epoch_us: epoch_us(runtime) };
    let names: Vec<&str> = skip.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    Ok(options.skipping(&names)?)
}

/// What makes a time of the driver a Unix time, which is what snapshots of PyTorch have. The simulated GPU keeps its
/// own time, so that runs repeat.
fn epoch_us(runtime: &Runtime) -> i64 {
    let driver = runtime.instance().driver();
    if driver.kind() == "sim" {
        return 0;
    }
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_1970.saturating_sub(driver.now()).as_micros()).unwrap_or(0)
}

/// # Safety
/// `text` is null or a text with a zero at its end.
unsafe fn loose_text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
