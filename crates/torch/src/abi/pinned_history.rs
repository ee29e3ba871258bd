//! The history of pinned memory, and its state, for PyTorch's allocator class.

use std::ffi::{c_int, c_void};

use warpool::memory::report::{SegmentInfo, Snapshot};

use super::history::history_options;
use super::observers::{ContextCollector, ContextReleaser};
use super::snapshot::{ActionEntry, BlockEntry, EntryTexts, SegmentEntry, visit_segment};
use crate::error::Error;
use crate::{boundary, runtime};

/// Starts recording the history of pinned memory, keeping the newest `max_entries` entries; if `on` is 0, stops and
/// drops it. `stack_level` is as for `warpool_record_history`; `collect` and `release` are as for
/// `warpool_set_context_collector`. If `clear` is not 0, earlier entries are dropped.
///
/// # Safety
/// Any thread may call `collect` at any time without locks held, and `release` once for each context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pinned_record_history(
    on: c_int,
    max_entries: u64,
    stack_level: c_int,
    collect: ContextCollector,
    release: ContextReleaser,
    clear: c_int,
) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let allocator = runtime.pinned.allocator();
        let options = history_options(runtime, max_entries, stack_level, "")?;
        if on == 0 || clear != 0 {
            allocator.record_history(None);
        }
        let recorder = if on == 0 { None } else { collect.zip(release) };
        // SAFETY: by this function's contract.
        unsafe { runtime.contexts.set_recorder(allocator.observers(), recorder) };
        if on != 0 {
            allocator.record_history(Some(options));
        }
        runtime.pinned.set_history_on(on != 0);
        Ok(())
    })
}

/// Whether a history of pinned memory is recorded.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pinned_is_history_on() -> c_int {
    let on = boundary::run(|| Ok(runtime::get()?.pinned.is_history_on()));
    c_int::from(on.unwrap_or(false))
}

/// Receives the state of pinned memory: every segment followed by its blocks, then every entry of the history, oldest
/// first. What pointers point to is valid during a call only. The device is -1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PinnedVisitor {
    /// The first argument of every function.
    pub user: *mut c_void,
    /// Receives a segment.
    pub segment: unsafe extern "C" fn(user: *mut c_void, segment: *const SegmentEntry),
    /// Receives a block of that segment.
    pub block: unsafe extern "C" fn(user: *mut c_void, block: *const BlockEntry),
    /// Receives an entry.
    pub entry: unsafe extern "C" fn(user: *mut c_void, device: c_int, entry: *const ActionEntry),
}

/// Calls `visitor` with the state of pinned memory. The functions may call this library.
///
/// # Safety
/// `visitor` is NULL, which is an error, or its functions may be called with its `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_visit_pinned(visitor: *const PinnedVisitor) -> c_int {
    boundary::status(|| {
        // SAFETY: null or valid by this function's contract.
        let visitor = unsafe { visitor.as_ref() }.ok_or(Error::Null { argument: "visitor" })?;
        let mut snapshot = Snapshot::default();
        runtime::get()?.pinned.allocator().add_to(&mut snapshot);
        let segments: &[SegmentInfo] = snapshot.host_segments.as_deref().unwrap_or_default();
        for segment in segments {
            // SAFETY: callable with its user by this function's contract.
            unsafe { visit_segment(&snapshot, segment, visitor.user, visitor.segment, visitor.block) };
        }
        for entry in snapshot.host_traces.as_deref().unwrap_or_default() {
            let texts = EntryTexts::of_trace(&snapshot, entry);
            // SAFETY: callable by this function's contract; the entry lives during the call.
            unsafe { (visitor.entry)(visitor.user, -1, texts.entry()) };
        }
        Ok(())
    })
}
