//! The physical pages of a device: which there are, where they are mapped, and where their contents belong.
//!
//! Addresses are divided into *slots* of 2 MiB (the driver's granularity). A *page* is a physical allocation of one,
//! two or four slots, mapped whole. It may be mapped at several addresses at once, but it *belongs* to at most one of
//! them: only blocks there may use it. The other mappings are *old* ones, of addresses that the page was taken from.
//! They are kept for a while: programs repeat themselves, and a page that is taken back needs no driver call then.

mod check;
mod heaps;
mod in_heaps;
mod segments;
mod takes;

use std::collections::{BTreeSet, VecDeque};

use warpool_driver::PhysicalId;

use self::heaps::HeapPages;
use super::bystanders::Bystanders;
use super::homes::{Home, HomeCounters};
use super::needs::Needs;
use super::page_sizes::PageSizes;
use super::pools::SegmentSource;
use super::unused_heaps::UnusedHeaps;
use crate::memory::{MemPoolId, PageTotals, SegmentKind, Stat, StatByKind};

use super::ids::HeapId;
pub(super) use super::ids::{PageId, RangeId};
pub(super) use super::slot::{Mapping, PagePart, Slot, SlotState, index_of};

#[derive(Debug)]
pub(super) struct Page {
    pub(super) physical: PhysicalId,
    /// Its size in slots.
    pub(super) slots: u32,
    /// Where it belongs: its first slot.
    pub(super) home: Option<Slot>,
    /// Where it is mapped, the oldest first; with its home, if it has one.
    pub(super) mapped: Vec<Slot>,
}

/// A range of addresses and what is mapped in it.
#[derive(Debug)]
pub(super) struct RangeMap {
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) heap: HeapId,
    pub(super) kind: SegmentKind,
    /// As far as anything was ever mapped.
    slots: Vec<SlotState>,
    /// Where it comes from, if it is a segment: backed as a whole, without pages.
    segment: Option<SegmentSource>,
}

/// All pages of a device.
#[derive(Debug)]
pub(super) struct PageTable {
    /// The size of a slot: a power of two.
    pub(super) slot_bytes: u64,
    pub(super) page_sizes: PageSizes,
    /// By number.
    pages: Vec<Option<Page>>,
    unused: Vec<PageId>,
    /// How many pages there are of 1, 2 and 4 slots.
    count_by_slots: [usize; 3],
    ranges: Vec<RangeMap>,
    /// Numbers of removed segments, to be used again.
    unused_ranges: Vec<RangeId>,
    /// Bytes of segments, and those that sources are being asked for.
    segment_bytes: u64,
    calls_bytes: u64,
    /// Bytes of segments that sources are getting back.
    returning_bytes: u64,
    /// Bytes of segments whose memory sleeps.
    pub(super) bytes_asleep: u64,
    /// Pages that belong nowhere and that no work uses, but for bystanders' (`bystanders.rs`), with their sizes in
    /// slots. Old mappings of them may be left.
    spare: BTreeSet<(u32, PageId)>,
    /// Pages that belong nowhere and are to be released, once no work uses them any more.
    pub(super) leaving: Vec<PageId>,
    /// Old mappings to be undone: each is mapped, and its page does not belong there.
    pub(super) old: VecDeque<(PageId, Slot)>,
    /// By number.
    heaps: Vec<HeapPages>,
    /// Heaps with pages that are free as a whole, and what is free beside large blocks in all heaps; as of the last
    /// look at each.
    with_free_pages: BTreeSet<HeapId>,
    bytes_in_parts: u64,
    /// Heaps of which pages were taken, or that got some, since.
    changed: Vec<HeapId>,
    /// How many requests needed pages, and when heaps were used, in requests: the earliest first.
    requests: u64,
    uses: VecDeque<(u64, HeapId)>,
    /// How many pages were returned to the driver.
    released: u64,
    /// Physical memory whose release failed.
    pub(super) to_release: Vec<(PhysicalId, u64)>,
    /// Mappings that could not be undone: their slots are [`Mapping::Broken`].
    pub(super) broken: Vec<(Slot, u32)>,
    /// Bytes of pages, by the kind of the area that they belong to; of unmapped ones, large.
    pub(super) reserved: StatByKind,
    pub(super) homes: HomeCounters,
    pub(super) bystanders: Bystanders,
    pub(super) unused_heaps: UnusedHeaps,
    pub(super) needs: Needs,
    pub(super) totals: PageTotals,
}

impl RangeMap {
    fn new(base: u64, bytes: u64, heap: HeapId, kind: SegmentKind, segment: Option<SegmentSource>) -> Self {
        Self { base, bytes, heap, kind, slots: Vec::new(), segment }
    }
}

impl Page {
    pub(super) fn is_mapped_at(&self, slot: Slot) -> bool {
        self.mapped.contains(&slot)
    }
}

impl PageTable {
    pub(super) fn new(slot_bytes: u64) -> Self {
        assert!(slot_bytes.is_power_of_two(), "a slot of {slot_bytes} bytes");
        Self {
            slot_bytes,
            page_sizes: PageSizes::default(),
            pages: Vec::new(),
            unused: Vec::new(),
            count_by_slots: [0; 3],
            ranges: Vec::new(),
            unused_ranges: Vec::new(),
            segment_bytes: 0,
            bytes_asleep: 0,
            calls_bytes: 0,
            returning_bytes: 0,
            spare: BTreeSet::new(),
            leaving: Vec::new(),
            old: VecDeque::new(),
            heaps: Vec::new(),
            with_free_pages: BTreeSet::new(),
            bytes_in_parts: 0,
            changed: Vec::new(),
            requests: 0,
            uses: VecDeque::new(),
            released: 0,
            to_release: Vec::new(),
            broken: Vec::new(),
            reserved: StatByKind::default(),
            homes: HomeCounters::default(),
            bystanders: Bystanders::default(),
            unused_heaps: UnusedHeaps::default(),
            needs: Needs::default(),
            totals: PageTotals::default(),
        }
    }

    /// One more than the highest number of a page.
    pub(super) fn pages_end(&self) -> usize {
        self.pages.len()
    }

    pub(super) fn exists(&self, id: PageId) -> bool {
        self.pages[id.index()].is_some()
    }

    pub(super) fn page(&self, id: PageId) -> &Page {
        self.pages[id.index()].as_ref().expect("a page that exists")
    }

    fn page_mut(&mut self, id: PageId) -> &mut Page {
        self.pages[id.index()].as_mut().expect("a page that exists")
    }

    pub(super) fn page_bytes(&self, id: PageId) -> u64 {
        u64::from(self.page(id).slots) * self.slot_bytes
    }

    pub(super) fn add_range(&mut self, base: u64, bytes: u64, heap: HeapId, kind: SegmentKind) -> RangeId {
        self.push_range(RangeMap::new(base, bytes, heap, kind, None))
    }

    fn push_range(&mut self, range: RangeMap) -> RangeId {
        let heap = range.heap;
        let number = if let Some(number) = self.unused_ranges.pop() {
            self.ranges[number.index()] = range;
            number
        } else {
            self.ranges.push(range);
            RangeId::at(self.ranges.len() - 1)
        };
        self.heap_mut(heap).ranges.push(number);
        number
    }

    /// The ranges of a heap, with their numbers, in the order in which it got them.
    fn ranges_of(&self, heap: HeapId) -> impl Iterator<Item = (RangeId, &RangeMap)> {
        let numbers = self.heap(heap).into_iter().flat_map(|heap| &heap.ranges);
        numbers.map(|&number| (number, self.range(number)))
    }

    pub(super) fn range(&self, range: RangeId) -> &RangeMap {
        &self.ranges[range.index()]
    }

    /// The range that contains an address, if it has pages.
    pub(super) fn range_with(&self, addr: u64) -> Option<RangeId> {
        let contains =
            |range: &RangeMap| range.segment.is_none() && (range.base..range.base + range.bytes).contains(&addr);
        self.ranges.iter().position(contains).map(RangeId::at)
    }

    pub(super) fn addr(&self, slot: Slot) -> u64 {
        self.range(slot.range).base + u64::from(slot.index) * self.slot_bytes
    }

    /// The number of the slot of an address in a range.
    #[inline]
    pub(super) fn slot_index(&self, range: RangeId, addr: u64) -> u32 {
        index_of(addr, self.range(range).base, self.slot_bytes)
    }

    pub(super) fn slot(&self, slot: Slot) -> SlotState {
        self.slots(slot.range).get(slot.index as usize).copied().unwrap_or_default()
    }

    /// The slots of a range that were ever mapped.
    pub(super) fn slots(&self, range: RangeId) -> &[SlotState] {
        &self.range(range).slots
    }

    /// The page that belongs to this slot.
    pub(super) fn own_page(&self, slot: Slot) -> Option<PageId> {
        self.slot(slot).own().map(|part| part.page)
    }

    /// Whether there are pages of at least this number of slots.
    pub(super) fn has_pages_of(&self, slots_min: u32) -> bool {
        self.count_by_slots[slots_min.ilog2() as usize..].iter().any(|&count| count > 0)
    }

    /// A new page, which is mapped nowhere.
    pub(super) fn add(&mut self, physical: PhysicalId, slots: u32) -> PageId {
        let page = Some(Page { physical, slots, home: None, mapped: Vec::new() });
        self.totals.created += 1;
        self.count_by_slots[slots.ilog2() as usize] += 1;
        self.reserved.increase(SegmentKind::Large, u64::from(slots) * self.slot_bytes);
        if let Some(id) = self.unused.pop() {
            self.pages[id.index()] = page;
            return id;
        }
        self.pages.push(page);
        PageId::at(self.pages.len() - 1)
    }

    /// Removes a page that is mapped nowhere. Returns its physical memory.
    pub(super) fn remove(&mut self, id: PageId) -> (PhysicalId, u64) {
        let page = self.pages[id.index()].take().expect("a page that exists");
        debug_assert!(page.mapped.is_empty() && page.home.is_none());
        self.totals.released += 1;
        self.released += 1;
        self.count_by_slots[page.slots.ilog2() as usize] -= 1;
        let bytes = u64::from(page.slots) * self.slot_bytes;
        self.reserved.decrease(SegmentKind::Large, bytes);
        self.unused.push(id);
        (page.physical, bytes)
    }

    /// Takes the largest spare page whose number of slots is in the range.
    pub(super) fn take_spare(&mut self, slots: std::ops::RangeInclusive<u32>) -> Option<PageId> {
        let found = self.spare.range(..(slots.end() + 1, PageId(0))).next_back().copied();
        let spare = found.filter(|(size, _)| size >= slots.start())?;
        self.spare.remove(&spare);
        Some(spare.1)
    }

    /// Takes this page, if it is a spare one.
    pub(super) fn take_spare_page(&mut self, id: PageId) -> bool {
        self.spare.remove(&(self.page(id).slots, id))
    }

    pub(super) fn put_spare(&mut self, id: PageId) {
        debug_assert!(self.page(id).home.is_none(), "{id:?} belongs nowhere");
        self.spare.insert((self.page(id).slots, id));
    }

    pub(super) fn spare_pages(&self) -> impl Iterator<Item = PageId> {
        self.spare.iter().map(|&(_, page)| page)
    }

    /// All pages that belong nowhere.
    pub(super) fn homeless_pages(&self) -> impl Iterator<Item = PageId> {
        self.spare_pages().chain(self.leaving.iter().copied())
    }

    /// A page was mapped at a slot.
    pub(super) fn set_mapped(&mut self, id: PageId, slot: Slot) {
        let slots = self.page(id).slots;
        let is_unmapped = |index: u32| self.slot(Slot { index, ..slot }).mapping == Mapping::Nothing;
        debug_assert!((slot.index..slot.index + slots).all(is_unmapped), "something is mapped at {slot:?}");
        #[expect(clippy::cast_possible_truncation, reason = "a page has at most four slots")]
        let part = |part: u32| PagePart { page: id, part: part as u8, slots: slots as u8, is_home: false };
        self.set_slots(slot, slots, |at| Mapping::Page(part(at)));
        self.page_mut(id).mapped.push(slot);
        self.totals.mapped += 1;
    }

    /// A mapping of a page was undone.
    pub(super) fn set_unmapped(&mut self, id: PageId, slot: Slot) {
        if self.page(id).home == Some(slot) {
            self.set_home(id, None);
        }
        self.set_slots(slot, self.page(id).slots, |_| Mapping::Nothing);
        self.old.retain(|&old| old != (id, slot));
        self.page_mut(id).mapped.retain(|&other| other != slot);
        self.totals.unmapped += 1;
    }

    /// A new mapping could not be undone: the slots are not used until that has worked.
    pub(super) fn set_broken(&mut self, slot: Slot, slots: u32) {
        self.set_slots(slot, slots, |_| Mapping::Broken);
        self.broken.push((slot, slots));
    }

    /// It was undone after all.
    pub(super) fn set_repaired(&mut self, slot: Slot, slots: u32) {
        self.set_slots(slot, slots, |_| Mapping::Nothing);
    }

    /// Something else is mapped in slots: `mapping` by their number from the first on.
    fn set_slots(&mut self, first: Slot, slots: u32, mapping: impl Fn(u32) -> Mapping) {
        let map = &mut self.ranges[first.range.index()];
        let end = (first.index + slots) as usize;
        if map.slots.len() < end {
            map.slots.resize(end, SlotState::default());
        }
        for (part, state) in (0..slots).zip(&mut map.slots[first.index as usize..end]) {
            *state = SlotState { mapping: mapping(part), taken: 0 };
        }
    }

    /// Whether a page belongs to slots where it is mapped; `taken` is the take that it was taken from there with.
    fn set_is_home(&mut self, id: PageId, slot: Slot, is_home: bool, taken: u64) {
        let slots = slot.index as usize..(slot.index + self.page(id).slots) as usize;
        for state in &mut self.ranges[slot.range.index()].slots[slots] {
            let Mapping::Page(part) = &mut state.mapping else { unreachable!("{id:?} is mapped at {slot:?}") };
            (part.is_home, state.taken) = (is_home, taken);
        }
    }

    /// A page at a slot, as it counts in the statistics.
    fn home_of(&self, id: PageId, slot: Slot) -> Home {
        let (range, slots) = (self.range(slot.range), self.page(id).slots);
        let beside = [slot.index.checked_sub(1), Some(slot.index + slots)];
        let beside = beside.into_iter().flatten().map(|index| Slot { index, ..slot });
        let neighbours = beside.filter(|&slot| self.own_page(slot).is_some()).count() as u64;
        Home {
            pool: self.heap(range.heap).map_or(MemPoolId::DEFAULT, |heap| heap.pool),
            kind: range.kind,
            bytes: self.page_bytes(id),
            neighbours,
        }
    }

    /// Makes a page belong to a slot where it is mapped, or to none.
    pub(super) fn set_home(&mut self, id: PageId, home: Option<Slot>) {
        let bytes = self.page_bytes(id);
        let kind =
            |table: &Self, slot: Option<Slot>| slot.map_or(SegmentKind::Large, |slot| table.range(slot.range).kind);
        let (from, to) = (kind(self, self.page(id).home), kind(self, home));
        if from != to {
            // Not a change of the sum.
            let all = self.reserved.all;
            self.reserved.decrease(from, bytes);
            self.reserved.increase(to, bytes);
            self.reserved.all = all;
        }
        if let Some(slot) = home {
            // What has passed there says nothing about the work to come.
            self.old.retain(|&old| old != (id, slot));
        }
        if let Some(before) = self.page(id).home {
            let counted = self.home_of(id, before);
            self.homes.removed(counted);
            let heap = self.range(before.range).heap;
            let taken = self.heap_mut(heap).takes.take();
            self.set_is_home(id, before, false, taken);
        }
        self.page_mut(id).home = home;
        if let Some(slot) = home {
            self.set_is_home(id, slot, true, 0);
            let home = self.home_of(id, slot);
            self.homes.added(home);
        }
    }

    /// Whether a page is still mapped at a slot where it does not belong.
    pub(super) fn is_old_mapping(&self, id: PageId, slot: Slot) -> bool {
        let page = self.pages.get(id.index()).and_then(Option::as_ref);
        page.is_some_and(|page| page.home != Some(slot) && page.is_mapped_at(slot))
    }

    /// Whether nothing is mapped anywhere.
    pub(super) fn has_no_mappings(&self) -> bool {
        self.ranges.iter().flat_map(|map| &map.slots).all(|state| state.mapping == Mapping::Nothing)
    }

    /// Every mapping of pages that belong to no or another slot.
    pub(super) fn bytes_mapped_twice(&self) -> u64 {
        let extra = |page: &Page| page.mapped.len().saturating_sub(1) as u64 * u64::from(page.slots) * self.slot_bytes;
        self.pages.iter().flatten().map(extra).sum()
    }

    pub(super) fn count(&self) -> u64 {
        self.count_by_slots.iter().sum::<usize>() as u64
    }

    /// Bytes of pages.
    pub(super) fn bytes_of_pages(&self) -> u64 {
        self.reserved.all.current - self.segment_bytes
    }

    /// Bytes of pages without those that are to leave.
    pub(super) fn bytes_staying(&self) -> u64 {
        self.bytes_of_pages() - self.leaving.iter().map(|&page| self.page_bytes(page)).sum::<u64>()
    }

    /// All pages are needed at this moment.
    pub(super) fn note_all_needed(&mut self) {
        self.needs.note(self.bytes_staying());
    }

    /// What is reserved, as statistics have it: what sleeps is not.
    pub(super) fn bytes_awake(&self) -> u64 {
        self.reserved.all.current.saturating_sub(self.bytes_asleep)
    }

    /// What other processes are told: with what the driver did not take back, and without what is being returned to a
    /// source at this moment.
    pub(super) fn bytes_held(&self) -> u64 {
        (self.bytes_awake() + self.bytes_unreturned()).saturating_sub(self.returning_bytes)
    }

    /// Memory that the driver did not take back.
    fn bytes_unreturned(&self) -> u64 {
        self.to_release.iter().map(|(_, bytes)| bytes).sum()
    }

    /// What counts against what others leave.
    pub(super) fn bytes_shared(&self) -> u64 {
        self.bytes_limited().saturating_add(self.bytes_unreturned())
    }

    /// What counts against the limit: what is reserved, and what sources are being asked for.
    pub(super) fn bytes_limited(&self) -> u64 {
        self.bytes_awake().saturating_add(self.calls_bytes)
    }

    pub(super) fn reserved_all(&self) -> Stat {
        self.reserved.all
    }

    /// Ranges with mappings, for access by another device: runs of slots.
    pub(super) fn mapped_runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for page in self.pages.iter().flatten() {
            runs.extend(page.mapped.iter().map(|&slot| (self.addr(slot), u64::from(page.slots) * self.slot_bytes)));
        }
        runs
    }
}
