//! Segments in one piece, from the driver or from a pool's upstream.

use std::sync::Arc;

use warpool_driver::ErrorCode;

use super::OrOom;
use crate::Result;
use crate::memory::OomCause;
use crate::memory::caching::device::SlowGuard;
use crate::memory::caching::heap::{BlockKey, BlockRequest, SegmentSource};
use crate::memory::report::EntryDetails;

/// Allocates a segment for a request.
pub(super) fn allocate(
    slow: &SlowGuard<'_>,
    request: &BlockRequest,
    details: &EntryDetails,
) -> Result<OrOom<BlockKey>> {
    let upstream = slow.read(|state| state.pools().upstream(request.pool))?;
    let stream_raw = slow.stream_raw(request.stream)?;
    let (ptr, source) = match upstream {
        Some(upstream) => {
            let _relaxed = slow.relaxed_mode()?;
            match upstream.allocate(slow.id, request.segment, request.stream)? {
                Some(ptr) => (ptr, SegmentSource::Upstream(Arc::clone(&upstream))),
                None => return Ok(Err(OomCause::Upstream)),
            }
        }
        None => {
            let _safe = slow.capture_safe()?;
            match slow.driver().mem_alloc(slow.id, request.segment) {
                Ok(ptr) => (ptr, SegmentSource::Driver),
                Err(error) if error.code == ErrorCode::OutOfMemory => return Ok(Err(OomCause::Device)),
                Err(error) => return Err(error.into()),
            }
        }
    };
    Ok(Ok(slow.with(|state| state.add_segment(request, stream_raw, ptr, source, details))))
}

/// Returns a free segment to its source, if the block still is one. Returns its bytes. On failure it stays.
pub(super) fn release(slow: &SlowGuard<'_>, block: BlockKey, details: &EntryDetails) -> Result<u64> {
    let Some(segment) = slow.with(|state| state.take_segment(block)) else { return Ok(0) };
    let (ptr, bytes) = (segment.ptr, segment.bytes);
    let outcome = match segment.upstream {
        Some(upstream) => slow.relaxed_mode().and_then(|_relaxed| upstream.free(ptr, bytes, slow.id, segment.stream)),
        None => slow.capture_safe().and_then(|_safe| Ok(slow.driver().mem_free(ptr)?)),
    };
    let source = slow.with(|state| match outcome {
        Ok(()) => Some(state.remove_segment(block, details)),
        Err(_) => {
            state.put_segment_back(block);
            None
        }
    });
    drop(source);
    outcome.map(|()| bytes)
}
