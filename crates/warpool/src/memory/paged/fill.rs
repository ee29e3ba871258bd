//! Getting pages for a request that no free block can hold.
//!
//! Under the lock of the pages:
//! 1. A window of free addresses is chosen (`window.rs`) and taken out of the heap's lists.
//! 2. Pages that were in it before and are free elsewhere in this heap are taken back: no driver call. If this heap has
//!    not enough, a window is chosen anew for which those that are free in other heaps count too.
//! 3. Further pages come, in this order, from: those that belong nowhere; free blocks of this heap, the smallest first;
//!    free blocks of other heaps, behind an event of their stream; the driver. Other heaps come before this one if one
//!    of them has more free memory.
//! 4. They are mapped. Where they were before, they stay mapped for a while (`pages.rs`).
//!
//! If there are not enough, all go back to where they were. If a mapping fails midway, what was mapped so far becomes
//! free blocks, and the rest of the window holes.

use std::cell::OnceCell;

use warpool_driver::{Access, DeviceAccess, DevicePtr, ErrorCode, EventScope, PhysicalOptions, StreamId};

use super::address_space::Location;
use super::device::PagedDevice;
use super::heap::{Heap, kind_of, rounded};
use super::old_mappings;
use super::page_set::PageSet;
use super::page_sizes::PageSizes;
use super::pages::{Mapping, PageId, PageTable, Slot};
use super::pending::PendingFrees;
use super::physical::release_physical;
use super::pools::Takeable;
use super::reclaim;
use super::spin_lock::SpinLock;
use super::supply::{Supplied, Supply};
use super::window::{self, Window};
use crate::memory::limit::share_of;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Recorded};
use crate::memory::{Action, MemPoolId, OomCause, SegmentKind};
use crate::{Error, Result, lock};

/// Out of memory is an answer, not an error of the call.
pub(super) type OrOom<T> = std::result::Result<T, OomCause>;

/// A request that needs pages.
#[derive(Clone, Copy)]
pub(super) struct FillRequest {
    pub(super) heap: u32,
    pub(super) requested: u64,
    pub(super) stream: StreamId,
    pub(super) pool: MemPoolId,
    /// Whether the stream captures: its work runs later, so other heaps' pages cannot be ordered before it.
    pub(super) capturing: bool,
    /// Whether the request would run out of memory otherwise.
    pub(super) on_oom: bool,
}

/// Allocates, with further pages if need be. Returns the number of the block.
pub(super) fn allocate(device: &PagedDevice, request: FillRequest, details: &EntryDetails) -> Result<OrOom<u32>> {
    let mut table = lock(&device.pages);
    let cell = device.heaps.get(request.heap);
    let mut fill = Fill {
        device,
        request,
        cell,
        details,
        table: &mut table,
        asks_others: false,
        others_first: false,
        whole_pages: false,
    };
    fill.run()
}

struct Fill<'a> {
    device: &'a PagedDevice,
    request: FillRequest,
    cell: &'a SpinLock<Heap>,
    details: &'a EntryDetails,
    table: &'a mut PageTable,
    /// Whether other heaps are asked too, since this one has not enough.
    asks_others: bool,
    /// Whether they are asked before this one.
    others_first: bool,
    /// Whether the window has room for the largest pages.
    whole_pages: bool,
}

/// How a window could be filled.
enum Filled {
    Done,
    /// Not with the pages of this heap. Nothing has changed.
    NotAlone,
    OutOfMemory(OomCause),
}

impl Fill<'_> {
    fn run(&mut self) -> Result<OrOom<u32>> {
        if !self.request.pool.is_default() {
            // Another thread may have released the pool: its pages are then given away by whoever locks them next.
            lock(&self.device.pools).expect_in_use(self.request.pool)?;
        }
        old_mappings::undo_some(self.device, self.table, self.details)?;
        if self.request.on_oom && !self.request.capturing {
            old_mappings::wait(self.device, self.table, self.request.heap, self.details)?;
        }
        old_mappings::poll(self.device, self.table, self.request.heap)?;
        reclaim::poll_released(self.device, self.table, self.details)?;
        let pool = self.request.pool;
        if !self.cell.lock().is_of(self.request.stream, pool) {
            // The pool was removed since the heap was found.
            return Err(Error::PoolReleased { pool });
        }
        self.table.homes.set_pool(self.request.heap, pool);
        let (requested, takes_own) = (self.request.requested, self.takes_own());
        let (kind, bytes) = (kind_of(rounded(requested)), rounded(requested));
        if bytes > self.device.bytes_total {
            // No addresses are looked for that could never be filled.
            let limited = self.device.limit().is_some_and(|limit| limit < self.device.bytes_total);
            return Ok(Err(if limited { OomCause::Limit } else { OomCause::Device }));
        }
        let mut free_elsewhere = PageSet::default();
        if self.request.on_oom || self.others_have_more(bytes) {
            (self.asks_others, self.others_first) = (true, true);
            free_elsewhere = self.free_in_others();
        }
        // Pages that cannot be taken back: they are in use by now, or mapped in a window that they belong to.
        let mut excluded = PageSet::default();
        loop {
            let mut heap = self.cell.lock();
            heap.merge_recent();
            if let Some(block) = heap.allocate(requested) {
                return Ok(Ok(block));
            }
            let takeable = OnceCell::new();
            let chosen = window::choose(self.table, &heap.free_runs(kind, bytes), bytes, self.grid(), |id| {
                let own = takeable.get_or_init(|| free_pages(self.table, &heap, takes_own));
                (own.contains(id) || free_elsewhere.contains(id)) && !excluded.contains(id)
            });
            let Some(window) = chosen else {
                drop(heap);
                if !self.reserve_range(kind, bytes)? {
                    return Ok(Err(OomCause::Device));
                }
                continue;
            };
            let filling = heap.begin_filling(kind, window.start, window.end, window.anchor);
            drop(heap);
            let prepared = self.take_back(window).and_then(|()| self.undo_old(window));
            if prepared.is_err() {
                self.cell.lock().end_filling(filling, &self.pieces(window));
            }
            prepared?;
            let blocked: Vec<PageId> = self.blocked(window).collect();
            if !blocked.is_empty() {
                excluded.extend(blocked);
                self.cell.lock().end_filling(filling, &self.pieces(window));
                continue;
            }
            let outcome = self.fill(window);
            let mut heap = self.cell.lock();
            if let Ok(Filled::Done) = outcome {
                return Ok(Ok(heap.end_filling_allocated(filling, window.addr, requested)));
            }
            heap.end_filling(filling, &self.pieces(window));
            drop(heap);
            match outcome? {
                Filled::OutOfMemory(_) if self.request.on_oom && !self.whole_pages => self.whole_pages = true,
                Filled::OutOfMemory(cause) => return Ok(Err(cause)),
                Filled::NotAlone | Filled::Done => {
                    self.asks_others = true;
                    free_elsewhere = self.free_in_others();
                }
            }
        }
    }

    /// Undoes mappings in the window that no work uses any more, and whose pages belong elsewhere.
    fn undo_old(&mut self, window: Window) -> Result<()> {
        for slot in self.slots(window) {
            if let Mapping::Page { page, part } = self.table.mapping(slot) {
                let first = Slot { index: slot.index - part, ..slot };
                if self.table.is_old_mapping(page, first) && self.table.has_passed(page, first) {
                    old_mappings::unmap(self.device, self.table, page, first)?;
                }
            }
        }
        Ok(())
    }

    /// Pages that are mapped in slots of the window that they do not belong to.
    fn blocked(&self, window: Window) -> impl Iterator<Item = PageId> {
        self.slots(window).filter_map(|slot| match self.table.mapping(slot) {
            Mapping::Page { page, .. } => self.table.own_page(slot).is_none().then_some(page),
            _ => None,
        })
    }

    /// The parts of a window by their ends, and whether pages are behind each.
    fn pieces(&self, window: Window) -> Vec<(u64, bool)> {
        let mut pieces: Vec<(u64, bool)> = Vec::new();
        for slot in self.slots(window) {
            let end = (self.table.addr(slot) + self.table.slot_bytes).min(window.end);
            let has_page = self.table.own_page(slot).is_some();
            match pieces.last_mut() {
                Some((last, had_page)) if *had_page == has_page => *last = end,
                _ => pieces.push((end, has_page)),
            }
        }
        pieces
    }

    fn slots(&self, window: Window) -> impl Iterator<Item = Slot> + use<> {
        let (base, slot) = (self.table.range(window.range).base, self.table.slot_bytes);
        let index = |addr: u64| u32::try_from((addr - base) / slot).expect("fewer than 2^32 slots");
        (index(window.start)..=index(window.end - 1)).map(move |index| Slot { range: window.range, index })
    }

    /// Puts pages behind every slot of the window.
    fn fill(&mut self, window: Window) -> Result<Filled> {
        let mut supply = Supply::new(self.slots(window).filter(|&slot| self.table.own_page(slot).is_none()));
        if !self.request.on_oom {
            self.take_spare(&mut supply, 1);
        }
        let first = if self.may_grow_first(&supply) { self.grow(&mut supply).map(drop) } else { Ok(()) };
        let taken = first.and_then(|()| self.take(&mut supply));
        if supply.pages.iter().any(|supplied| supplied.from.is_some()) {
            self.record_takes();
        }
        let obtained = taken.and_then(|()| self.obtain_rest(&mut supply));
        if let Ok(Filled::Done) = obtained {
            self.map(supply.pages)?;
        } else {
            // What was got for nothing goes back, so that a failed request changes nothing.
            let Supply { pages, created, .. } = supply;
            pages.into_iter().for_each(|supplied| self.put_back(supplied.page, supplied.from));
            created.into_iter().for_each(|page| self.release_new(page));
        }
        obtained
    }

    /// Takes free pages of this heap, and of others if they are asked first.
    fn take(&mut self, supply: &mut Supply) -> Result<()> {
        if self.request.on_oom {
            return self.take_largest_first(supply);
        }
        if self.others_first {
            self.take_from_others(supply, 1)?;
        }
        if self.takes_own() {
            self.take_from(self.request.heap, supply, 1);
        }
        Ok(())
    }

    /// Takes large pages from everywhere before smaller ones: those may fit where a large one does not any more.
    fn take_largest_first(&mut self, supply: &mut Supply) -> Result<()> {
        let mut slots_min = PageSizes::SLOTS_MAX;
        while slots_min > 0 {
            self.take_spare(supply, slots_min);
            if self.takes_own() {
                self.take_from(self.request.heap, supply, slots_min);
            }
            if self.asks_others {
                self.take_from_others(supply, slots_min)?;
            }
            slots_min /= 2;
        }
        Ok(())
    }

    /// Takes spare pages of at least `slots_min` slots, the largest first.
    fn take_spare(&mut self, supply: &mut Supply, slots_min: u32) {
        while supply.slots_needed > 0
            && let Some(page) = self.table.take_spare(slots_min..=supply.next_max())
        {
            supply.add(page, self.table.page(page).slots, None);
        }
    }

    /// Gets what this heap does not have, from others and from the driver.
    fn obtain_rest(&mut self, supply: &mut Supply) -> Result<Filled> {
        if supply.slots_needed == 0 {
            return Ok(Filled::Done);
        }
        if !self.asks_others && self.device.heaps.len() > 1 {
            return Ok(Filled::NotAlone);
        }
        self.take_from_others(supply, 1)?;
        Ok(self.grow(supply)?.map_or_else(Filled::OutOfMemory, |()| Filled::Done))
    }

    /// Returns a page to the driver that was created for this request and is mapped nowhere.
    fn release_new(&mut self, page: PageId) {
        if self.table.take_spare_page(page) {
            let physical = self.table.remove(page);
            release_physical(self.device, self.table, physical);
        }
    }

    /// How many slots are filled and taken together: as many as new pages have. If memory is short, none beyond the
    /// request first; then so many that every page has room.
    fn unit(&self) -> u32 {
        match (self.request.on_oom, self.whole_pages) {
            (true, false) => 1,
            (true, true) => PageSizes::SLOTS_MAX,
            _ => self.table.page_sizes.slots(self.table.reserved_all().current),
        }
    }

    fn grid(&self) -> u64 {
        u64::from(self.unit()) * self.table.slot_bytes
    }

    /// Whether pages of the heap itself may be taken.
    fn takes_own(&self) -> bool {
        self.request.pool.is_default() || !lock(&self.device.pools).is_fixed(self.request.pool)
    }

    /// Whether more may be reserved before pages are taken from elsewhere.
    fn may_grow_first(&self, supply: &Supply) -> bool {
        let slack = lock(&self.device.shared().settings).paged_slack;
        if slack <= 0.0 {
            return false;
        }
        let peak = self.device.peak_active_bytes(self.request.heap);
        let after = self.table.reserved_all().current + u64::from(supply.slots_needed) * self.table.slot_bytes;
        after <= peak.saturating_add(share_of(peak, slack / 100.0))
    }

    /// Whether another heap has more free memory than this one, and enough. Pages are then taken from there first: a
    /// heap with little to spare would move its few free pages from one request to the next.
    fn others_have_more(&self, bytes: u64) -> bool {
        if self.request.capturing || self.device.heaps.len() < 2 {
            return false;
        }
        let own = self.free_bytes(self.request.heap);
        let others = self.device.heaps.iter().map(|(number, _)| number).filter(|&number| number != self.request.heap);
        others.into_iter().any(|number| {
            let free = self.free_bytes(number);
            free > own.max(bytes) && matches!(self.takeable(number), Takeable::After(_))
        })
    }

    /// The free memory of a heap, without what is smaller than a page.
    fn free_bytes(&self, number: u32) -> u64 {
        let mut heap = self.device.heaps.get(number).lock();
        heap.merge_recent();
        heap.free_bytes_from(self.table.slot_bytes)
    }

    fn takeable(&self, number: u32) -> Takeable {
        let pool = self.device.heaps.get(number).lock().pool;
        lock(&self.device.pools).takeable(pool)
    }

    /// Pages in free blocks of other heaps, as far as they may be taken. Those that are still mapped in this one need
    /// no driver call.
    fn free_in_others(&self) -> PageSet {
        let mut free = PageSet::default();
        if self.request.capturing || !self.table.was_taken_from(self.request.heap) {
            return free;
        }
        for (number, cell) in self.device.heaps.iter() {
            if number == self.request.heap {
                continue;
            }
            if matches!(self.takeable(number), Takeable::After(_)) {
                let mut heap = cell.lock();
                heap.merge_recent();
                self.table.add_free_pages(&heap, &mut free);
            }
        }
        free
    }

    /// Pages that are still mapped in the window, and belong to free blocks or to nothing, belong to the window again.
    fn take_back(&mut self, window: Window) -> Result<()> {
        let last = self.slots(window).last().map_or(0, |slot| slot.index);
        let in_window = |slot: Slot| match self.table.mapping(slot) {
            Mapping::Page { page, part: 0 } if self.table.own_page(slot).is_none() => {
                (slot.index + self.table.page(page).slots <= last + 1).then_some(page)
            }
            _ => None,
        };
        let wanted: PageSet = self.slots(window).filter_map(in_window).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let mut taken: PageSet = wanted.iter().filter(|&page| self.table.take_spare_page(page)).collect();
        let heap_of = |page: PageId| self.table.page(page).home.map(|home| self.table.range(home.range).heap);
        let mut heaps: Vec<u32> = wanted.iter().filter(|&page| !taken.contains(page)).filter_map(heap_of).collect();
        heaps.sort_unstable();
        heaps.dedup();
        let mut outcome = Ok(());
        for number in heaps {
            let from = self.take_wanted(number, &wanted);
            let ordered = if number == self.request.heap { Ok(true) } else { self.order_after_heap(number) };
            if matches!(ordered, Ok(true)) {
                taken.extend(from.iter().map(|&(_, page)| page));
            } else {
                from.into_iter().for_each(|(slot, page)| self.put_back(page, Some(slot)));
                outcome = outcome.and(ordered.map(drop));
            }
        }
        let heap = self.cell.lock();
        for slot in self.slots(window) {
            if let Mapping::Page { page, part: 0 } = self.table.mapping(slot)
                && taken.remove(page)
            {
                self.table.set_home(page, Some(slot));
                self.table.totals.taken_back += 1;
                let bytes = self.table.page_bytes(page);
                self.device.record(Action::SegmentMap, self.table.addr(slot), bytes, &heap, self.details);
            }
        }
        outcome
    }

    /// Takes those of the wanted pages that are in free blocks of a heap.
    fn take_wanted(&mut self, number: u32, wanted: &PageSet) -> Vec<(Slot, PageId)> {
        let mut taken = Vec::new();
        let mut heap = self.device.heaps.get(number).lock();
        for block in heap.blocks_with_pages(self.table.slot_bytes) {
            let pages = self.table.pages_in(&heap, block);
            let pages: Vec<_> = pages.filter(|&(_, page)| wanted.contains(page)).collect();
            self.take_pages(&mut heap, block, &pages);
            taken.extend(pages);
        }
        taken
    }

    /// Makes the request's stream wait for the work of another heap. `false` if it must not be taken from.
    fn order_after_heap(&self, number: u32) -> Result<bool> {
        let (stream, pool) = {
            let heap = self.device.heaps.get(number).lock();
            (heap.stream, heap.pool)
        };
        let takeable = lock(&self.device.pools).takeable(pool);
        match takeable {
            Takeable::After(mut streams) => {
                streams.push(stream);
                streams.retain(|&stream| stream != self.request.stream);
                self.order_after(&streams)
            }
            Takeable::OnOom | Takeable::Never => Ok(false),
        }
    }

    /// These pages, which are in a free block, belong to it no longer. They are sorted by address.
    fn take_pages(&mut self, heap: &mut Heap, block: u32, pages: &[(Slot, PageId)]) {
        // From the end: what is left of the block in front keeps its number.
        for &(slot, page) in pages.iter().rev() {
            let (start, bytes) = (self.table.addr(slot), self.table.page_bytes(page));
            heap.make_hole(block, start, start + bytes);
            self.table.set_home(page, None);
            self.table.totals.taken += 1;
            self.device.record(Action::SegmentUnmap, start, bytes, heap, self.details);
        }
    }

    /// Has an event recorded behind the work that used what was taken from this heap. Without it the old mappings stay
    /// until a later one.
    fn record_takes(&mut self) {
        if let Err(error) = old_mappings::record_takes(self.device, self.table, self.request.heap, self.details) {
            tracing::warn!(%error, "no event could be recorded behind taken pages; it is retried");
        }
    }

    /// Takes pages of at least `slots_min` slots from free blocks of a heap, the smallest first: those that fill a unit
    /// alone, since mapping them costs least, then several that fill one together, and then others.
    fn take_from(&mut self, number: u32, supply: &mut Supply, slots_min: u32) {
        let unit = self.unit();
        let mut slots = PageSizes::SLOTS_MAX;
        while unit > 1 && slots >= slots_min && supply.slots_needed > 0 {
            if self.table.has_pages_of(slots) {
                self.take_units(number, supply, unit, slots);
            }
            slots /= 2;
        }
        self.take_units(number, supply, 1, slots_min);
    }

    /// Takes pages of at least `slots_min` slots, as far as all of a unit of so many slots is free.
    fn take_units(&mut self, number: u32, supply: &mut Supply, unit: u32, slots_min: u32) {
        if supply.slots_needed == 0 {
            return;
        }
        let mut heap = self.device.heaps.get(number).lock();
        heap.merge_recent();
        for block in heap.blocks_with_pages(self.table.slot_bytes) {
            let (pages, mut taken): (Vec<_>, _) = (self.table.pages_in(&heap, block).collect(), Vec::new());
            // Pages by address, in groups of those that begin in the same unit.
            for pages in pages.chunk_by(|(a, _), (b, _)| a.index / unit == b.index / unit) {
                // A unit is taken whole, or what of it is needed at last.
                let slots: u32 = pages.iter().map(|&(_, page)| self.table.page(page).slots).sum();
                if slots < unit.min(supply.slots_needed) {
                    continue;
                }
                for &(slot, page) in pages {
                    let slots = self.table.page(page).slots;
                    if slots >= slots_min && supply.accepts(slots) {
                        supply.add(page, slots, Some(slot));
                        taken.push((slot, page));
                    }
                }
            }
            self.take_pages(&mut heap, block, &taken);
            if supply.slots_needed == 0 {
                return;
            }
        }
    }

    /// Takes pages from other heaps. The request's stream waits, on the device, for the work of theirs.
    fn take_from_others(&mut self, supply: &mut Supply, slots_min: u32) -> Result<()> {
        if self.request.capturing {
            return Ok(());
        }
        for (number, cell) in self.device.heaps.iter() {
            if supply.slots_needed == 0 {
                break;
            }
            if number == self.request.heap {
                continue;
            }
            let (stream, pool, has_pages) = {
                let mut heap = cell.lock();
                heap.merge_recent();
                (heap.stream, heap.pool, heap.has_free_from(self.table.slot_bytes))
            };
            if !has_pages {
                continue;
            }
            let mut streams = match lock(&self.device.pools).takeable(pool) {
                Takeable::After(streams) => streams,
                Takeable::OnOom if self.request.on_oom => Vec::new(),
                Takeable::OnOom | Takeable::Never => continue,
            };
            streams.push(stream);
            streams.retain(|&stream| stream != self.request.stream);
            // Taken first: the events are then behind all work that ever used the pages.
            let before = supply.clone();
            self.take_from(number, supply, slots_min);
            if supply.pages.len() == before.pages.len() {
                continue;
            }
            let ordered = self.order_after(&streams);
            if !matches!(ordered, Ok(true)) {
                let taken = supply.pages.split_off(before.pages.len());
                *supply = before;
                taken.into_iter().for_each(|supplied| self.put_back(supplied.page, supplied.from));
                ordered?;
            }
        }
        Ok(())
    }

    /// Makes the request's stream wait for the work that these streams hold now. `false` if a capture forbids it.
    fn order_after(&self, streams: &[StreamId]) -> Result<bool> {
        #[cfg(test)]
        if super::defect::Defect::NoEventBetweenHeaps.is_on() {
            return Ok(true);
        }
        let owner = PendingFrees::new(self.device, self.details);
        for &stream in streams {
            match stream_fence::record(&owner, stream)? {
                Recorded::Fenced(event) => {
                    let driver = self.device.driver();
                    driver.stream_wait_event(self.request.stream, event.id(), EventScope::Plain)?;
                }
                Recorded::AlreadyDone => {}
                Recorded::CaptureActive => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Gets what is still needed from the driver, within the limit.
    fn grow(&mut self, supply: &mut Supply) -> Result<OrOom<()>> {
        let options = PhysicalOptions { share: self.device.share, rdma: self.device.rdma };
        let limit = self.device.limit().unwrap_or(u64::MAX);
        while supply.slots_needed > 0 {
            let reserved = self.table.bytes_limited();
            let slots = 1 << supply.next_max().min(self.unit()).ilog2();
            let bytes = u64::from(slots) * self.table.slot_bytes;
            if reserved.saturating_add(bytes) > limit {
                return Ok(Err(OomCause::Limit));
            }
            match self.device.driver().vm_create(self.device.id, bytes, options) {
                Ok(physical) => {
                    let page = self.table.add(physical, slots);
                    supply.created.push(page);
                    supply.add(page, slots, None);
                }
                Err(error) if error.code == ErrorCode::OutOfMemory => return Ok(Err(OomCause::Device)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Ok(()))
    }

    /// Maps pages. Those that could not be mapped go back to where they were.
    fn map(&mut self, mut pages: Vec<Supplied>) -> Result<()> {
        pages.sort_unstable_by_key(|supplied| supplied.to);
        let mut rest = pages.as_slice();
        let mut outcome = Ok(());
        while let Some(first) = rest.first()
            && outcome.is_ok()
        {
            // Access is set for neighbours by one call.
            let (mut count, mut end) = (0, first.to);
            while let Some(supplied) = rest.get(count)
                && supplied.to == end
                && outcome.is_ok()
            {
                let page = self.table.page(supplied.page);
                match self.device.driver().vm_map(DevicePtr(self.table.addr(end)), page.physical) {
                    Ok(()) => {
                        end.index += page.slots;
                        count += 1;
                        self.table.set_mapped(supplied.page, supplied.to);
                    }
                    Err(error) => outcome = Err(error.into()),
                }
            }
            let set = self.set_access(first.to, end.index - first.to.index);
            let (mapped, others) = rest.split_at(count);
            if set.is_ok() {
                self.begin_use(mapped);
                rest = others;
            } else {
                mapped.iter().rev().for_each(|supplied| self.undo_map(supplied.page, supplied.to));
                outcome = outcome.and(set);
            }
        }
        rest.iter().for_each(|supplied| self.put_back(supplied.page, supplied.from));
        outcome
    }

    /// Pages that were mapped belong there from now on.
    fn begin_use(&mut self, mapped: &[Supplied]) {
        let heap = self.cell.lock();
        for supplied in mapped {
            self.table.set_home(supplied.page, Some(supplied.to));
            let (addr, bytes) = (self.table.addr(supplied.to), self.table.page_bytes(supplied.page));
            self.device.record(Action::SegmentMap, addr, bytes, &heap, self.details);
        }
        drop(heap);
        mapped.iter().for_each(|supplied| old_mappings::retire_oldest(self.table, supplied.page));
    }

    fn set_access(&self, first: Slot, slots: u32) -> Result<()> {
        if slots == 0 {
            return Ok(());
        }
        let peers = lock(&self.device.peers);
        let devices = std::iter::once(self.device.id).chain(peers.iter().copied());
        let access: Vec<_> = devices.map(|device| DeviceAccess { device, access: Access::ReadWrite }).collect();
        let bytes = u64::from(slots) * self.table.slot_bytes;
        Ok(self.device.driver().vm_set_access(DevicePtr(self.table.addr(first)), bytes, &access)?)
    }

    /// Undoes a mapping that nothing has used.
    fn undo_map(&mut self, page: PageId, slot: Slot) {
        let bytes = self.table.page_bytes(page);
        let undone = self.device.driver().vm_unmap(DevicePtr(self.table.addr(slot)), bytes);
        let slots = self.table.page(page).slots;
        self.table.set_unmapped(page, slot);
        if let Err(error) = undone {
            tracing::warn!(%error, "a mapping could not be undone; it is retried");
            self.table.set_broken(slot, slots);
        }
    }

    /// A page that was got for nothing: back to where it was taken from, or to the spare ones.
    fn put_back(&mut self, page: PageId, from: Option<Slot>) {
        let Some(slot) = from else {
            self.table.put_spare(page);
            return;
        };
        let (start, bytes) = (self.table.addr(slot), self.table.page_bytes(page));
        let (number, kind) = (self.table.range(slot.range).heap, self.table.range(slot.range).kind);
        self.table.set_home(page, Some(slot));
        let mut heap = self.device.heaps.get(number).lock();
        heap.end_hole(kind, start, start + bytes);
        self.device.record(Action::SegmentMap, start, bytes, &heap, self.details);
    }

    /// Reserves addresses for the heap: twice as many as it has, or as the request needs. `false` if there are none.
    fn reserve_range(&mut self, kind: SegmentKind, bytes: u64) -> Result<bool> {
        const FIRST: [u64; 2] = [1 << 30, 2 << 30];
        let has: u64 = self.table.bytes_of_ranges(self.request.heap, kind);
        let most = self.device.bytes_total.next_multiple_of(1 << 30).max(FIRST[1]);
        let wanted = has.clamp(FIRST[kind as usize], most).max(bytes.saturating_add(2 * self.table.slot_bytes));
        let Some((base, bytes)) = self.device.space.reserve(self.device.instance(), wanted)? else { return Ok(false) };
        let number = self.table.add_range(base, bytes, self.request.heap, kind);
        let range = self.cell.lock().add_range(kind, number, base, bytes);
        self.device.space.assign(base, bytes, Location { heap: self.request.heap, kind, range });
        Ok(true)
    }
}

/// The pages that are wholly in free blocks of a heap, if those may be taken, and the spare ones.
fn free_pages(table: &PageTable, heap: &Heap, takes_own: bool) -> PageSet {
    let mut free: PageSet = table.spare_pages().iter().copied().collect();
    if takes_own {
        table.add_free_pages(heap, &mut free);
    }
    free
}
