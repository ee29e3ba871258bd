//! Segments that are one allocation of the driver or of a pool's upstream.

use std::sync::Arc;

use warpool_driver::{DevicePtr, ErrorCode};

use super::OrOom;
use crate::Result;
use crate::memory::caching::device::SlowGuard;
use crate::memory::caching::heap::{BlockKey, BlockRequest, SegmentSource};
use crate::memory::report::EntryDetails;
use crate::memory::{OomCause, Upstream};
use crate::unwind::OnUnwind;

/// Allocates a segment for a request.
pub(super) fn allocate(
    slow: &SlowGuard<'_>,
    request: &BlockRequest,
    details: &EntryDetails,
) -> Result<OrOom<BlockKey>> {
    let upstream = slow.read(|state| state.pools().upstream(request.pool))?;
    let stream_raw = slow.stream_raw(request.stream)?;
    let (ptr, source) = match upstream {
        Some(upstream) => match allocate_upstream(slow, &*upstream, request)? {
            Some(ptr) => (ptr, SegmentSource::Upstream(upstream)),
            None => return Ok(Err(OomCause::External)),
        },
        None => {
            let _safe = slow.capture_safe()?;
            match slow.driver().mem_alloc(slow.id, request.segment) {
                Ok(ptr) => (ptr, SegmentSource::Driver),
                Err(error) if error.code == ErrorCode::OutOfMemory => return Ok(Err(OomCause::Device)),
                Err(error) => return Err(error.into()),
            }
        }
    };
    Ok(Ok(slow.change(|state| state.add_segment(request, stream_raw, ptr, source, details))))
}

/// Allocates memory from an upstream. The bytes count against the limit during the call, which is made without the slow
/// lock.
fn allocate_upstream(
    slow: &SlowGuard<'_>,
    upstream: &dyn Upstream,
    request: &BlockRequest,
) -> Result<Option<DevicePtr>> {
    let bytes = request.segment;
    slow.change(|state| state.begin_upstream_call(bytes));
    let end = || slow.change(|state| state.end_upstream_call(bytes));
    let unwinds = OnUnwind::new(end);
    let outcome = slow.unlocked(|| {
        let _relaxed = slow.relaxed_mode()?;
        upstream.allocate(slow.id, bytes, request.stream)
    });
    unwinds.disarm();
    end();
    if let Ok(Some(ptr)) = outcome {
        slow.read(|state| state.heap().check_untrusted(ptr, bytes))?;
    }
    outcome
}

/// Returns a segment to its source, if the block is still a free segment. Returns its bytes. If the call fails, or an
/// upstream panics, the segment stays.
pub(super) fn release(slow: &SlowGuard<'_>, block: BlockKey, details: &EntryDetails) -> Result<u64> {
    let Some(segment) = slow.change(|state| state.take_segment(block)) else { return Ok(0) };
    let (ptr, bytes) = (segment.ptr, segment.bytes);
    let put_back = || slow.change(|state| state.put_segment_back(block));
    let unwinds = OnUnwind::new(put_back);
    let outcome = match segment.upstream {
        Some(upstream) => slow.unlocked(|| {
            let _relaxed = slow.relaxed_mode()?;
            upstream.free(ptr, bytes, slow.id, segment.stream)
        }),
        None => slow.capture_safe().and_then(|_safe| Ok(slow.driver().mem_free(ptr)?)),
    };
    unwinds.disarm();
    if outcome.is_err() {
        put_back();
    } else {
        match slow.change(|state| state.remove_segment(block, details)) {
            // This may drop the last reference.
            SegmentSource::Upstream(upstream) => slow.unlocked(|| drop::<Arc<_>>(upstream)),
            SegmentSource::Driver | SegmentSource::Expandable(_) => {}
        }
    }
    outcome.map(|()| bytes)
}
