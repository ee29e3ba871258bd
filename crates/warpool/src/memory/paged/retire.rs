//! Heaps that were not used for long.
//!
//! A heap in which nothing is allocated and whose work is done is *retired*: its pages belong to no stream any more,
//! and its addresses serve the next stream that needs a heap. So streams that come and go leave nothing that has to be
//! visited, and no more addresses than were in use at the same time.

use warpool_driver::StreamId;

use super::device::PagedDevice;
use super::ids::HeapId;
use super::last_work::LastWork;
use super::pages::PageTable;
use super::reclaim;
use crate::Result;
use crate::memory::report::EntryDetails;

/// How many heaps a request looks at that were not used for long.
const HEAPS_PER_REQUEST: usize = 16;

/// Retires some of the heaps that were not used for long, but for one.
pub(super) fn retire_unused(
    device: &PagedDevice,
    table: &mut PageTable,
    except: HeapId,
    details: &EntryDetails,
) -> Result<()> {
    for _ in 0..HEAPS_PER_REQUEST {
        let Some(number) = table.pop_unused() else { break };
        let (stream, last_work) = {
            let heap = device.heaps.get(number).lock();
            if !heap.pool.is_default() || !heap.has_no_live() {
                // Its next allocation or free lists it again.
                continue;
            }
            (heap.stream, heap.last_work().cloned())
        };
        if number == except || !is_done(device, stream, last_work)? {
            table.note_used(number);
            continue;
        }
        reclaim::retire_idle(device, table, number, details);
    }
    Ok(())
}

/// Whether the last work in the memory of a heap is done. `last_work` is what is known of it, if the stream may be
/// destroyed.
fn is_done(device: &PagedDevice, stream: StreamId, last_work: Option<LastWork>) -> Result<bool> {
    match last_work {
        Some(LastWork::Done) => Ok(true),
        Some(LastWork::Before(event)) => {
            let _safe = device.capture_safe()?;
            Ok(device.driver().event_query(event.id())? || crate::defect::Defect::ReusesBusyHeaps.is_on())
        }
        Some(LastWork::Unknown) => Ok(false),
        // A stream that captures must not be asked.
        None if device.has_captures() => Ok(false),
        None => match device.instance().hold_off_captures() {
            Some(_held_off) => Ok(device.driver().stream_query(stream)?),
            None => Ok(false),
        },
    }
}
