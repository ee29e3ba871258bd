//! Whose heap is which: the heap of a stream and pool is found, added, retired, and given to the next stream.
//!
//! A stream in whose heap nothing is allocated may be destroyed, and often is; which have been cannot be asked. A heap
//! that was not used for long, and whose work is done, is *retired*: it is nobody's from then on, and others take its
//! pages without an event of its stream. The next stream that needs a heap gets it, so streams that come and go leave
//! nothing that has to be visited, and no more addresses than were in use at the same time.
//!
//! A new stream gets a retired heap with its memory, as it is mapped, so that it need not take pages of other streams
//! and wait for their work. So when one comes, a heap is retired at once that was used before the last request for
//! pages. The work that bystanders had submitted when it was retired must also be done: the new stream waits for
//! nobody. If the stream of a retired heap comes back, its next heap is not retired so early: streams that live on, and
//! free all memory from time to time, do not take heaps from each other for ever.

use std::sync::{Arc, PoisonError};

use warpool_driver::StreamId;

use super::device::PagedDevice;
use super::heap::{Heap, LastWork, Owner};
use super::ids::HeapId;
use super::pages::PageTable;
use super::pools::SegmentSource;
use super::reclaim;
use crate::defect::Defect;
use crate::memory::report::EntryDetails;
use crate::memory::{Action, MemPoolId, StackLevel};
use crate::sync::spin_lock::SpinLock;
use crate::{Error, PooledEvent, Result, lock};

/// How many heaps a request looks at that were not used for long.
const HEAPS_PER_REQUEST: usize = 16;

/// How many heaps without an owner wait for bystanders before one of them is used without its memory.
const RETIRED_MAX: usize = 32;

impl PagedDevice {
    /// The heap of a stream and pool. No lock if it is the one that the thread used last.
    #[inline]
    pub(super) fn heap_for(&self, stream: StreamId, pool: MemPoolId) -> Result<(HeapId, &SpinLock<Heap>)> {
        match self.key.last_of(&self.heaps, stream, pool) {
            Some(last) => Ok(last),
            None => self.find_heap(stream, pool),
        }
    }

    #[cold]
    fn find_heap(&self, stream: StreamId, pool: MemPoolId) -> Result<(HeapId, &SpinLock<Heap>)> {
        let heap = match self.existing_heap(stream, pool) {
            Some(heap) => heap,
            None => self.add_heap(stream, pool)?,
        };
        self.switch_to(heap, stream, pool);
        Ok((heap, self.heaps.get(heap)))
    }

    /// The heap of a stream and pool, if there is one.
    pub(super) fn existing_heap(&self, stream: StreamId, pool: MemPoolId) -> Option<HeapId> {
        self.by_key.read().unwrap_or_else(PoisonError::into_inner).get(&(stream, pool)).copied()
    }

    fn add_heap(&self, stream: StreamId, pool: MemPoolId) -> Result<HeapId> {
        let handle = self.driver().stream_handle(stream)?;
        if handle.device != self.id {
            return Err(Error::StreamDevice { device: self.id, stream, owner: handle.device });
        }
        let is_kept = self.instance().keeps_stream(self.id, stream)?;
        // Before the keys: heaps change their owners while the pages are locked.
        let mut table = lock(&self.pages);
        if let Some(heap) = self.existing_heap(stream, pool) {
            return Ok(heap);
        }
        lock(&self.pools).expect_in_use(pool)?;
        let is_first = pool.is_default() && table.note_stream(stream);
        let owner = Owner { stream, stream_raw: handle.raw.0, pool, is_kept, is_first };
        let heap = match self.reuse_heap(&mut table, owner)? {
            Some(heap) => heap,
            None => self.heaps.push(Heap::new(owner, HeapId(self.heaps.len()), Arc::clone(&self.activity))),
        };
        let added = lock(&self.pools).add_heap(pool, heap);
        if let Err(error) = added {
            // Another thread has released the pool meanwhile.
            self.heaps.get(heap).lock().set_no_owner();
            table.retired.push_back((heap, None));
            return Err(error);
        }
        self.by_key.write().unwrap_or_else(PoisonError::into_inner).insert((stream, pool), heap);
        Ok(heap)
    }

    /// Makes a retired heap that of `owner`.
    fn reuse_heap(&self, table: &mut PageTable, owner: Owner) -> Result<Option<HeapId>> {
        let details = self.entry_details(StackLevel::All);
        if owner.is_first && !table.retired_are_emptied {
            self.look_at_used(table);
            self.retire_unused(table, None)?;
            if self.first_retired_is_done(table, &details)?
                || self.retire_one(table)? && self.first_retired_is_done(table, &details)?
            {
                let heap = table.retired.pop_front().map(|(heap, _)| heap);
                heap.into_iter().for_each(|heap| self.change_owner(table, heap, owner, &details));
                return Ok(heap);
            }
            if table.retired.len() < RETIRED_MAX {
                return Ok(None);
            }
        }
        let Some((heap, _)) = table.retired.pop_back() else { return Ok(None) };
        reclaim::make_pages_spare(self, table, heap, &details);
        self.heaps.get(heap).lock().set_owner(owner);
        Ok(Some(heap))
    }

    /// Whether bystanders have done what they had submitted when the first retired heap was retired.
    fn first_retired_is_done(&self, table: &mut PageTable, details: &EntryDetails) -> Result<bool> {
        if table.retired.iter().any(|(_, bystanders)| bystanders.is_none()) {
            let events = self.bystander_events(table, &[], details).into_iter().map(|(_, event)| event);
            let events: Arc<[_]> = events.collect();
            for (_, bystanders) in &mut table.retired {
                bystanders.get_or_insert_with(|| Arc::clone(&events));
            }
        }
        match table.retired.front() {
            Some((_, Some(bystanders))) => self.are_over(bystanders),
            _ => Ok(false),
        }
    }

    /// Forgets events of bystanders that have passed, which would keep the driver's.
    pub(super) fn forget_passed(&self, table: &mut PageTable) -> Result<()> {
        for events in table.retired.iter_mut().filter_map(|(_, bystanders)| bystanders.as_mut()) {
            if self.are_over(events)? {
                *events = Arc::default();
            }
        }
        Ok(())
    }

    /// Changes the owner of a heap that keeps its memory.
    fn change_owner(&self, table: &PageTable, number: HeapId, owner: Owner, details: &EntryDetails) {
        let mut heap = self.heaps.get(number).lock();
        let pages = if details.is_off() { Vec::new() } else { table.mappings_of(number) };
        let pages: Vec<_> = pages.into_iter().filter(|&(.., is_home)| is_home).collect();
        // In a recording, memory that is mapped belongs to one stream.
        let record = |action, heap: &_| {
            for &(page, slot, _) in &pages {
                self.record(action, table.addr(slot), table.page_bytes(page), heap, details);
            }
        };
        record(Action::SegmentUnmap, &heap);
        heap.set_owner(owner);
        record(Action::SegmentMap, &heap);
    }

    /// Retires the heap that was not used for longest, of the streams that may have gone. `false` if there is none
    /// whose work is done.
    fn retire_one(&self, table: &mut PageTable) -> Result<bool> {
        let unused = table.unused_heaps().find_map(|number| {
            let heap = self.heaps.get(number).lock();
            let last_work = heap.last_work().filter(|_| heap.is_first() && heap.pool.is_default());
            last_work.filter(|last| !matches!(last, LastWork::Unknown)).map(|last| (number, heap.stream, last.clone()))
        });
        let Some((number, stream, last_work)) = unused else { return Ok(false) };
        Ok(self.is_done(stream, Some(last_work))? && self.retire_heap(table, number, true))
    }

    /// Retires some of the heaps of the default pool that were not used for long, but for one.
    pub(super) fn retire_unused(&self, table: &mut PageTable, except: Option<HeapId>) -> Result<()> {
        for _ in 0..HEAPS_PER_REQUEST {
            let Some(number) = table.pop_unused() else { break };
            let (stream, last_work) = {
                let heap = self.heaps.get(number).lock();
                if !heap.has_owner() || !heap.pool.is_default() || !heap.has_no_live() {
                    // Its next allocation or free lists it again.
                    continue;
                }
                (heap.stream, heap.last_work().cloned())
            };
            if Some(number) == except || !self.is_done(stream, last_work)? || !self.retire_heap(table, number, true) {
                table.note_used(number);
            }
        }
        Ok(())
    }

    /// Whether the last work in the memory of a heap is done. `last_work` is what is known of it, if the stream may be
    /// destroyed.
    fn is_done(&self, stream: StreamId, last_work: Option<LastWork>) -> Result<bool> {
        match last_work {
            Some(LastWork::Done) => Ok(true),
            Some(LastWork::Before(event)) => self.is_over(&event),
            Some(LastWork::Unknown) => Ok(false),
            // A stream that captures must not be asked.
            None if self.has_captures() => Ok(false),
            None => match self.instance().hold_off_captures() {
                Some(_held_off) => Ok(self.driver().stream_query(stream)?),
                None => Ok(false),
            },
        }
    }

    fn are_over(&self, events: &[Arc<PooledEvent>]) -> Result<bool> {
        for event in events {
            if !self.is_over(event)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_over(&self, event: &PooledEvent) -> Result<bool> {
        Ok(self.has_passed(event)? || Defect::ReusesBusyHeaps.is_on())
    }

    /// Retires a heap, all work in which is done. `false` if something is allocated in it; or also if it was used since
    /// it was last looked at, with work that may not be done.
    pub(super) fn retire_heap(&self, table: &mut PageTable, number: HeapId, if_unused: bool) -> bool {
        let pool = {
            let mut keys = self.by_key.write().unwrap_or_else(PoisonError::into_inner);
            let mut heap = self.heaps.get(number).lock();
            if !heap.is_idle() || if_unused && heap.is_listed() {
                return false;
            }
            let pool = heap.pool;
            keys.remove(&(heap.stream, pool));
            heap.set_no_owner();
            pool
        };
        table.retired.push_back((number, None));
        table.bystanders.heap_retired(number);
        table.note_changed(number);
        let removed = lock(&self.pools).remove_heap(pool, number);
        if let Some(removed) = removed {
            self.drop_later(removed.options.upstream.map(SegmentSource::Upstream));
        }
        true
    }

    /// Removes released pools that have nothing left.
    pub(super) fn retire_empty(&self) {
        if !lock(&self.pools).has_released() {
            return;
        }
        let mut table = lock(&self.pages);
        let released = lock(&self.pools).released_heaps();
        for heap in released.into_iter().flat_map(|(_, heaps)| heaps) {
            if table.is_unmapped(heap) {
                self.retire_heap(&mut table, heap, false);
            }
        }
    }

    /// Looks at the heaps that were used, or whose pages changed, since the last time: what is free in them, and who
    /// may be busy.
    pub(super) fn look_at_used(&self, table: &mut PageTable) {
        let used = self.activity.take();
        for &number in &used {
            let mut heap = self.heaps.get(number).lock();
            heap.unlist();
            if heap.has_owner() {
                table.bystanders.note(heap.stream, number);
                table.note_used(number);
            }
        }
        for number in used.into_iter().chain(table.take_changed()) {
            let mut heap = self.heaps.get(number).lock();
            heap.merge_recent();
            table.look_at(number, &heap);
        }
    }
}
