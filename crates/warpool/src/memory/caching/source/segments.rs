//! Segments that are one allocation of the driver or of a pool's upstream.

use warpool_driver::DevicePtr;

use crate::Result;
use crate::memory::OomCause;
use crate::memory::caching::device::SlowGuard;
use crate::memory::caching::heap::{BlockKey, BlockRequest};
use crate::memory::report::{EntryDetails, RangeEvent};
use crate::memory::segment_source::{OrOom, SegmentSource};
use crate::unwind::OnUnwind;

/// Calls the source of a segment, without the slow lock if that is user code.
fn call<R>(slow: &SlowGuard<'_>, source: &SegmentSource, act: impl FnOnce() -> R) -> R {
    match source {
        SegmentSource::Driver => act(),
        SegmentSource::Upstream(_) => slow.unlocked(act),
    }
}

/// Allocates a segment for a request. The bytes count against the limit meanwhile.
pub(super) fn allocate(
    slow: &SlowGuard<'_>,
    request: &BlockRequest,
    details: &EntryDetails,
) -> Result<OrOom<BlockKey>> {
    let source = SegmentSource::of(slow.read(|state| state.pools.upstream(request.pool))?);
    let stream_raw = slow.stream_raw(request.stream)?;
    let bytes = call(slow, &source, || source.rounded(request.segment));
    let request = &BlockRequest { segment: bytes, ..*request };
    if slow.read(|state| state.exceeds_limit(request)) {
        return Ok(Err(OomCause::Limit));
    }
    slow.change(|state| state.source_bytes_in_flight += bytes);
    let end = || slow.change(|state| state.source_bytes_in_flight -= bytes);
    let unwinds = OnUnwind::new(end);
    let allocated = call(slow, &source, || source.allocate(slow, bytes, request.stream));
    unwinds.disarm();
    end();
    let ptr = match allocated? {
        Ok(ptr) => ptr,
        Err(why) => return Ok(Err(why)),
    };
    if source.is_untrusted() {
        slow.read(|state| state.heap.check_untrusted(ptr, bytes))?;
    }
    Ok(Ok(slow.change(|state| state.add_segment(request, stream_raw, ptr, source, details))))
}

/// Tells range observers that memory is about to be unmapped, without the slow lock. Its block must be in transit.
pub(super) fn announce_unmap(slow: &SlowGuard<'_>, ptr: DevicePtr, bytes: u64) {
    if slow.observers().tells_ranges() && !crate::defect::Defect::UnmapsUnannounced.is_on() {
        slow.unlocked(|| slow.observers().range_changes(slow.id, RangeEvent::Unmapping, ptr, bytes));
    }
}

/// Tells them that it was not unmapped.
pub(super) fn take_back_unmap(slow: &SlowGuard<'_>, ptr: DevicePtr, bytes: u64) {
    if slow.observers().tells_ranges() {
        slow.unlocked(|| slow.observers().range_changes(slow.id, RangeEvent::Mapped, ptr, bytes));
    }
}

/// Returns a segment to its source, if the block is still a free segment. Returns its bytes. If the call fails, or an
/// upstream panics, the segment stays.
pub(super) fn release(slow: &SlowGuard<'_>, block: BlockKey, details: &EntryDetails) -> Result<u64> {
    let Some(segment) = slow.change(|state| state.take_segment(block)) else { return Ok(0) };
    let (source, bytes) = (segment.source, segment.bytes);
    let put_back = || slow.change(|state| state.heap.put_free(block));
    let unwinds = OnUnwind::new(put_back);
    announce_unmap(slow, segment.ptr, bytes);
    let outcome = call(slow, &source, || source.free(slow, segment.ptr, bytes, segment.stream));
    unwinds.disarm();
    if outcome.is_err() {
        put_back();
        take_back_unmap(slow, segment.ptr, bytes);
    } else {
        let removed = slow.change(|state| state.remove_segment(block, details));
        if source.is_untrusted() {
            // These may be the last references.
            slow.unlocked(|| drop((source, removed)));
        }
    }
    outcome.map(|()| bytes)
}
