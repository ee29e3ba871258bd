//! Expandable segments: one range of reserved addresses per stream and kind, with memory mapped chunk by chunk.
//!
//! Growing prefers the lowest hole; shrinking unmaps the whole chunks of free blocks. Blocks that a driver call works
//! on are in transit: neighbours that become free meanwhile are merged at the end.

use warpool_driver::{Access, DeviceAccess, DevicePtr, ErrorCode, PhysicalId, PhysicalOptions, StreamId};

use super::OrOom;
use crate::Result;
use crate::memory::OomCause;
use crate::memory::caching::device::SlowGuard;
use crate::memory::caching::heap::{BlockKey, BlockRequest, Chunks, SegmentKey, Unmapped};
use crate::memory::caching::pending::PendingFrees;
use crate::memory::caching::state::DeviceState;
use crate::memory::limit::share_of;
use crate::memory::report::EntryDetails;
use crate::memory::settings::Reserve;
use crate::memory::stream_fence;

/// Memory for a request in an expandable segment: in the lowest addresses with room, or in a new segment.
pub(super) fn allocate(
    slow: &SlowGuard<'_>,
    request: &BlockRequest,
    details: &EntryDetails,
) -> Result<OrOom<BlockKey>> {
    retry_failed_calls(slow);
    let room = match slow.with(|state| state.take_room(request)) {
        Some(room) => room,
        None => {
            if !reserve(slow, request, details)? {
                return Ok(Err(OomCause::Device));
            }
            slow.with(|state| state.take_room(request)).expect("a new segment has room")
        }
    };
    let (mut grown, mut next) = (room.mapped, room.unmapped);
    loop {
        let size = grown.map_or(0, |block| slow.read(|state| state.heap().block(block).size()));
        if let Some(block) = grown.filter(|_| size >= request.size) {
            return Ok(Ok(block));
        }
        let unmapped = slow.with(|state| next.and_then(|next| state.take_unmapped(next, request.size - size)));
        let Some(unmapped) = unmapped else {
            // What was free behind is allocated by now.
            abandon(slow, grown);
            return allocate(slow, request, details);
        };
        match map(slow, &unmapped) {
            Ok(Ok(handles)) => {
                (grown, next) = slow.with(|state| {
                    let block = state.set_mapped(&unmapped, grown, &handles, details);
                    (Some(block), state.heap().block(block).next())
                });
            }
            failed => {
                slow.with(|state| state.put_unmapped(unmapped.block));
                abandon(slow, grown);
                return failed.map(|oom| oom.map(|_| unreachable!("it failed")));
            }
        }
    }
}

/// Makes what was mapped so far free.
fn abandon(slow: &SlowGuard<'_>, grown: Option<BlockKey>) {
    if let Some(block) = grown {
        slow.with(|state| state.put_mapped(block));
    }
}

/// Reserves addresses for a new segment, all unmapped. Returns `false` if they would not suffice.
fn reserve(slow: &SlowGuard<'_>, request: &BlockRequest, details: &EntryDetails) -> Result<bool> {
    let chunk = slow.read(|state| state.policy().sizes.chunk(request.kind)).next_multiple_of(slow.granularity);
    let bytes = bytes_to_reserve(slow, request.stream).max(1).next_multiple_of(chunk);
    if bytes < request.size {
        return Ok(false);
    }
    let stream_raw = slow.stream_raw(request.stream)?;
    let base = match slow.driver().vm_reserve(bytes, 0, None) {
        Ok(base) => base,
        Err(error) if error.code == ErrorCode::OutOfMemory => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    slow.with(|state| state.add_expandable(request, stream_raw, (base, bytes), chunk, details));
    Ok(true)
}

/// How many bytes of addresses a segment of that stream reserves: by its class, by the setting, or 9/8 of the device,
/// so that what is unmapped in the middle can be mapped again at the end.
fn bytes_to_reserve(slow: &SlowGuard<'_>, stream: StreamId) -> u64 {
    let all = slow.bytes_total.saturating_add(slow.bytes_total / 8);
    let settings = slow.shared().settings();
    let of_class = slow.shared().stream_class(stream).and_then(|class| {
        let reserve = settings.expandable_segments_reserve_by_class.get(&class).copied();
        if reserve.is_none() {
            tracing::warn!(
                %stream,
                class,
                "expandable_segments_reserve_by_class does not name this class; the default is used"
            );
        }
        reserve
    });
    match of_class.or(settings.expandable_segments_reserve) {
        None => all,
        Some(Reserve::Bytes(bytes)) => bytes.min(all),
        Some(Reserve::Fraction(fraction)) => share_of(slow.bytes_total, fraction).min(all),
    }
}

/// Maps chunks, all or none.
fn map(slow: &SlowGuard<'_>, unmapped: &Unmapped) -> Result<OrOom<Vec<PhysicalId>>> {
    let Unmapped { ptr, bytes, chunk, .. } = *unmapped;
    let options = PhysicalOptions { share: None, rdma: slow.rdma };
    let mut handles = Vec::new();
    let mut mapped = 0;
    let outcome = (|| {
        for _ in 0..bytes / chunk {
            handles.push(slow.driver().vm_create(slow.id, chunk, options)?);
        }
        for &handle in &handles {
            slow.driver().vm_map(DevicePtr(ptr + mapped), handle)?;
            mapped += chunk;
        }
        slow.driver().vm_set_access(DevicePtr(ptr), bytes, &access(slow))
    })();
    let Err(error) = outcome else { return Ok(Ok(handles)) };
    if mapped > 0
        && let Err(error) = slow.driver().vm_unmap(DevicePtr(ptr), mapped)
    {
        // Until that works the addresses cannot be mapped again, and the segment cannot be removed.
        tracing::warn!(%error, "a mapping could not be undone; it is retried");
        slow.with(|state| state.retry_unmap(DevicePtr(ptr), mapped));
    }
    release_physical(slow, handles);
    if error.code == ErrorCode::OutOfMemory { Ok(Err(OomCause::Device)) } else { Err(error.into()) }
}

/// The access rights of mapped memory: the device itself and its peers.
fn access(slow: &SlowGuard<'_>) -> Vec<DeviceAccess> {
    let peers = slow.peers();
    let devices = std::iter::once(slow.id).chain(peers.iter().copied());
    devices.map(|device| DeviceAccess { device, access: Access::ReadWrite }).collect()
}

/// Releases the whole chunks inside a free block, if it still is one, once the work of its stream is done: unmapping
/// does not wait for it. Nothing while a capture forbids to wait.
pub(super) fn release_chunks(slow: &SlowGuard<'_>, block: BlockKey, details: &EntryDetails) -> Result<u64> {
    let Some((chunks, stream)) = slow.with(|state| state.take_chunks(block)) else { return Ok(0) };
    let unmapped = unmap(slow, &chunks, stream, details);
    if !matches!(unmapped, Ok(true)) {
        slow.with(|state| state.put_mapped(block));
        return unmapped.map(|_| 0);
    }
    let segment = slow.with(|state| state.set_unmapped(block, &chunks, details));
    release_physical(slow, chunks.handles);
    release_addresses(slow, segment)?;
    Ok(chunks.bytes)
}

/// Unmaps chunks once the work that `stream` holds now is done. Returns `false` if a capture forbids to wait for it.
fn unmap(slow: &SlowGuard<'_>, chunks: &Chunks, stream: StreamId, details: &EntryDetails) -> Result<bool> {
    let waited = stream_fence::wait_for_stream(&PendingFrees::new(slow, details), stream)?;
    if waited {
        let _safe = slow.capture_safe()?;
        slow.driver().vm_unmap(DevicePtr(chunks.ptr), chunks.bytes)?;
    }
    Ok(waited)
}

/// Releases the addresses of a segment, if nothing of it is mapped. On failure it stays, unmapped, and is used again.
#[expect(unsafe_code, reason = "the driver cannot check that no work uses the addresses")]
pub(super) fn release_addresses(slow: &SlowGuard<'_>, segment: SegmentKey) -> Result<()> {
    let Some((block, ptr, bytes)) = slow.with(|state| state.take_unmapped_segment(segment)) else { return Ok(()) };
    // SAFETY: a range is unmapped only once the streams that used it have passed.
    let outcome = unsafe { slow.driver().vm_free_range(ptr, bytes) };
    slow.with(|state| match outcome {
        Ok(()) => state.remove_unmapped_segment(block),
        Err(_) => state.put_unmapped(block),
    });
    Ok(outcome?)
}

/// Releases physical memory. What fails is retried before the next growth.
fn release_physical(slow: &SlowGuard<'_>, handles: Vec<PhysicalId>) {
    let fails = |&handle: &PhysicalId| {
        let outcome = slow.driver().vm_release(handle);
        if let Err(error) = &outcome {
            tracing::warn!(%error, "physical memory could not be released; it is retried");
        }
        outcome.is_err()
    };
    let failed: Vec<PhysicalId> = handles.into_iter().filter(fails).collect();
    if !failed.is_empty() {
        slow.with(|state| state.retry_releases(failed));
    }
}

/// Retries what could not be unmapped or released.
pub(in crate::memory::caching) fn retry_failed_calls(slow: &SlowGuard<'_>) {
    let (unmaps, releases) = slow.with(DeviceState::take_retries);
    for (ptr, bytes) in unmaps {
        if let Err(error) = slow.driver().vm_unmap(ptr, bytes) {
            tracing::warn!(%error, %ptr, "a mapping still could not be undone");
            slow.with(|state| state.retry_unmap(ptr, bytes));
        }
    }
    release_physical(slow, releases);
}
