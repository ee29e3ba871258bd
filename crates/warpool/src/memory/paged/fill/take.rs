//! Taking pages for a window, and the order between streams: before a stream uses pages of another one, it waits for
//! the work that may still use them. The device waits, not the host.

use std::collections::{BTreeMap, BTreeSet};

use warpool_driver::{EventId, StreamId};

use super::Fill;
use crate::defect::Defect;
use crate::memory::Action;
use crate::memory::paged::ids::{HeapId, PageId};
use crate::memory::paged::old_mappings;
use crate::memory::paged::pending::PendingFrees;
use crate::memory::paged::pools::Takeable;
use crate::memory::paged::slot::Slot;
use crate::memory::paged::stream_tail::Tail;
use crate::memory::paged::supply::Supply;
use crate::memory::paged::take::{put_back, take_free};
use crate::memory::paged::window::Window;
use crate::memory::stream_fence::{self, Recorded};
use crate::{Result, lock};

impl Fill<'_> {
    /// Pages that are still mapped in the window, and belong to free blocks or to nothing, belong to the window again.
    pub(super) fn take_back(&mut self, window: Window) -> Result<()> {
        let end = self.table.slot_index(window.range, window.end - 1) + 1;
        let old = self.slots(window).filter_map(|slot| {
            let part = self.table.slot(slot).old()?;
            let slots = u32::from(part.slots);
            let is_within = slot.index + slots <= end && slot.index % self.border + slots <= self.border;
            (part.part == 0 && is_within).then_some((part.page, slot))
        });
        let mut old: BTreeMap<PageId, Slot> = old.collect();
        if old.is_empty() {
            return Ok(());
        }
        let (mut taken, mut by_heap) = (Vec::new(), BTreeSet::<HeapId>::new());
        for &page in old.keys() {
            if let Some(home) = self.table.page(page).home {
                by_heap.insert(self.table.range(home.range).heap);
            } else if self.table.take_spare_page(page) {
                self.needs_bystanders = true;
                taken.push(page);
            }
        }
        if !self.takes_own() {
            by_heap.remove(&self.request.heap);
        }
        let mut outcome = Ok(());
        for number in by_heap {
            let from_heap = self.take_pages(number, |_, page| old.contains_key(&page));
            let ordered =
                if number == self.request.heap { Ok(true) } else { self.order_after_heap(number, &from_heap) };
            if matches!(ordered, Ok(true)) {
                taken.extend(from_heap.into_iter().map(|(page, _)| page));
            } else {
                self.put_pages_back(from_heap.into_iter().map(|(page, slot)| (page, Some(slot))));
                outcome = outcome.and(ordered.map(drop));
            }
        }
        let heap = self.cell.lock();
        for page in taken {
            let Some(slot) = old.remove(&page) else { continue };
            self.table.set_home(page, Some(slot));
            self.table.totals.taken_back += 1;
            let bytes = self.table.page_bytes(page);
            self.device.record(Action::SegmentMap, self.table.addr(slot), bytes, &heap, self.details);
        }
        outcome
    }

    /// Takes spare pages of at least `slots_min` slots, the largest first.
    pub(super) fn take_spare(&mut self, supply: &mut Supply, slots_min: u32) {
        while supply.slots_needed > 0
            && let Some(page) = self.table.take_spare(slots_min..=supply.next_max())
        {
            self.needs_bystanders = true;
            supply.add(page, self.table.page(page).slots, None);
        }
    }

    /// Takes pages of at least `slots_min` slots of this heap, if its pages may be taken.
    pub(super) fn take_own(&mut self, supply: &mut Supply, slots_min: u32) {
        if self.takes_own() {
            self.take_from(self.request.heap, supply, slots_min);
        }
    }

    fn take_from(&mut self, number: HeapId, supply: &mut Supply, slots_min: u32) -> Vec<(PageId, Slot)> {
        self.take_pages(number, |(slot, slots), page| {
            let is_wanted = slots >= slots_min && slots <= supply.next_max();
            if is_wanted {
                supply.add(page, slots, Some(slot));
            }
            is_wanted
        })
    }

    /// Takes the free pages of a heap that `wants` wants, by their slot and their size.
    pub(super) fn take_pages(
        &mut self,
        number: HeapId,
        mut wants: impl FnMut((Slot, u32), PageId) -> bool,
    ) -> Vec<(PageId, Slot)> {
        let wants = |table: &_, page, slot| {
            let table: &crate::memory::paged::pages::PageTable = table;
            wants((slot, table.page(page).slots), page)
        };
        let taken = take_free(self.device, self.table, number, self.details, wants);
        self.table.totals.taken += taken.len() as u64;
        taken
    }

    /// Returns pages to where they were, or to the spare ones.
    pub(super) fn put_pages_back(&mut self, pages: impl Iterator<Item = (PageId, Option<Slot>)>) {
        for (page, from) in pages {
            self.table.totals.taken -= u64::from(from.is_some());
            put_back(self.device, self.table, page, from, self.details);
        }
    }

    /// Takes pages of at least `slots_min` slots from other heaps. The request's stream waits, on the device, for the
    /// work of theirs.
    pub(super) fn take_from_others(&mut self, supply: &mut Supply, slots_min: u32) -> Result<()> {
        for number in self.other_heaps() {
            if supply.slots_needed == 0 {
                break;
            }
            // Taken first: the events are then after all work that ever used the pages.
            let before = supply.clone();
            let taken = self.take_from(number, supply, slots_min);
            if taken.is_empty() {
                continue;
            }
            let ordered = self.order_after_heap(number, &taken);
            if !matches!(ordered, Ok(true)) {
                *supply = before;
                self.put_pages_back(taken.into_iter().map(|(page, slot)| (page, Some(slot))));
                ordered?;
            }
        }
        Ok(())
    }

    /// Other heaps with free pages that may be taken.
    pub(super) fn other_heaps(&self) -> Vec<HeapId> {
        if self.request.capturing {
            return Vec::new();
        }
        let others = self.table.heaps_with_free_pages().filter(|&number| number != self.request.heap);
        others.filter(|&number| self.users_if_takeable(number).is_some()).collect()
    }

    /// The streams that may use the memory of another heap beside its own, if its pages may be taken.
    fn users_if_takeable(&self, number: HeapId) -> Option<Vec<StreamId>> {
        let pool = self.device.heaps.get(number).lock().pool;
        match lock(&self.device.pools).takeable(pool) {
            // Streams whose use of a pool was recorded may be destroyed once the pool is released.
            Takeable::After(users) if !self.may_name(&users) && lock(&self.device.pools).is_released(pool) => None,
            Takeable::After(users) => Some(users),
            Takeable::OnOom if self.request.on_oom && !Defect::ShortageLeavesPools.is_on() => Some(Vec::new()),
            Takeable::OnOom | Takeable::Never => None,
        }
    }

    fn may_name(&self, streams: &[StreamId]) -> bool {
        streams.iter().all(|&stream| self.device.instance().may_name(stream))
    }

    /// Makes the request's stream wait for the work of another heap and of the streams that use its memory beside its
    /// own, since pages of it were just taken. `false` if it must not be taken from, or a capture forbids it.
    fn order_after_heap(&mut self, number: HeapId, taken: &[(PageId, Slot)]) -> Result<bool> {
        if taken.is_empty() {
            return Ok(true);
        }
        let Some(users) = self.users_if_takeable(number) else { return Ok(false) };
        self.table.note_taken(number);
        if Defect::NoEventBetweenHeaps.is_on() {
            return Ok(true);
        }
        self.needs_bystanders = true;
        for stream in users.into_iter().filter(|&stream| stream != self.request.stream) {
            match stream_fence::record(&PendingFrees::new(self.device, self.details), stream)? {
                Recorded::Fenced(event) if self.wait_for(event.id())? => {}
                Recorded::AlreadyDone => {}
                Recorded::Fenced(_) | Recorded::CaptureActive => return Ok(false),
            }
        }
        if self.device.heaps.get(number).lock().stream == self.request.stream {
            return Ok(true);
        }
        match self.device.tail_of(number, self.details)? {
            Tail::Done => Ok(true),
            Tail::Event { event, .. } => self.wait_for(event.id()),
            Tail::Unknown => {
                let with_pages = self.table.heaps_with_free_pages();
                self.device.wait_for_unknown_work(with_pages.chain([number]))
            }
            Tail::CaptureActive => Ok(false),
        }
    }

    /// `false` if the request's stream captures, which another thread may have begun since the request came.
    fn wait_for(&self, event: EventId) -> Result<bool> {
        stream_fence::wait_for_event(&PendingFrees::new(self.device, self.details), self.request.stream, event)
    }

    /// If pages were taken that another stream used, makes the request's stream wait for bystanders, too
    /// (`bystanders.rs`). To be called at the end, whatever the outcome.
    pub(super) fn order_after_bystanders(&mut self) {
        if !self.needs_bystanders || self.request.capturing || Defect::NoEventBetweenHeaps.is_on() {
            return;
        }
        let except = [self.request.stream];
        for (stream, event) in old_mappings::bystander_events(self.device, self.table, &except, self.details) {
            if let Err(error) = self.wait_for(event.id()) {
                tracing::warn!(%error, %stream, "a stream takes pages without waiting for another one");
            }
        }
    }
}
