//! Pools whose memory is not made of pages: those with an upstream, and those whose blocks are whole segments
//! (`no_split`), which the driver allocates in one piece.
//!
//! A segment is a range of a heap that is backed as a whole: nothing of it is ever taken or remapped. It returns to its
//! source as a whole, when its pool is released and memory is trimmed or needed. Sources are called without any lock: a
//! segment that is being freed is in no list, and is put back if that fails or panics.

use std::cell::Cell;

use warpool_driver::{DevicePtr, StreamId};

use super::address_space::Location;
use super::device::PagedDevice;
use super::heap::{kind_of, rounded};
use super::ids::HeapId;
use super::pending::PendingFrees;
use super::pools::Takeable;
use crate::memory::report::{EntryDetails, RangeEvent};
use crate::memory::segment_source::OrOom;
use crate::memory::stream_fence;
use crate::memory::{Action, Allocation, MemPoolId, Request, SegmentKind, SizeRules};
use crate::unwind::OnUnwind;
use crate::{Error, Result, lock};

/// Allocates a segment for a request, and from it the block. Returns the number of the block.
pub(super) fn allocate(
    device: &PagedDevice,
    request: &Request,
    pool: MemPoolId,
    number: HeapId,
    details: &EntryDetails,
) -> Result<OrOom<Allocation>> {
    let Some((source, no_split)) = lock(&device.pools).segment_source(pool) else {
        return Err(Error::PoolReleased { pool });
    };
    let size = rounded(request.bytes);
    let (kind, bytes) = (kind_of(size), source.rounded(SizeRules::new(&device.settings()).segment(size)));
    {
        let mut table = lock(&device.pages);
        if let Err(cause) = device.admit(&table, bytes) {
            return Ok(Err(cause));
        }
        table.begin_call(bytes);
    }
    let ptr = {
        let end = || lock(&device.pages).end_call(bytes);
        let unwinds = OnUnwind::new(end);
        let ptr = source.allocate(device, bytes, request.stream);
        unwinds.disarm();
        end();
        match ptr? {
            Ok(ptr) => ptr,
            Err(why) => return Ok(Err(why)),
        }
    };
    if source.is_untrusted() {
        device.space.check_untrusted(ptr, bytes)?;
    }
    let location = |range| Location { heap: number, kind, range };
    let added = {
        let mut table = lock(&device.pages);
        let mut heap = device.heaps.get(number).lock();
        if heap.is_of(request.stream, pool) {
            table.set_pool(number, pool);
            let on_device = table.add_segment(ptr.0, bytes, number, kind, source.clone());
            let (range, block) = heap.add_segment(kind, on_device, ptr.0, bytes, request.bytes, no_split);
            device.record(Action::SegmentAlloc, ptr.0, bytes, &heap, details);
            let allocation = device.finish(&mut heap, number, block, details);
            drop(heap);
            device.space.add_segment(ptr.0, bytes, location(range));
            Some(allocation)
        } else {
            None
        }
    };
    match added {
        Some(allocation) => Ok(Ok(allocation)),
        None => {
            // The pool was removed meanwhile.
            source.free(device, ptr, bytes, request.stream)?;
            Err(Error::PoolReleased { pool })
        }
    }
}

/// Returns free segments of a released pool, or for the default pool those of all released ones, to their sources.
/// Returns how many bytes. To be called without any lock.
pub(super) fn release(device: &PagedDevice, pool: MemPoolId, target: u64, details: &EntryDetails) -> Result<u64> {
    let (mut released, mut outcome) = (0, Ok(()));
    let heaps = lock(&device.pages).heaps_with_segments();
    for number in heaps {
        let (stream, of_pool) = {
            let heap = device.heaps.get(number).lock();
            (heap.stream, heap.pool)
        };
        if !pool.is_default() && of_pool != pool {
            continue;
        }
        let (takeable, is_awake) = {
            let pools = lock(&device.pools);
            (pools.takeable(of_pool), pools.sleeping.expect_awake(of_pool).is_ok())
        };
        let Takeable::After(users) = takeable else { continue };
        for kind in [SegmentKind::Small, SegmentKind::Large] {
            let free = device.heaps.get(number).lock().free_segments(kind);
            for range in free {
                // What sleeps is not reserved; its addresses and its contents on the host go.
                if is_awake && lock(&device.pages).bytes_awake() <= target {
                    break;
                }
                match release_segment(device, Location { heap: number, kind, range }, (stream, &users), details) {
                    Ok(bytes) => released += bytes,
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
        }
    }
    device.retire_empty();
    device.drop_removed();
    outcome.map(|()| released)
}

/// Returns a segment to its source, if it is still free as a whole and no capture forbids to wait for its users.
pub(super) fn release_segment(
    device: &PagedDevice,
    at: Location,
    (stream, users): (StreamId, &[StreamId]),
    details: &EntryDetails,
) -> Result<u64> {
    let cell = device.heaps.get(at.heap);
    let Some((on_device, base, bytes)) = cell.lock().take_segment(at.kind, at.range) else { return Ok(0) };
    let is_returning = Cell::new(false);
    let put_back = || {
        cell.lock().put_segment_back(at.kind, at.range);
        if is_returning.get() {
            lock(&device.pages).end_return(bytes);
        }
    };
    let unwinds = OnUnwind::new(put_back);
    let source = lock(&device.pages).segment_source(on_device);
    let outcome = wait_for(device, users, details).and_then(|waited| {
        if !waited {
            return Ok(false);
        }
        // Before other processes are told: an observer may take long, and the memory is not free meanwhile.
        let tell = |event| device.observers().range_changes(device.id, event, DevicePtr(base), bytes);
        tell(RangeEvent::Unmapping);
        {
            let mut table = lock(&device.pages);
            table.begin_return(bytes);
            is_returning.set(true);
            device.will_hold(table.bytes_held());
        }
        let freed = source.free(device, DevicePtr(base), bytes, stream);
        if freed.is_err() {
            tell(RangeEvent::Mapped);
        }
        freed.map(|()| true)
    });
    unwinds.disarm();
    if !matches!(outcome, Ok(true)) {
        put_back();
        return outcome.map(|_| 0);
    }
    let mut table = lock(&device.pages);
    device.space.remove_segment(base);
    let mut heap = cell.lock();
    heap.remove_segment(at.kind, at.range);
    device.record(Action::SegmentFree, base, bytes, &heap, details);
    drop(heap);
    let removed = table.remove_segment(on_device);
    table.end_return(bytes);
    drop(table);
    device.drop_later(removed);
    Ok(bytes)
}

/// Waits for the work of streams that use a pool's memory beside those that it was allocated for; the source waits for
/// the others. `false` if a capture forbids it.
fn wait_for(device: &PagedDevice, users: &[StreamId], details: &EntryDetails) -> Result<bool> {
    for &user in users {
        if !stream_fence::wait_for_stream(&PendingFrees::new(device, details), user)? {
            return Ok(false);
        }
    }
    Ok(true)
}
