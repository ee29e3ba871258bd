//! The slow path of an allocation, when no cached block fits. Each step is taken only if the ones before did not help.
//!
//! 0. With pending frees on many streams: poll all fences of the stream's blocks, then search again.
//! 1. Call the pressure callbacks, without any lock; if one freed something, search again.
//! 2. Garbage-collect old segments, if that is enabled.
//! 3. Allocate a new segment.
//! 4. For requests to the default pool: take a free block of a pool with `use_on_oom`.
//! 5. Release oversize segments of the stream, just enough; then allocate a new segment.
//! 6. Unless the stream is capturing: wait for all fences, release everything cached; then allocate a new segment.
//! 7. Unless it is capturing: release free segments of tags; then allocate a new segment.
//! 8. Report out of memory.
//!
//! From the second step on the device's slow lock is held: one thread at a time allocates from the driver, and no other
//! thread's search waits for it. It is released while an upstream is called.

use super::device::{CachingDevice, SlowGuard};
use super::heap::{BlockKey, BlockRequest};
use super::pending::PendingFrees;
use super::source::{self, OrOom};
use super::state::DeviceState;
use crate::memory::report::EntryDetails;
use crate::memory::{Allocation, OomCause};
use crate::{Error, Result};

/// Allocates a block when no cached one fits.
pub(super) fn allocate(
    device: &CachingDevice,
    request: &BlockRequest,
    capturing: bool,
    details: &EntryDetails,
) -> Result<Allocation> {
    let details = &details.clone().timed(device.driver());
    let abandon = |state: &mut DeviceState, found: Option<Allocation>| {
        found.into_iter().for_each(|allocation| state.abandon(&allocation, details));
    };
    let search = || device.with(|state| state.allocate_cached(request, details), abandon);
    if !capturing
        && PendingFrees::new(device, details).process_for(request.stream)?
        && let Some(found) = search()
    {
        return Ok(found);
    }
    if device.observers().run_pressure_callbacks(device.id)
        && let Some(found) = search()
    {
        return Ok(found);
    }
    let slow = device.lock_slow();
    if slow.waited()
        && let Some(found) = search()
    {
        // The thread that held the lock before left a block that fits.
        return Ok(found);
    }
    let outcome = allocate_locked(&slow, request, capturing, details);
    drop(slow);
    let outcome = device.with(|_| outcome, |state, outcome| abandon(state, outcome.ok().and_then(OrOom::ok)));
    outcome?.map_err(|why| out_of_memory(device, request, why, capturing, details))
}

/// The steps under the slow lock.
fn allocate_locked(
    slow: &SlowGuard<'_>,
    request: &BlockRequest,
    capturing: bool,
    details: &EntryDetails,
) -> Result<OrOom<Allocation>> {
    let allocate = |block: BlockKey| slow.change(|state| state.allocate_block(block, request, details));
    if slow.read(|state| state.policy.collects_garbage()) {
        source::collect_garbage(slow, details)?;
    }
    if slow.read(|state| state.rejects(request)) {
        return Ok(Err(OomCause::Rejected));
    }
    if let Ok(block) = source::allocate(slow, request, details)? {
        return Ok(Ok(allocate(block)));
    }
    if request.pool.is_default()
        && let Some(found) = slow.change(|state| state.allocate_from_pools_for_oom(request, details))
    {
        return Ok(Ok(found));
    }
    if source::release_oversize(slow, request, details)?
        && let Ok(block) = source::allocate(slow, request, details)?
    {
        return Ok(Ok(allocate(block)));
    }
    if capturing {
        return Ok(Err(slow.read(|state| state.oom_cause(request))));
    }
    PendingFrees::new(slow, details).wait()?;
    source::release_all(slow, false, details)?;
    slow.change(|state| state.counters.stats.num_alloc_retries += 1);
    match source::allocate(slow, request, details)? {
        Err(_) if source::release_tagged(slow, details)? > 0 => {}
        outcome => return Ok(outcome.map(allocate)),
    }
    Ok(source::allocate(slow, request, details)?.map(allocate))
}

/// Counts a failed request, calls the observers, and builds the error.
fn out_of_memory(
    device: &CachingDevice,
    request: &BlockRequest,
    why: OomCause,
    capturing: bool,
    details: &EntryDetails,
) -> Error {
    let memory = device.memory_info();
    let stream_raw = device.driver().stream_handle(request.stream).map_or(0, |handle| handle.raw.0);
    let count = |state: &mut DeviceState| state.out_of_memory(request, why, stream_raw, (memory, capturing), details);
    let report = device.with(count, |_, _| ());
    device.out_of_memory(report)
}
