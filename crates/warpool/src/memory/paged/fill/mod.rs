//! Getting pages for a request that no free block can hold.
//!
//! Under the lock of the pages:
//! 1. A window of free addresses is chosen (`window/`) and taken out of the heap's lists.
//! 2. Pages that were in it before and are free elsewhere in this heap are taken back: no driver call. If this heap has
//!    not enough, a window is chosen anew for which those that are free in other heaps count too.
//! 3. Further pages come, in this order, from: those that belong nowhere; free blocks of this heap, the smallest first;
//!    free blocks of other heaps, behind an event of their stream; the driver. Other heaps come before this one if one
//!    of them has more free memory. If they are asked, large pages of all come before smaller ones.
//!    Before the driver is asked, another window is looked for that needs none, at the price of more calls: if a few
//!    slots are missing, the one that leaves most memory for others; if free pages are too large for the gaps, one
//!    with larger gaps. If much is lost in free parts of pages, new ones are small, and few are needed where they go.
//! 4. They are mapped. Where they were before, they stay mapped for a while (`pages/`).
//!
//! If there are not enough, all go back to where they were. If a mapping fails midway, what was mapped so far becomes
//! free blocks, and the rest of the window holes.

mod aim;
mod map;
mod order;
mod take;
mod take_back;

use std::sync::Arc;

use warpool_driver::StreamId;

use self::aim::{Aim, FirstWindow};
use crate::memory::limit::share_of;
use crate::memory::paged::address_space::Location;
use crate::memory::paged::device::PagedDevice;
use crate::memory::paged::fill_memory::FillMemory;
use crate::memory::paged::heap::{Heap, kind_of, rounded};
use crate::memory::paged::left_addresses::LeftAddresses;
use crate::memory::paged::old_mappings;
use crate::memory::paged::page_set::PageSet;
use crate::memory::paged::page_sizes::PageSizes;
use crate::memory::paged::pages::{Mapping, PageId, PageTable, Slot};
use crate::memory::paged::reclaim;
use crate::memory::paged::retire;
use crate::memory::paged::spin_lock::SpinLock;
use crate::memory::paged::supply::Supply;
use crate::memory::paged::used_heaps::look_at_used;
use crate::memory::paged::window::{Wanted, Window};
use crate::memory::report::EntryDetails;
use crate::memory::{MemPoolId, OomCause, SegmentKind};
use crate::{Error, PooledEvent, Result, lock};

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
    let (mut table, mut memory) = (lock(&device.pages), lock(&device.fill_memory));
    let cell = device.heaps.get(request.heap);
    let mut fill = Fill {
        device,
        request,
        cell,
        details,
        table: &mut table,
        memory: &mut memory,
        asks_others: false,
        others_first: false,
        own_page: false,
        aim: if request.on_oom { Aim::Fit } else { Aim::FewCalls },
        first: FirstWindow::default(),
        whole_pages: false,
        needs_bystanders: false,
        ordered_after: Vec::new(),
        recorded: Vec::new(),
    };
    let outcome = fill.run();
    fill.order_after_bystanders();
    fill.table.index.note_changed(request.heap);
    outcome
}

struct Fill<'a> {
    device: &'a PagedDevice,
    request: FillRequest,
    cell: &'a SpinLock<Heap>,
    details: &'a EntryDetails,
    table: &'a mut PageTable,
    memory: &'a mut FillMemory,
    /// Whether other heaps are asked too, since this one has not enough.
    asks_others: bool,
    /// Whether they are asked before this one.
    others_first: bool,
    /// Whether it gets a new page rather than one that other heaps would take again (`contention.rs`).
    own_page: bool,
    aim: Aim,
    first: FirstWindow,
    /// Whether the window has room for the largest pages.
    whole_pages: bool,
    /// Whether pages were taken that another stream used: the request's stream then waits for bystanders, too.
    needs_bystanders: bool,
    /// The streams that it waits for since the last time.
    ordered_after: Vec<StreamId>,
    /// Events after the work of bystanders, recorded after all pages were taken.
    recorded: Vec<(StreamId, Arc<PooledEvent>)>,
}

/// That a window was not filled is an answer too.
type OrUnfilled = std::result::Result<(), Unfilled>;

/// Why a window could not be filled. Nothing has changed, but for pages that were taken back and mappings that were
/// undone.
enum Unfilled {
    /// This heap has not enough pages, and others were not asked.
    NotAlone,
    /// It needs new pages, and another window may need none: one in which all gaps have a multiple of so many slots,
    /// if what is free is too large for the gaps of this one.
    NeedsNewPages {
        gap_slots: Option<u32>,
    },
    OutOfMemory(OomCause),
}

impl Fill<'_> {
    fn run(&mut self) -> Result<OrOom<u32>> {
        if !self.request.pool.is_default() {
            // Another thread may have released the pool: its pages are then given away by whoever locks them next.
            lock(&self.device.pools).expect_in_use(self.request.pool)?;
        }
        self.table.index.begin_request();
        look_at_used(self.device, self.table);
        old_mappings::undo_some(self.device, self.table, self.details)?;
        retire::retire_unused(self.device, self.table, self.request.heap, self.details)?;
        if self.request.on_oom && !self.request.capturing {
            old_mappings::wait(self.device, self.table, self.request.heap, self.details)?;
        }
        old_mappings::poll(self.device, self.table, self.request.heap)?;
        reclaim::poll_released(self.device, self.table, self.details)?;
        let pool = self.request.pool;
        if !self.cell.lock().is_of(self.request.stream, pool) {
            // The heap was retired since it was found.
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
        let heap = self.request.heap;
        self.own_page = bytes <= self.table.slot_bytes && self.table.contention.note_needed(heap);
        self.memory.free_elsewhere.clear_for(0);
        if self.request.on_oom || !self.own_page && self.others_have_more(bytes) {
            (self.asks_others, self.others_first) = (true, !self.request.on_oom);
            self.find_free_elsewhere();
        }
        // Pages that cannot be taken back: they are in use by now, or mapped in a window that they belong to.
        let mut excluded = PageSet::default();
        loop {
            let mut heap = self.cell.lock();
            heap.merge_recent();
            if let Some(block) = heap.allocate(requested) {
                return Ok(Ok(block));
            }
            let (unit, slot_worth, gap_slots) = (self.unit(), self.slot_worth(), self.aim.gap_slots());
            let FillMemory { search, runs, takeable, free_elsewhere, .. } = self.memory;
            find_free_pages(self.table, &heap, takes_own, takeable);
            takeable.insert_all(free_elsewhere);
            takeable.remove_all(&excluded);
            heap.find_free_runs(kind, bytes, runs);
            let wanted = Wanted { table: self.table, runs, bytes, unit, slot_worth, gap_slots, takeable };
            let chosen = search.choose(wanted);
            if self.is_refused(chosen) {
                self.aim = self.after_refused();
                excluded = PageSet::default();
                continue;
            }
            let Some(window) = chosen else {
                drop(heap);
                let reserved = self.could_fill_new(bytes) && self.reserve_range(kind, bytes)?;
                if !reserved && self.aim.gap_slots() == 1 {
                    return Ok(Err(OomCause::Device));
                } else if !reserved {
                    self.aim = self.with_new_pages();
                    excluded = PageSet::default();
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
            let unfilled = match self.fill(window) {
                Ok(Ok(())) => return Ok(Ok(self.cell.lock().end_filling_allocated(filling, window.addr, requested))),
                Ok(Err(unfilled)) => Ok(unfilled),
                Err(error) => Err(error),
            };
            self.cell.lock().end_filling(filling, &self.pieces(window));
            match unfilled? {
                Unfilled::OutOfMemory(_) if self.request.on_oom && !self.whole_pages => self.whole_pages = true,
                Unfilled::OutOfMemory(cause) => return Ok(Err(cause)),
                Unfilled::NeedsNewPages { gap_slots } => {
                    self.aim = self.after_unfilled(window, gap_slots);
                    excluded = PageSet::default();
                }
                Unfilled::NotAlone => {
                    self.asks_others = true;
                    look_at_used(self.device, self.table);
                    self.find_free_elsewhere();
                }
            }
        }
    }

    /// Undoes mappings in the window that no work uses any more, and whose pages belong elsewhere.
    fn undo_old(&mut self, window: Window) -> Result<()> {
        let passed = self.table.passed_takes(window.range);
        for slot in self.slots(window) {
            let state = self.table.slot(slot);
            if let Mapping::Page(part) = state.mapping()
                && !part.is_home
                && passed.has_passed(&state)
            {
                old_mappings::unmap(self.device, self.table, part.page, part.first_slot(slot))?;
            }
        }
        Ok(())
    }

    /// Pages that are mapped in slots of the window that they do not belong to.
    fn blocked(&self, window: Window) -> impl Iterator<Item = PageId> {
        self.slots(window).filter_map(|slot| match self.table.mapping(slot) {
            Mapping::Page(part) => (!part.is_home).then_some(part.page),
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

    /// The slots of a window that nothing else is in: with free pages, or none.
    fn whole_slots(&self, window: Window) -> u32 {
        let is_free = |page| self.memory.takeable.contains(page);
        self.slots(window).filter(|&slot| self.table.own_page(slot).is_none_or(is_free)).count() as u32
    }

    /// The slots of a window that have no page.
    fn holes(&self, window: Window) -> u32 {
        self.slots(window).filter(|&slot| self.table.own_page(slot).is_none()).count() as u32
    }

    pub(super) fn slots(&self, window: Window) -> impl ExactSizeIterator<Item = Slot> + use<> {
        let index = |addr: u64| self.table.slot_index(window.range, addr);
        (index(window.start)..index(window.end - 1) + 1).map(move |index| Slot { range: window.range, index })
    }

    /// Puts pages behind every slot of the window.
    fn fill(&mut self, window: Window) -> Result<OrUnfilled> {
        let mut supply = std::mem::take(&mut self.memory.supply);
        supply.begin(self.slots(window).filter(|&slot| self.table.own_page(slot).is_none()));
        let outcome = self.fill_gaps(&mut supply);
        self.memory.supply = supply;
        outcome
    }

    fn fill_gaps(&mut self, supply: &mut Supply) -> Result<OrUnfilled> {
        let has_slack = !self.aim.is_without_new() && self.slack() > 0.0;
        if has_slack || !self.takes_by_size() {
            self.take_spare(supply, 1);
        }
        let grows = has_slack && self.is_within_slack(supply);
        let first = if grows { self.grow(supply).map(drop) } else { Ok(()) };
        let taken = first.and_then(|()| self.take(supply));
        let obtained = taken.and_then(|()| self.obtain_rest(supply));
        if let Ok(Ok(())) = obtained {
            if supply.pages.iter().any(|supplied| supplied.from.is_some()) {
                self.record_takes();
            }
            self.map(&mut supply.pages)?;
        } else {
            // What was got for nothing goes back, so that a failed request changes nothing.
            supply.pages.iter().for_each(|supplied| self.put_back(supplied.page, supplied.from));
            supply.created.iter().for_each(|&page| self.release_new(page));
        }
        obtained
    }

    /// Gets what this heap does not have, from others and from the driver.
    fn obtain_rest(&mut self, supply: &mut Supply) -> Result<OrUnfilled> {
        if supply.slots_needed == 0 {
            return Ok(Ok(()));
        }
        if std::mem::take(&mut self.own_page) {
            // Where there is no memory for it, it is not tried again either.
            self.table.contention.note_own(self.request.heap);
            if self.grow(supply)?.is_ok() {
                return Ok(Ok(()));
            }
        }
        if !self.asks_others && self.device.heaps.len() > 1 {
            return Ok(Err(Unfilled::NotAlone));
        }
        if supply.slots_needed > 0
            && let Some(unfilled) = self.other_window(supply)
        {
            return Ok(Err(unfilled));
        }
        Ok(self.grow(supply)?.map_err(Unfilled::OutOfMemory))
    }

    /// How many slots are filled and taken together: as many as new pages have, or as gaps must have. If memory counts,
    /// none beyond the request first; if it is short, then so many that every page has room.
    pub(super) fn unit(&self) -> u32 {
        match (self.aim.is_memory(), self.whole_pages) {
            (true, false) => 1,
            (true, true) => PageSizes::SLOTS_MAX,
            _ => self.table.page_sizes.slots(self.table.reserved_all().current).max(self.aim.gap_slots()),
        }
    }

    /// Whether pages of the heap itself may be taken.
    pub(super) fn takes_own(&self) -> bool {
        self.request.pool.is_default() || !lock(&self.device.pools).is_fixed(self.request.pool)
    }

    /// The percentage that may be reserved beyond what is active.
    fn slack(&self) -> f64 {
        lock(&self.device.shared().settings).paged_slack
    }

    /// Whether more may be reserved before pages are taken from elsewhere.
    fn is_within_slack(&self, supply: &Supply) -> bool {
        let peak = self.device.peak_active_bytes(self.request.heap);
        let after = self.table.reserved_all().current + u64::from(supply.slots_needed) * self.table.slot_bytes;
        after <= peak.saturating_add(share_of(peak, self.slack() / 100.0))
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
        let first = FIRST[kind as usize] / u64::from(1 + self.request.heap / FIRST_HEAPS).next_power_of_two();
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

/// The pages that are wholly in free blocks of a heap, if those may be taken, and the spare ones.
fn find_free_pages(table: &PageTable, heap: &Heap, takes_own: bool, free: &mut PageSet) {
    free.clear_for(table.pages_end());
    free.extend(table.spare_pages());
    if takes_own {
        table.add_free_pages(heap, free);
    }
}
