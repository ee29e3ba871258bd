//! Heaps of streams that may have gone, which a new stream gets as they are: with free memory that is still mapped.
//!
//! A stream in whose heap nothing is allocated may be destroyed, and often is. Without this the next stream would get
//! empty addresses and take pages of other streams, and would have to wait for all work of those streams.
//!
//! A heap is adopted only if all work is done that may use its memory: that of its own stream, and what bystanders
//! (`bystanders.rs`) had submitted when it was seen to be unused. So the new stream does not wait.
//!
//! Which streams have gone cannot be asked. The heap that was not used for longest is adopted, by a stream that is new.
//! If its stream comes back after that, it gets a heap that is not adopted again: so streams that live on, and free all
//! memory from time to time, do not take heaps from each other for ever.

use std::sync::Arc;

use warpool_driver::StreamId;

use super::device::PagedDevice;
use super::ids::HeapId;
use super::last_work::{LastWork, Owner};
use super::old_mappings::bystander_events;
use super::pages::PageTable;
use super::used_heaps::look_at_used;
use crate::defect::Defect;
use crate::memory::report::EntryDetails;
use crate::memory::{Action, StackLevel};
use crate::{PooledEvent, Result};

/// How many heaps are added before a heap that was not used meanwhile is adopted.
const NEW_HEAPS: u64 = 1;

/// Makes an unused heap of the default pool the heap of `owner`, a new stream. Returns its number, and the stream that
/// it had before.
pub(super) fn adopt(device: &PagedDevice, table: &mut PageTable, owner: Owner) -> Result<Option<(HeapId, StreamId)>> {
    let details = device.entry_details(StackLevel::All);
    look_at_used(device, table);
    if table.unused_heaps.heaps.iter().any(|heap| heap.bystanders.is_none()) {
        let events = bystander_events(device, table, &[], &details).into_iter().map(|(_, event)| event);
        let events: Arc<[_]> = events.collect();
        for heap in table.unused_heaps.heaps.iter_mut().filter(|heap| heap.bystanders.is_none()) {
            heap.bystanders = Some(Arc::clone(&events));
        }
    }
    while let Some(first) = table.unused_heaps.heaps.front() {
        if first.added + NEW_HEAPS > table.unused_heaps.added {
            break;
        }
        let (number, ends) = (first.number, first.ends);
        let mut events: Vec<_> = first.bystanders.iter().flat_map(|events| events.iter().cloned()).collect();
        let last_work = {
            let heap = device.heaps.get(number).lock();
            heap.last_work().filter(|_| heap.ends() == ends && heap.pool.is_default()).cloned()
        };
        match last_work {
            Some(LastWork::Done) => {}
            Some(LastWork::Before(event)) => events.push(event),
            // Used again, retired, or with work that only the device can be waited for.
            Some(LastWork::Unknown) | None => {
                table.unused_heaps.heaps.pop_front();
                continue;
            }
        }
        if !are_done(device, &events)? {
            // Later ones are not done either.
            break;
        }
        table.unused_heaps.heaps.pop_front();
        if let Some(before) = change_owner(device, table, (number, ends), owner, &details) {
            return Ok(Some((number, before)));
        }
    }
    Ok(None)
}

fn are_done(device: &PagedDevice, events: &[Arc<PooledEvent>]) -> Result<bool> {
    let _safe = device.capture_safe()?;
    for event in events {
        if !device.driver().event_query(event.id())? && !Defect::ReusesBusyHeaps.is_on() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// `None` if the heap was used since.
fn change_owner(
    device: &PagedDevice,
    table: &mut PageTable,
    (number, ends): (HeapId, u64),
    owner: Owner,
    details: &EntryDetails,
) -> Option<StreamId> {
    let mut heap = device.heaps.get(number).lock();
    if heap.ends() != ends || heap.last_work().is_none() || !heap.pool.is_default() || !heap.is_idle() {
        return None;
    }
    let before = heap.stream;
    let pages = if details.is_off() { Vec::new() } else { table.mappings_of(number) };
    let pages: Vec<_> = pages.into_iter().filter(|&(.., is_home)| is_home).collect();
    // In a recording, memory that is mapped belongs to one stream.
    let record = |action, heap: &_| {
        for &(page, slot, _) in &pages {
            device.record(action, table.addr(slot), table.page_bytes(page), heap, details);
        }
    };
    record(Action::SegmentUnmap, &heap);
    heap.set_owner(owner);
    record(Action::SegmentMap, &heap);
    drop(heap);
    table.bystanders.heap_retired(number);
    Some(before)
}
