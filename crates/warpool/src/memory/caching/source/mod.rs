//! Obtaining memory from the driver or an upstream, and returning it. Everything here requires the device's slow lock,
//! so segments are added and removed one at a time; the state is locked only between driver calls. The slow lock is
//! released around user code: upstreams and their destructors.
//!
//! A driver call may unwind, because users can implement the driver trait. Guards then put back blocks in transit and
//! list calls to be retried, without a driver call.

mod expandable;
mod segments;

pub(super) use self::expandable::retry_failed_calls;
use super::device::{PoolVisit, SlowGuard};
use super::heap::{BlockKey, BlockPoolKey, BlockRequest};
use super::pending::PendingFrees;
use super::state::DeviceState;
use crate::Result;
use crate::memory::report::EntryDetails;
pub(super) use crate::memory::segment_source::OrOom;
use crate::memory::stream_fence;
use crate::memory::{MemPoolId, OomCause};

/// Allocates a segment for a request, or maps memory in an expandable segment. The block is in transit and at least as
/// large as requested.
pub(super) fn allocate(
    slow: &SlowGuard<'_>,
    request: &BlockRequest,
    details: &EntryDetails,
) -> Result<OrOom<BlockKey>> {
    if slow.read(|state| state.exceeds_limit(request)) {
        return Ok(Err(OomCause::Limit));
    }
    if request.expandable {
        expandable::allocate(slow, request, details)
    } else {
        segments::allocate(slow, request, details)
    }
}

/// The bytes that were released and the first error. A failure does not stop the rest.
struct Released {
    bytes: u64,
    outcome: Result<()>,
}

impl Released {
    fn none() -> Self {
        Self { bytes: 0, outcome: Ok(()) }
    }

    fn add(&mut self, released: Result<u64>) {
        match released {
            Ok(bytes) => self.bytes += bytes,
            Err(error) => self.outcome = std::mem::replace(&mut self.outcome, Ok(())).and(Err(error)),
        }
    }

    fn total(self) -> Result<u64> {
        self.outcome.map(|()| self.bytes)
    }
}

/// Releases all free memory of a block pool: whole segments, and chunks of expandable segments.
fn release_block_pool(slow: &SlowGuard<'_>, block_pool: BlockPoolKey, details: &EntryDetails) -> Result<u64> {
    let free = slow.read(|state| state.free_memory(block_pool));
    let mut released = Released::none();
    for block in free.blocks {
        released.add(segments::release(slow, block, details));
    }
    for block in free.expandable {
        released.add(expandable::release_chunks(slow, block, details));
    }
    for segment in slow.read(|state| state.heap.unmapped_segments(block_pool)) {
        released.add(expandable::release_addresses(slow, segment).map(|()| 0));
    }
    released.total()
}

/// Releases all free memory of released pools and, unless `skip_default_pool`, of the default pool.
pub(super) fn release_all(slow: &SlowGuard<'_>, skip_default_pool: bool, details: &EntryDetails) -> Result<u64> {
    let mut released = Released::none();
    if !skip_default_pool {
        let [small, large] = slow.read(|state| state.pools.default_block_pools());
        released.add(release_block_pool(slow, large, details));
        released.add(release_block_pool(slow, small, details));
    }
    for pool in slow.read(|state| state.pools.released().map(|(id, _)| id).collect::<Vec<_>>()) {
        released.add(release_pool(slow, pool, details));
    }
    released.total()
}

/// Releases the free segments of pools in use whose upstreams take them: those of tags.
pub(super) fn release_tagged(slow: &SlowGuard<'_>, details: &EntryDetails) -> Result<u64> {
    let pools = slow.read(|state| state.pools.with_upstream());
    let pools = slow.unlocked(|| {
        let takes = pools.into_iter().filter(|(_, upstream)| upstream.takes_free_segments());
        takes.map(|(pool, _)| pool).collect::<Vec<_>>()
    });
    let mut released = Released::none();
    for pool in pools {
        released.add(release_pool(slow, pool, details));
    }
    released.total()
}

/// Releases all free memory of a private pool, and removes the pool if it is empty and released by its users.
pub(super) fn release_pool(slow: &SlowGuard<'_>, pool: MemPoolId, details: &EntryDetails) -> Result<u64> {
    let Ok([small, large]) = slow.change(|state| state.pools.enter(pool)) else { return Ok(0) };
    let visit = PoolVisit::entered(slow, pool);
    let released = wait_for_users(slow, pool, details).and_then(|waited| {
        let mut released = Released::none();
        if waited {
            released.add(release_block_pool(slow, small, details));
            released.add(release_block_pool(slow, large, details));
        }
        released.total()
    });
    slow.unlocked(|| drop(visit));
    released
}

/// Waits for the work of streams that use a pool's memory without being its allocation streams: replays of graphs that
/// were destroyed. The driver's free waits for all work, but unmapping does not. Returns `false` if a capture forbids
/// waiting.
fn wait_for_users(slow: &SlowGuard<'_>, pool: MemPoolId, details: &EntryDetails) -> Result<bool> {
    let (streams, anywhere) = slow.read(|state| {
        let anywhere = state.pools.get(pool)?.used_anywhere;
        Result::Ok((state.pools.used_by(pool), anywhere))
    })?;
    if crate::defect::Defect::TrimForgetsReplays.is_on() {
        return Ok(true);
    }
    if anywhere {
        // The only option is to wait for the device, which would invalidate any capture.
        if slow.has_captures() {
            return Ok(false);
        }
        slow.driver().device_synchronize(slow.id)?;
        slow.change(|state| state.pools.clear_use_anywhere(pool));
    }
    for stream in streams {
        if !stream_fence::wait_for_stream(&PendingFrees::new(slow, details), stream)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// With a split limit, releases free oversize segments of the request's stream: one that is large enough, or else the
/// largest ones until they sum up. Returns whether that may suffice.
pub(super) fn release_oversize(slow: &SlowGuard<'_>, request: &BlockRequest, details: &EntryDetails) -> Result<bool> {
    let (needed, candidates) = slow.read(|state| state.oversize_segments(request));
    let mut released = 0;
    for block in candidates {
        if released >= needed {
            break;
        }
        released += segments::release(slow, block, details)?;
    }
    Ok(needed > 0 && released >= needed)
}

/// Above the threshold, releases free large segments of the default pool that were not used for long: those at least as
/// old as the average, until enough is released. Does not wait for anything beyond what the driver's free waits for.
pub(super) fn collect_garbage(slow: &SlowGuard<'_>, details: &EntryDetails) -> Result<()> {
    let excess = slow.read(DeviceState::bytes_over_gc_threshold);
    let mut released = 0;
    while released < excess {
        let before = released;
        for block in slow.read(DeviceState::old_segments) {
            released += segments::release(slow, block, details)?;
        }
        if released == before {
            break;
        }
    }
    Ok(())
}
