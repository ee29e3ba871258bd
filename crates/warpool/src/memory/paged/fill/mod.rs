//! Getting pages for a request that no free block can hold.
//!
//! Under the lock of the pages:
//! 1. A window of free addresses is chosen (`window.rs`) and taken out of the heap's lists.
//! 2. Pages that are still mapped in the window and are free are taken back: no driver call. If this heap's free pages
//!    and the spare ones are enough for the request, only these count, so that no stream is waited for.
//! 3. Further pages come, in this order, from: the spare ones; free blocks of this heap, the smallest first; free
//!    blocks of other heaps, after an event of their stream; the driver. Large pages of all heaps come before smaller
//!    ones. If free pages are left that are larger than the gaps, as much of them is returned to the driver as new
//!    pages are created (`grow.rs`): so reserved memory grows only if the free pages of the device are too few.
//! 4. They are mapped. Where they were before, they stay mapped for a while (`pages/`).
//!
//! If there are not enough, all go back to where they were. If a mapping fails midway, what was mapped so far becomes
//! free blocks, and the rest of the window holes.

mod grow;
mod map;
mod slots;
mod take;

pub(super) use slots::{Slots, allocate_slots};

use warpool_driver::StreamId;

use crate::defect::Defect;
use crate::memory::paged::address_space::Location;
use crate::memory::paged::decay;
use crate::memory::paged::device::PagedDevice;
use crate::memory::paged::heap::{Heap, kind_of, rounded};
use crate::memory::paged::ids::{BlockId, HeapId, PageId};
use crate::memory::paged::left_addresses::LeftAddresses;
use crate::memory::paged::old_mappings;
use crate::memory::paged::page_sizes::PageSizes;
use crate::memory::paged::pages::PageTable;
use crate::memory::paged::reclaim;
use crate::memory::paged::retire;
use crate::memory::paged::sharing;
use crate::memory::paged::slot::Slot;
use crate::memory::paged::supply::Supply;
use crate::memory::paged::used_heaps::look_at_used;
use crate::memory::paged::window::{self, PageSet, Wanted, Window};
use crate::memory::report::EntryDetails;
use crate::memory::{MemPoolId, OomCause, SegmentKind};
use crate::sync::spin_lock::SpinLock;
use crate::{Error, Result, lock};

/// Out of memory is an answer, not an error of the call.
pub(super) type OrOom<T> = std::result::Result<T, OomCause>;

/// A request that needs pages.
#[derive(Clone, Copy)]
pub(super) struct FillRequest {
    pub(super) heap: HeapId,
    pub(super) requested: u64,
    pub(super) stream: StreamId,
    pub(super) pool: MemPoolId,
    /// Whether the stream captures: its work runs later, so other heaps' pages cannot be ordered before it.
    pub(super) capturing: bool,
    /// Whether the request would run out of memory otherwise.
    pub(super) on_oom: bool,
}

/// Allocates, with further pages if need be. Returns the number of the block.
pub(super) fn allocate(device: &PagedDevice, request: FillRequest, details: &EntryDetails) -> Result<OrOom<BlockId>> {
    let mut table = lock(&device.pages);
    let mut fill = Fill::new(device, request, &mut table, details);
    let outcome = fill.run();
    fill.end();
    outcome
}

struct Fill<'a> {
    device: &'a PagedDevice,
    request: FillRequest,
    cell: &'a SpinLock<Heap>,
    details: &'a EntryDetails,
    table: &'a mut PageTable,
    /// The slots of a new page, where there is room for it. Holes are filled, and pages taken, in units of that size.
    page_slots: u32,
    /// No page lies across a multiple of so many slots.
    border: u32,
    /// Whether other heaps' pages count and may be taken: this heap and the spare pages have not enough.
    asks_others: bool,
    /// Whether it gets a new page rather than one that other heaps would take again (`pages/heaps.rs`).
    own_page: bool,
    /// Whether pages were taken that another stream used: the request's stream then waits for bystanders, too.
    needs_bystanders: bool,
}

/// What became of a window.
enum Filled {
    /// Pages are mapped in all of it.
    Done,
    /// These pages are mapped in it, and can neither be taken back nor unmapped. Nothing has changed, but for pages
    /// that were taken back and mappings that were undone.
    Blocked(Vec<PageId>),
    /// This heap has not enough pages after all: others' count from now on, so another window may be better. Nothing
    /// has changed.
    NeedsOthers,
    OutOfMemory(OomCause),
}

impl<'a> Fill<'a> {
    fn new(device: &'a PagedDevice, request: FillRequest, table: &'a mut PageTable, details: &'a EntryDetails) -> Self {
        Self {
            device,
            request,
            cell: device.heaps.get(request.heap),
            details,
            table,
            page_slots: 1,
            border: u32::MAX,
            asks_others: false,
            own_page: false,
            needs_bystanders: false,
        }
    }

    /// To be called at the end, whatever the outcome.
    fn end(&mut self) {
        self.order_after_bystanders();
        if let Err(error) = sharing::give(self.device, self.table, self.details) {
            tracing::warn!(%error, "pages could not be given to other processes; it is retried");
        }
        self.table.note_changed(self.request.heap);
    }

    fn run(&mut self) -> Result<OrOom<BlockId>> {
        self.prepare()?;
        let requested = self.request.requested;
        let (kind, bytes) = (kind_of(rounded(requested)), rounded(requested));
        if bytes > self.device.bytes_total {
            // No addresses are looked for that could never be filled.
            let limited = self.device.limit().is_some_and(|limit| limit < self.device.bytes_total);
            return Ok(Err(if limited { OomCause::Limit } else { OomCause::Device }));
        }
        let on_oom = self.request.on_oom && !Defect::ShortageKeepsPageSize.is_on();
        self.page_slots = if on_oom { 1 } else { self.new_page_slots(kind) };
        self.own_page = bytes <= self.table.slot_bytes && self.table.needs_own_page(self.request.heap);
        self.asks_others = self.request.on_oom || !self.own_page && self.own_free_bytes() < bytes;
        // Pages that cannot be taken back: they are in use by now, or mapped in a window that they belong to.
        let mut excluded = Vec::new();
        loop {
            let mut heap = self.cell.lock();
            heap.merge_recent();
            if let Some(block) = heap.allocate(requested) {
                return Ok(Ok(block));
            }
            let Some(window) = self.choose_window(&heap, kind, bytes, &excluded) else {
                drop(heap);
                if self.reserve_range(kind, bytes)? {
                    continue;
                }
                return Ok(Err(OomCause::Device));
            };
            let filling = heap.begin_filling(kind, window.start, window.end, window.anchor);
            drop(heap);
            let filled = self.fill(window);
            if matches!(filled, Ok(Filled::Done)) {
                return Ok(Ok(self.cell.lock().end_filling_allocated(filling, window.addr, requested)));
            }
            self.cell.lock().end_filling(filling, &self.pieces(window));
            match filled? {
                Filled::Done => {}
                Filled::Blocked(pages) => {
                    // Otherwise the same window would be chosen for ever.
                    assert!(pages.iter().any(|page| !excluded.contains(page)), "an impossible window was chosen");
                    excluded.extend(pages);
                }
                Filled::NeedsOthers => self.asks_others = true,
                Filled::OutOfMemory(cause) => return Ok(Err(cause)),
            }
        }
    }

    /// What other work has left to do, and whether the heap can still be used.
    fn prepare(&mut self) -> Result<()> {
        let FillRequest { heap, stream, pool, .. } = self.request;
        if !pool.is_default() {
            // Another thread may have released the pool: its pages are then given away by whoever locks them next.
            lock(&self.device.pools).expect_in_use(pool)?;
        }
        self.table.begin_request();
        look_at_used(self.device, self.table);
        decay::decay(self.device, self.table, self.details);
        old_mappings::undo_some(self.device, self.table, self.details)?;
        retire::retire_unused(self.device, self.table, heap, self.details)?;
        if self.request.on_oom && !self.request.capturing {
            if !Defect::ShortageKeepsOldMappings.is_on() {
                old_mappings::wait(self.device, self.table, heap, self.details)?;
            }
            reclaim::release_leaving(self.device, self.table, self.details)?;
        }
        old_mappings::poll(self.device, self.table, heap)?;
        reclaim::poll_released(self.device, self.table, self.details)?;
        if !self.cell.lock().is_of(stream, pool) {
            // The heap was retired since it was found.
            return Err(Error::PoolReleased { pool });
        }
        self.table.set_pool(heap, pool);
        Ok(())
    }

    /// The window of least cost, if there are enough addresses.
    fn choose_window(&self, heap: &Heap, kind: SegmentKind, bytes: u64, excluded: &[PageId]) -> Option<Window> {
        let mut takeable = PageSet::new(self.table);
        self.table.spare_pages().for_each(|page| takeable.set(page, true));
        if self.takes_own() {
            self.table.free_pages(heap).for_each(|page| takeable.set(page, true));
        }
        if self.asks_others && self.table.was_taken_from(self.request.heap) {
            // Pages of other heaps that are still mapped in this one need no driver call.
            for number in self.other_heaps() {
                let mut heap = self.device.heaps.get(number).lock();
                heap.merge_recent();
                self.table.free_pages(&heap).for_each(|page| takeable.set(page, true));
            }
        }
        excluded.iter().for_each(|&page| takeable.set(page, false));
        let unit = self.page_slots;
        let memory_first = self.request.on_oom && !Defect::ShortageCountsCallsFirst.is_on();
        let wanted = Wanted { table: self.table, bytes, unit, memory_first, takeable: &takeable };
        window::choose(&wanted, &heap.free_runs(kind, bytes))
    }

    /// The bytes of the pages that this heap could give, and of the spare ones.
    fn own_free_bytes(&self) -> u64 {
        let bytes = |page: PageId| self.table.page_bytes(page);
        let spare: u64 = self.table.spare_pages().map(bytes).sum();
        if !self.takes_own() {
            return spare;
        }
        let mut heap = self.cell.lock();
        heap.merge_recent();
        spare + self.table.free_pages(&heap).map(bytes).sum::<u64>()
    }

    /// Puts pages into every slot of the window.
    fn fill(&mut self, window: Window) -> Result<Filled> {
        self.take_back(window)?;
        self.undo_old(window)?;
        let blocked: Vec<PageId> = self.blocked(window).collect();
        if !blocked.is_empty() {
            return Ok(Filled::Blocked(blocked));
        }
        let without_page = self.slots(window).filter(|&slot| self.table.own_page(slot).is_none());
        let mut supply = Supply::new(without_page, self.border);
        match self.obtain(&mut supply) {
            Ok(Ok(true)) => self.use_pages(supply).map(|()| Filled::Done),
            failed => {
                // Returns all pages to where they were, so that a failed request changes nothing.
                let supplied = supply.pages.iter().map(|supplied| (supplied.page, supplied.from));
                self.put_pages_back(supplied.chain(supply.exchanged));
                supply.created.iter().for_each(|&page| self.release_new(page));
                failed.map(|oom| oom.map_or_else(Filled::OutOfMemory, |_| Filled::NeedsOthers))
            }
        }
    }

    /// Gets a page for every gap, from the nearest source. `false` if this heap has not enough after all.
    fn obtain(&mut self, supply: &mut Supply) -> Result<OrOom<bool>> {
        if self.own_page {
            self.take_spare(supply, 1);
            self.take_own(supply, 1);
            if supply.slots_needed > 0 {
                // Where there is no memory for it, it is not tried again either.
                self.table.note_own_page(self.request.heap);
                let _ = self.grow(supply)?;
            }
        }
        // Large pages of all heaps come before smaller ones: those fit where a large one does not any more.
        for slots_min in [4, 2, 1] {
            if slots_min <= supply.next_max() && self.table.has_pages_of(slots_min) {
                self.take_spare(supply, slots_min);
                self.take_own(supply, slots_min);
                if self.asks_others {
                    self.take_from_others(supply, slots_min)?;
                }
            }
        }
        if supply.slots_needed > 0 && !self.asks_others {
            return Ok(Ok(false));
        }
        Ok(self.grow(supply)?.map(|()| true))
    }

    /// The pages that were got belong to the window from here on.
    fn use_pages(&mut self, mut supply: Supply) -> Result<()> {
        self.table.leaving.extend(supply.exchanged.iter().map(|&(page, _)| page));
        if supply.pages.iter().any(|supplied| supplied.from.is_some()) || !supply.exchanged.is_empty() {
            // Without it the old mappings stay until a later one.
            let recorded = old_mappings::record_takes(self.device, self.table, self.request.heap, self.details);
            if let Err(error) = recorded {
                tracing::warn!(%error, "no event could be recorded after taken pages; it is retried");
            }
        }
        self.map(&mut supply.pages)
    }

    /// Undoes mappings in the window that no work uses any more, and whose pages belong elsewhere.
    fn undo_old(&mut self, window: Window) -> Result<()> {
        for slot in self.slots(window) {
            let state = self.table.slot(slot);
            if let Some(part) = state.old().filter(|_| state.has_passed(self.table.passed_takes(window.range))) {
                old_mappings::unmap(self.device, self.table, part.page, part.first_slot(slot))?;
            }
        }
        Ok(())
    }

    /// Pages that are mapped in slots of the window that they do not belong to.
    fn blocked(&self, window: Window) -> impl Iterator<Item = PageId> {
        self.slots(window).filter_map(|slot| self.table.slot(slot).old().map(|part| part.page))
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

    pub(super) fn slots(&self, window: Window) -> impl ExactSizeIterator<Item = Slot> + use<> {
        let index = |addr: u64| self.table.slot_index(window.range, addr);
        (index(window.start)..index(window.end - 1) + 1).map(move |index| Slot { range: window.range, index })
    }

    /// Whether pages of the heap itself may be taken.
    fn takes_own(&self) -> bool {
        self.request.pool.is_default() || !lock(&self.device.pools).is_fixed(self.request.pool)
    }

    /// How many slots a new page has (`page_sizes.rs`).
    fn new_page_slots(&self, kind: SegmentKind) -> u32 {
        if kind == SegmentKind::Small && self.table.bytes_of_ranges(self.request.heap, kind) == 0 {
            return 1;
        }
        let (reserved, slot) = (self.table.reserved_all().current, self.table.slot_bytes);
        self.table.page_sizes.slots(reserved, self.table.bytes_in_parts(), slot)
    }

    /// Reserves addresses for the heap: several times as many as it has, or as the request needs. They cost nothing,
    /// and where there are enough, old mappings need not be undone. The more heaps there are, the less each gets at
    /// first: each doubling of their number takes as many addresses as the first heaps together. `false` if there are
    /// none.
    fn reserve_range(&mut self, kind: SegmentKind, bytes: u64) -> Result<bool> {
        const FIRST: [u64; 2] = [1 << 30, 2 << 30];
        const GROWTH: u64 = 7;
        const FIRST_HEAPS: u32 = 64;
        let has: u64 = self.table.bytes_of_ranges(self.request.heap, kind);
        let most = self.device.bytes_total.next_multiple_of(1 << 30).max(FIRST[1]);
        let first = FIRST[kind as usize] / u64::from(1 + self.request.heap.0 / FIRST_HEAPS).next_power_of_two();
        let wanted = has
            .saturating_mul(GROWTH)
            .clamp(first, most)
            .max(bytes.saturating_add(u64::from(2 * PageSizes::SLOTS_MAX) * self.table.slot_bytes));
        if let Some(left) = self.device.instance().extensions().get::<LeftAddresses>()
            && let Err(error) = left.free(self.device.driver())
        {
            tracing::warn!(%error, "addresses of a dropped allocator could not be freed; it is retried");
        }
        let Some((base, bytes)) = self.device.space.reserve(self.device.instance(), wanted)? else { return Ok(false) };
        let number = self.table.add_range(base, bytes, self.request.heap, kind);
        let range = self.cell.lock().add_range(kind, number, base, bytes);
        self.device.space.assign(base, bytes, Location { heap: self.request.heap, kind, range });
        Ok(true)
    }
}
