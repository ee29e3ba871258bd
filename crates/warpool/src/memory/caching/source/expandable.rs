//! Expandable segments: one range of reserved addresses per stream and kind, with memory mapped chunk by chunk.
//!
//! Memory is mapped into the lowest hole first; releasing unmaps whole chunks of free blocks. A block is in transit
//! during its driver call, and is merged with neighbours that became free meanwhile when the call ends.

use std::collections::VecDeque;

use warpool_driver::{Access, DeviceAccess, DevicePtr, ErrorCode, PhysicalId, StreamId};

use super::{OrOom, segments};
use crate::Result;
use crate::memory::OomCause;
use crate::memory::caching::device::{CachingDevice, SlowGuard};
use crate::memory::caching::heap::{BlockKey, BlockRequest, Chunks, SegmentKey, Unmapped};
use crate::memory::caching::pending::PendingFrees;
use crate::memory::limit::share_of;
use crate::memory::report::EntryDetails;
use crate::memory::settings::Reserve;
use crate::memory::stream_fence;
use crate::unwind::OnUnwind;

/// Memory for a request in an expandable segment: in the lowest addresses with room, or in a new segment.
pub(super) fn allocate(
    slow: &SlowGuard<'_>,
    request: &BlockRequest,
    details: &EntryDetails,
) -> Result<OrOom<BlockKey>> {
    retry_failed_calls(slow);
    let room = match slow.change(|state| state.heap.take_room(request)) {
        Some(room) => room,
        None => {
            if !reserve(slow, request, details)? {
                return Ok(Err(OomCause::Device));
            }
            slow.change(|state| state.heap.take_room(request)).expect("a new segment has room")
        }
    };
    let (mut grown, mut next) = (Mapped { device: slow, block: room.mapped }, room.unmapped);
    loop {
        let size = grown.block.map_or(0, |block| slow.read(|state| state.heap.block(block).size()));
        if let Some(block) = grown.block.filter(|_| size >= request.size) {
            grown.block = None;
            return Ok(Ok(block));
        }
        let unmapped = slow.change(|state| next.and_then(|next| state.heap.take_unmapped(next, request.size - size)));
        let Some(unmapped) = unmapped else {
            // Another thread has allocated the free memory after it meanwhile.
            drop(grown);
            return allocate(slow, request, details);
        };
        let put_back = || slow.change(|state| state.heap.put_unmapped(unmapped.block));
        let unwinds = OnUnwind::new(put_back);
        let outcome = map(slow, &unmapped);
        unwinds.disarm();
        let handles = match outcome {
            Ok(Ok(handles)) => handles,
            Ok(Err(cause)) => {
                put_back();
                return Ok(Err(cause));
            }
            Err(error) => {
                put_back();
                return Err(error);
            }
        };
        let merged = grown.block.take();
        (grown.block, next) = slow.change(|state| {
            let block = state.set_mapped(&unmapped, merged, &handles, details);
            (Some(block), state.heap.block(block).next())
        });
    }
}

/// A mapped block in transit while memory is mapped after it. Dropping it makes the block free.
struct Mapped<'a> {
    device: &'a CachingDevice,
    block: Option<BlockKey>,
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        if let Some(block) = self.block {
            self.device.change(|state| {
                state.heap.merge_and_free(block);
            });
        }
    }
}

/// Reserves addresses for a new segment, all unmapped. Returns `false` if they would be too few.
fn reserve(slow: &SlowGuard<'_>, request: &BlockRequest, details: &EntryDetails) -> Result<bool> {
    let chunk = slow.read(|state| state.policy.sizes.chunk(request.kind)).next_multiple_of(slow.granularity);
    let bytes = bytes_to_reserve(slow, request.stream).max(1).checked_next_multiple_of(chunk);
    let Some(bytes) = bytes.filter(|&bytes| bytes >= request.size) else { return Ok(false) };
    let stream_raw = slow.stream_raw(request.stream)?;
    let base = match slow.driver().vm_reserve(bytes, 0, None) {
        Ok(base) => base,
        Err(error) if error.code == ErrorCode::OutOfMemory => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    slow.change(|state| state.add_expandable(request, stream_raw, (base, bytes), chunk, details));
    Ok(true)
}

/// How many bytes of addresses a segment of that stream reserves: from its class, from the setting, or 9/8 of the
/// device's memory, so that memory unmapped in the middle can be mapped again at the end.
fn bytes_to_reserve(slow: &SlowGuard<'_>, stream: StreamId) -> u64 {
    let all = slow.bytes_total.saturating_add(slow.bytes_total / 8);
    let settings = slow.settings();
    let of_class = slow.stream_classes.get(stream).and_then(|class| {
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

/// Chunks that are being mapped. If it is dropped early, a later call undoes the partial mapping.
struct Mapping<'a> {
    device: &'a CachingDevice,
    ptr: u64,
    mapped: u64,
    handles: Vec<PhysicalId>,
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        let (ptr, mapped, handles) = (DevicePtr(self.ptr), self.mapped, std::mem::take(&mut self.handles));
        if mapped > 0 || !handles.is_empty() {
            self.device.change(|state| {
                if mapped > 0 {
                    state.retries.unmaps.push_back((ptr, mapped));
                }
                state.retries.releases.extend(handles);
            });
        }
    }
}

/// Maps chunks, all or none.
fn map(slow: &SlowGuard<'_>, unmapped: &Unmapped) -> Result<OrOom<Vec<PhysicalId>>> {
    let Unmapped { ptr, bytes, chunk, .. } = *unmapped;
    let options = slow.physical_options();
    let mut mapping = Mapping { device: slow, ptr, mapped: 0, handles: Vec::new() };
    let outcome = (|| {
        for _ in 0..bytes / chunk {
            mapping.handles.push(slow.driver().vm_create(slow.id, chunk, options)?);
        }
        for at in 0..mapping.handles.len() {
            slow.driver().vm_map(DevicePtr(ptr + mapping.mapped), mapping.handles[at])?;
            mapping.mapped += chunk;
        }
        slow.driver().vm_set_access(DevicePtr(ptr), bytes, &access(slow))
    })();
    let Err(error) = outcome else {
        mapping.mapped = 0;
        return Ok(Ok(std::mem::take(&mut mapping.handles)));
    };
    if mapping.mapped > 0 {
        match slow.driver().vm_unmap(DevicePtr(ptr), mapping.mapped) {
            Ok(()) => mapping.mapped = 0,
            // Until a retry succeeds, the addresses cannot be mapped again and the segment cannot be removed.
            Err(error) => tracing::warn!(%error, "a mapping could not be undone; it is retried"),
        }
    }
    let handles = std::mem::take(&mut mapping.handles);
    drop(mapping);
    release_physical(slow, handles);
    if error.code == ErrorCode::OutOfMemory { Ok(Err(OomCause::Device)) } else { Err(error.into()) }
}

/// The access rights of mapped memory: the device itself and its peers.
fn access(slow: &SlowGuard<'_>) -> Vec<DeviceAccess> {
    let peers = slow.peers();
    let devices = std::iter::once(slow.id).chain(peers.iter().copied());
    devices.map(|device| DeviceAccess { device, access: Access::ReadWrite }).collect()
}

/// Releases the whole chunks inside a block, if it is still free. Waits for the work of its stream first, because
/// unmapping does not. Does nothing while a capture forbids waiting.
pub(super) fn release_chunks(slow: &SlowGuard<'_>, block: BlockKey, details: &EntryDetails) -> Result<u64> {
    let Some((chunks, stream)) = slow.change(|state| state.take_chunks(block)) else { return Ok(0) };
    let put_back = || {
        slow.change(|state| {
            state.heap.merge_and_free(block);
        });
    };
    let unwinds = OnUnwind::new(put_back);
    let unmapped = unmap(slow, &chunks, stream, details);
    unwinds.disarm();
    if !matches!(unmapped, Ok(true)) {
        put_back();
        return unmapped.map(|_| 0);
    }
    let segment = slow.change(|state| state.set_unmapped(block, &chunks, details));
    release_physical(slow, chunks.handles);
    release_addresses(slow, segment)?;
    Ok(chunks.bytes)
}

/// Unmaps chunks once the work that `stream` holds now is done. Returns `false` if a capture forbids waiting.
fn unmap(slow: &SlowGuard<'_>, chunks: &Chunks, stream: StreamId, details: &EntryDetails) -> Result<bool> {
    let waited = stream_fence::wait_for_stream(&PendingFrees::new(slow, details), stream)?;
    if waited {
        segments::announce_unmap(slow, DevicePtr(chunks.ptr), chunks.bytes);
        let unmapped = slow.capture_safe().and_then(|_safe| {
            slow.driver().vm_unmap(DevicePtr(chunks.ptr), chunks.bytes)?;
            Ok(())
        });
        if unmapped.is_err() {
            segments::take_back_unmap(slow, DevicePtr(chunks.ptr), chunks.bytes);
        }
        unmapped?;
    }
    Ok(waited)
}

/// Releases the addresses of a segment, if nothing in it is mapped. On failure the segment stays, unmapped, and is used
/// again. It also stays while the undo of a mapping in it is on the retry list.
#[expect(unsafe_code, reason = "the driver cannot check that no work uses the addresses")]
pub(super) fn release_addresses(slow: &SlowGuard<'_>, segment: SegmentKey) -> Result<()> {
    if slow.read(|state| !state.retries.unmaps.is_empty()) {
        retry_failed_calls(slow);
    }
    let Some((block, ptr, bytes)) = slow.change(|state| state.heap.take_unmapped_segment(segment)) else {
        return Ok(());
    };
    let put_back = || slow.change(|state| state.heap.put_unmapped(block));
    if slow.read(|state| state.retries.has_unmap_in(ptr, bytes)) {
        put_back();
        return Ok(());
    }
    let unwinds = OnUnwind::new(put_back);
    // SAFETY: a range is unmapped only once the streams that used it have passed.
    let outcome = unsafe { slow.driver().vm_free_range(ptr, bytes) };
    unwinds.disarm();
    match outcome {
        Ok(()) => slow.change(|state| drop(state.heap.remove_segment(block))),
        Err(_) => put_back(),
    }
    Ok(outcome?)
}

/// Releases physical memory. Failures are retried before memory is mapped again.
fn release_physical(slow: &SlowGuard<'_>, handles: Vec<PhysicalId>) {
    let (mut handles, mut failed) = (VecDeque::from(handles), Vec::new());
    while let Some(handle) = handles.pop_front() {
        let unwinds = OnUnwind::new(|| {
            let left = handles.iter().chain(&failed).copied().chain([handle]);
            slow.change(|state| state.retries.releases.extend(left));
        });
        let outcome = slow.driver().vm_release(handle);
        unwinds.disarm();
        if let Err(error) = outcome {
            tracing::warn!(%error, "physical memory could not be released; it is retried");
            failed.push(handle);
        }
    }
    if !failed.is_empty() {
        slow.change(|state| state.retries.releases.extend(failed));
    }
}

/// Retries unmaps and releases that failed.
pub(in crate::memory::caching) fn retry_failed_calls(slow: &SlowGuard<'_>) {
    // Each entry of the list is tried once: one that fails again goes to its end.
    for _ in 0..slow.read(|state| state.retries.unmaps.len()) {
        let Some((ptr, bytes)) = slow.change(|state| state.retries.unmaps.pop_front()) else { break };
        let put_back = || slow.change(|state| state.retries.unmaps.push_back((ptr, bytes)));
        let unwinds = OnUnwind::new(put_back);
        let outcome = slow.driver().vm_unmap(ptr, bytes);
        unwinds.disarm();
        if let Err(error) = outcome {
            tracing::warn!(%error, %ptr, "a mapping still could not be undone");
            put_back();
        }
    }
    release_physical(slow, slow.change(|state| std::mem::take(&mut state.retries.releases)));
}
