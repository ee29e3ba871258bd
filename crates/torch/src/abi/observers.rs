//! Callbacks for PyTorch's allocator class: call stacks that PyTorch collects, trackers of the history, observers of
//! out-of-memory, and what may free memory before the driver is asked.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use warpool::memory::OomCause;
use warpool::memory::report::{
    Action, Annotation, HistoryEntry, RangeEvent, pop_compile_context, push_compile_context, user_metadata,
};

use super::pools::Delete;
use super::snapshot::{ActionEntry, entry_of};
use crate::backend::{CollectContext, ReleaseContext};
use crate::boundary;
use crate::runtime;

/// A callback's argument, deleted with the callback.
struct User {
    user: *mut c_void,
    delete: Delete,
}

// SAFETY: by the contracts of the functions that take one, any thread may use it.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl Drop for User {
    fn drop(&mut self) {
        if let Some(delete) = self.delete {
            // SAFETY: called once, here, by the contracts of the functions that take one.
            unsafe { delete(self.user) };
        }
    }
}

/// Collects the context of a call, such as its stack; NULL if there is none.
pub type ContextCollector = Option<unsafe extern "C" fn() -> *mut c_void>;

/// Releases a context.
pub type ContextReleaser = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// Collects contexts for the history from here on, instead of stacks of `warpool_set_stack_hook`. Entries and blocks
/// show them in `warpool_visit_snapshot`. Without a `collect`, no more are collected; those that there are stay.
///
/// # Safety
/// Any thread may call `collect` at any time without locks held, and `release` once for each context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_set_context_collector(collect: ContextCollector, release: ContextReleaser) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let recorder: Option<(CollectContext, ReleaseContext)> = collect.zip(release);
        // SAFETY: by this function's contract.
        unsafe { runtime.contexts.set_recorder(runtime.allocator().observers(), recorder) };
        if recorder.is_none() {
            runtime.recorder.resume_stacks(runtime);
        }
        Ok(())
    })
}

/// Whether a history is recorded.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_is_history_on() -> c_int {
    let on = boundary::run(|| Ok(runtime::get()?.is_history_on()));
    c_int::from(on.unwrap_or(false))
}

/// Receives an entry of the history, which is valid during the call only.
pub type EntryObserver = unsafe extern "C" fn(user: *mut c_void, device: c_int, entry: *const ActionEntry);

/// Calls `track` with every entry of the history from here on, also while none is recorded, on the thread that causes
/// it and without locks held.
///
/// # Safety
/// Any thread may call `track` with `user` at any time, also several at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_attach_tracker(track: EntryObserver, user: *mut c_void, delete_user: Delete) -> c_int {
    let user = User { user, delete: delete_user };
    boundary::status(|| {
        let runtime = runtime::get()?;
        let tracker = move |device: warpool_driver::DeviceId, entry: &HistoryEntry| {
            let texts = entry_of(device, entry);
            // SAFETY: callable by this function's contract; the entry lives during the call.
            unsafe { track(user.whole().user, device.0 as c_int, texts.entry()) };
        };
        runtime.allocator().observers().attach_tracker(&Action::ALL, Arc::new(tracker));
        Ok(())
    })
}

impl User {
    /// The whole value: a closure that names a field captures only the field.
    fn whole(&self) -> &Self {
        self
    }
}

/// A request that ran out of memory. All sizes are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct OomEntry {
    /// The device.
    pub device: c_int,
    /// Whether it was refused before the driver was called, because `throw_on_cudamalloc_oom` is set.
    pub is_rejection: bool,
    /// What was, or would have been, requested from the driver.
    pub requested: usize,
    /// The allocated bytes.
    pub allocated: usize,
    /// What may be reserved: the device's memory, or the limit that is set.
    pub limit: usize,
    /// The device's memory.
    pub bytes_total: usize,
    /// The device's free memory.
    pub bytes_free: usize,
}

/// Receives a request that ran out of memory, which is valid during the call only.
pub type OomCallback = unsafe extern "C" fn(user: *mut c_void, oom: *const OomEntry);

/// Calls `observe` for every request that runs out of memory, before it fails, without locks held.
///
/// # Safety
/// Any thread may call `observe` with `user` at any time, also several at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_attach_oom_observer(
    observe: OomCallback,
    user: *mut c_void,
    delete_user: Delete,
) -> c_int {
    let user = User { user, delete: delete_user };
    boundary::status(|| {
        runtime::get()?.allocator().observers().attach_oom_observer(Arc::new(move |report| {
            let oom = OomEntry {
                device: report.device.0 as c_int,
                is_rejection: report.cause == OomCause::Rejected,
                requested: report.bytes_segment as usize,
                allocated: report.bytes_allocated as usize,
                limit: report.bytes_limit.unwrap_or(report.bytes_total) as usize,
                bytes_total: report.bytes_total as usize,
                bytes_free: report.bytes_free as usize,
            };
            // SAFETY: callable by this function's contract; the entry lives during the call.
            unsafe { observe(user.whole().user, &raw const oom) };
        }));
        Ok(())
    })
}

/// A change of the memory behind a range of addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RangeChange {
    /// 0: memory is behind it from now on, and may be registered. 1: the memory is about to return to the driver, or to
    /// fall asleep: registrations have to end before the observer returns; if the call then fails, 0 follows. 2: pages
    /// have left it: registrations are of memory that belongs elsewhere.
    pub event: c_int,
    /// The device.
    pub device: c_int,
    /// The first address.
    pub ptr: *mut c_void,
    /// The size in bytes.
    pub bytes: usize,
    /// The number of the change: what was registered before it and overlaps with it is stale.
    pub generation: u64,
}

/// Receives a change, which is valid during the call only.
pub type RangeCallback = unsafe extern "C" fn(user: *mut c_void, change: *const RangeChange);

/// Calls `observe` with every change of the memory behind addresses from here on, on the thread that causes it and
/// without locks held: before memory returns to the driver or falls asleep, and after pages have moved, before the call
/// that moved them returns. Memory of a stable pool changes when it comes and when it goes.
///
/// # Safety
/// Any thread may call `observe` with `user` at any time, also several at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_attach_range_observer(
    observe: RangeCallback,
    user: *mut c_void,
    delete_user: Delete,
) -> c_int {
    let user = User { user, delete: delete_user };
    boundary::status(|| {
        runtime::get()?.allocator().observers().attach_range_observer(Arc::new(move |change| {
            let change = RangeChange {
                event: match change.event {
                    RangeEvent::Mapped => 0,
                    RangeEvent::Unmapping => 1,
                    RangeEvent::Left => 2,
                },
                device: change.device.0 as c_int,
                ptr: change.ptr.0 as *mut c_void,
                bytes: change.bytes as usize,
                generation: change.generation,
            };
            // SAFETY: callable by this function's contract; the change lives during the call.
            unsafe { observe(user.whole().user, &raw const change) };
        }));
        Ok(())
    })
}

/// Frees memory that is kept for later only. Returns 1 if anything was freed, else 0.
pub type PressureHook = unsafe extern "C" fn(device: c_int) -> c_int;

/// Calls `relieve` when no cached block fits a request, before the driver is asked, without locks held.
///
/// # Safety
/// Any thread may call `relieve` at any time, also several at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_attach_pressure_callback(relieve: PressureHook) -> c_int {
    boundary::status(|| {
        runtime::get()?.allocator().observers().attach_pressure_callback(Arc::new(move |device| {
            // SAFETY: callable by this function's contract.
            unsafe { relieve(device.0 as c_int) != 0 }
        }));
        Ok(())
    })
}

/// Adds the start or the end (`stage`) of a region that the program named to the history.
///
/// # Safety
/// `name` and `stage` are NULL, which is an error, or null-terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_record_annotation(device: c_int, name: *const c_char, stage: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: null or null-terminated by this function's contract.
        let name = unsafe { boundary::text(name, "name") }?.to_owned();
        // SAFETY: the same.
        let stage = unsafe { boundary::text(stage, "stage") }?.to_owned();
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_us = i64::try_from(since_1970.as_micros()).unwrap_or(i64::MAX);
        runtime::get()?.annotations.add(Annotation { name, stage, device: i64::from(device), time_us });
        Ok(())
    })
}

/// Enters a compiled region: history entries of the calling thread name it.
///
/// # Safety
/// `name` is NULL, which is an error, or a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_push_compile_context(name: *const c_char) -> c_int {
    boundary::status(|| {
        // SAFETY: null or null-terminated by this function's contract.
        push_compile_context(unsafe { boundary::text(name, "name") }?);
        Ok(())
    })
}

/// Leaves the compiled region that the calling thread entered last.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pop_compile_context() {
    let _ = boundary::run(|| {
        pop_compile_context();
        Ok(())
    });
}

/// Copies the user metadata of the calling thread to `buffer`, null-terminated and truncated if it does not fit.
/// Returns the length of the whole text without the terminator.
///
/// # Safety
/// `buffer` is NULL or points to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_user_metadata(buffer: *mut c_char, length: usize) -> usize {
    let text = boundary::run(|| Ok(user_metadata())).ok().flatten();
    // SAFETY: `buffer` is null or has `length` bytes by this function's contract.
    unsafe { boundary::copy_text(text.as_deref().unwrap_or(""), buffer, length) }
}
