//! One device of the paged allocator: its heaps, pages, pools and statistics, each under its own lock.
//!
//! Locks, in the order in which they are taken: a range of elastic memory, the pages (both held while the driver is
//! called), the totals, a heap (a spin lock, held for one step), the history. A thread holds one heap at a time; only
//! checkpoints lock all heaps of a pool, by ascending number. Pools, scopes and fences are taken alone, or while the
//! pages are locked. User code runs with none of them.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use rustc_hash::FxHashMap;
use warpool_driver::{DevicePtr, StreamId};

use super::activity::Activity;
use super::address_space::AddressSpace;
use super::counters::{Added, Totals};
use super::elastic_table::ElasticTable;
use super::heap::Heap;
use super::heaps::Heaps;
use super::ids::{BlockId, HeapId, RangeInHeap};
use super::inactive::{self, Inactive, InactiveStats};
use super::last_heap::DeviceKey;
use super::left_addresses::LeftAddresses;
use super::pages::PageTable;
use super::pools::{PoolHeaps, Pools, SegmentSource};
use crate::ledger::CardShare;
use crate::memory::core::{AllocatorCore, DeviceCore};
use crate::memory::report::{EntryDetails, HistoryRecorder};
use crate::memory::stream_fence::StreamFences;
use crate::memory::{
    Action, Allocation, HistoryOptions, MemPoolId, PageTotals, Request, SegmentKind, SizeRules, StatByKind, Stats,
    UsagePart,
};
use crate::sync::spin_lock::SpinLock;
use crate::unwind::drop_user_value;
use crate::{Device, lock};

/// Names a block on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRef {
    pub(super) heap: HeapId,
    pub(super) block: BlockId,
}

impl BlockRef {
    /// As [`Allocation::slot`](crate::memory::Allocation): never 0.
    #[inline]
    pub(super) fn pack(self) -> u64 {
        (u64::from(self.heap.0) + 1) << 32 | u64::from(self.block.0)
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    pub(super) fn unpack(slot: u64) -> Option<Self> {
        let heap = ((slot >> 32) as u32).checked_sub(1)?;
        Some(Self { heap: HeapId(heap), block: BlockId(slot as u32) })
    }
}

/// Which heap is whose.
#[derive(Debug, Default)]
pub(super) struct HeapKeys {
    pub(super) by_key: FxHashMap<(StreamId, MemPoolId), HeapId>,
    /// Retired heaps, to be used again with their addresses.
    pub(super) idle: Vec<HeapId>,
}

/// Counts of what is not counted by heaps or pages.
#[derive(Debug, Default)]
pub(super) struct EventCounts {
    pub(super) retries: AtomicU64,
    pub(super) ooms: AtomicU64,
    pub(super) syncs: AtomicU64,
}

pub(super) struct PagedDevice {
    core: DeviceCore,
    pub(super) key: DeviceKey,
    pub(super) heaps: Heaps,
    /// Heaps in which something was allocated or freed since pages were last needed.
    pub(super) activity: Arc<Activity>,
    /// Locked while an event is recorded in a stream that has memory, so that its owner does not destroy it meanwhile
    /// (`stream_tail.rs`).
    pub(super) naming: Mutex<()>,
    pub(super) by_key: RwLock<HeapKeys>,
    pub(super) space: AddressSpace,
    pub(super) pages: Mutex<PageTable>,
    pub(super) pools: Mutex<Pools>,
    pub(super) elastic: ElasticTable,
    /// This process's part of the card, if processes share it.
    pub(super) card: OnceLock<CardShare>,
    /// Sources of removed pools and segments, to be dropped.
    removed: Mutex<Vec<SegmentSource>>,
    fences: Mutex<StreamFences<BlockRef>>,
    has_pending: AtomicBool,
    totals: Mutex<Totals>,
    inactive: Mutex<InactiveStats>,
    pub(super) counts: EventCounts,
    pub(super) history: SpinLock<HistoryRecorder>,
}

impl Deref for PagedDevice {
    type Target = DeviceCore;

    #[inline]
    fn deref(&self) -> &DeviceCore {
        &self.core
    }
}

impl PagedDevice {
    pub(super) fn new(shared: &Arc<AllocatorCore>, device: &Device) -> Self {
        let core = DeviceCore::new(shared, device);
        let slot_bytes = device.properties().granularity.max(super::SLOT_MIN);
        Self {
            key: DeviceKey::new(core.id),
            heaps: Heaps::new(),
            activity: Arc::default(),
            naming: Mutex::default(),
            by_key: RwLock::default(),
            space: AddressSpace::new(core.bytes_total),
            pages: Mutex::new(PageTable::new(slot_bytes)),
            pools: Mutex::new(Pools::new(core.id, PoolHeaps::default())),
            elastic: ElasticTable::default(),
            card: OnceLock::new(),
            removed: Mutex::default(),
            fences: Mutex::default(),
            has_pending: AtomicBool::new(false),
            totals: Mutex::default(),
            inactive: Mutex::default(),
            counts: EventCounts::default(),
            history: SpinLock::default(),
            core,
        }
    }
}

impl Drop for PagedDevice {
    /// If all memory was returned to the driver, a later call frees the addresses. What is still mapped stays: work may
    /// use it.
    fn drop(&mut self) {
        let pages = self.pages.get_mut().unwrap_or_else(PoisonError::into_inner);
        if pages.has_no_mappings() && !self.core.instance().is_inherited() {
            let left = self.core.instance().extensions().get_or_init(LeftAddresses::default);
            left.add(self.space.take_all());
            if let Some(share) = self.card.get() {
                share.leave();
            }
        }
    }
}

/// Heaps.
impl PagedDevice {
    /// No page belongs to a heap any more, and nothing is allocated in it: it can be used again for another stream or
    /// pool.
    pub(super) fn retire_heap(&self, table: &mut PageTable, number: HeapId) {
        let mut keys = self.by_key.write().unwrap_or_else(PoisonError::into_inner);
        let (stream, pool) = {
            let heap = self.heaps.get(number).lock();
            (heap.stream, heap.pool)
        };
        keys.by_key.remove(&(stream, pool));
        keys.idle.push(number);
        self.heaps.get(number).lock().set_no_owner();
        table.bystanders.heap_retired(number);
        table.note_changed(number);
        let removed = lock(&self.pools).remove_heap(pool, number);
        if let Some(removed) = removed {
            table.homes.forget_pool(pool);
            self.drop_later(removed.options.upstream.map(SegmentSource::Upstream));
        }
    }

    /// Removes released pools that have nothing left.
    pub(super) fn retire_empty(&self) {
        if !lock(&self.pools).has_released() {
            return;
        }
        let mut table = lock(&self.pages);
        let released = lock(&self.pools).released_heaps();
        for heap in released.into_iter().flat_map(|(_, heaps)| heaps) {
            let idle = self.heaps.get(heap).lock().is_idle();
            if idle && table.is_unmapped(heap) {
                self.retire_heap(&mut table, heap);
            }
        }
    }

    /// Leaves a value of the user to [`drop_removed`](Self::drop_removed): its destructor runs without a lock.
    pub(super) fn drop_later(&self, source: Option<SegmentSource>) {
        lock(&self.removed).extend(source);
    }

    /// Drops the sources of removed pools and segments. No lock may be held.
    pub(super) fn drop_removed(&self) {
        let removed = std::mem::take(&mut *lock(&self.removed));
        if !removed.is_empty() {
            drop_user_value(removed);
        }
    }

    /// The heap of a stream and pool, if there is one.
    pub(super) fn existing_heap(&self, stream: StreamId, pool: MemPoolId) -> Option<HeapId> {
        self.by_key.read().unwrap_or_else(PoisonError::into_inner).by_key.get(&(stream, pool)).copied()
    }

    /// The heap, if it is the one that the thread used last.
    #[inline]
    pub(super) fn last_heap(&self, number: HeapId) -> Option<&SpinLock<Heap>> {
        self.key.last_numbered(&self.heaps, number)
    }

    /// The heap of a request, if that is all it needs: it is for the default pool, nothing else is to be looked after,
    /// and the thread used that heap last.
    #[inline]
    pub(super) fn heap_of_plain(&self, request: &Request) -> Option<(HeapId, &SpinLock<Heap>)> {
        let is_plain = request.pool.is_none()
            && (1..SizeRules::REQUEST_TOO_LARGE).contains(&request.bytes)
            && self.is_undisturbed()
            && !self.instance().is_inherited();
        if is_plain { self.key.last_of(&self.heaps, request.stream, MemPoolId::DEFAULT) } else { None }
    }

    /// The heap of an address, if the thread used that last, and where in it the address is.
    #[inline(always)]
    pub(super) fn last_heap_at(&self, ptr: DevicePtr) -> Option<(&SpinLock<Heap>, SegmentKind, RangeInHeap)> {
        let (number, cell) = self.key.last(&self.heaps)?;
        let (kind, range) = self.space.locate_in(number, ptr)?;
        (!self.instance().is_inherited()).then_some((cell, kind, range))
    }

    /// Notes that the thread goes on with this heap, and collects the statistics of the one before.
    #[inline]
    pub(super) fn using(&self, heap: HeapId) {
        if self.last_heap(heap).is_none() {
            let (stream, pool) = {
                let heap = self.heaps.get(heap).lock();
                (heap.stream, heap.pool)
            };
            self.switch_to(heap, stream, pool);
        }
    }

    #[cold]
    pub(super) fn switch_to(&self, heap: HeapId, stream: StreamId, pool: MemPoolId) {
        if let Some(before) = self.key.note(&self.heaps, heap, stream, pool) {
            self.collect(before);
        }
    }

    fn collect(&self, heap: HeapId) {
        let mut totals = lock(&self.totals);
        totals.collect(self.heaps.get(heap).lock().counters());
    }

    /// Collects all heaps, and passes the totals and the sums of increases.
    pub(super) fn with_totals<R>(&self, act: impl FnOnce(&mut Totals, &Added) -> R) -> R {
        let (mut totals, mut added) = (lock(&self.totals), Added::default());
        for (_, heap) in self.heaps.iter() {
            let mut heap = heap.lock();
            totals.collect(heap.counters());
            added.add(heap.counters());
        }
        act(&mut totals, &added)
    }

    /// Computes the statistics of free parts, and passes them.
    fn with_inactive<R>(&self, act: impl FnOnce(&mut InactiveStats) -> R) -> R {
        let (mut stats, mut now) = (lock(&self.inactive), [Inactive::default(); 2]);
        for (_, heap) in self.heaps.iter() {
            let heap = heap.lock();
            for kind in [SegmentKind::Small, SegmentKind::Large] {
                let of_heap = inactive::inactive(&heap, kind);
                now[kind as usize].parts += of_heap.parts;
                now[kind as usize].bytes += of_heap.bytes;
            }
        }
        stats.set(now);
        act(&mut stats)
    }

    pub(super) fn reset_peak(&self) {
        self.with_totals(|totals, _| totals.reset_peak());
        self.with_inactive(|stats| stats.each(StatByKind::reset_peak));
        let mut table = lock(&self.pages);
        table.reserved.reset_peak();
        table.homes.reset_peak();
        lock(&self.pools).sleeping.reset_peak();
    }

    pub(super) fn reset_accumulated(&self) {
        self.with_totals(Totals::reset_accumulated);
        self.with_inactive(|stats| stats.each(StatByKind::reset_accumulated));
        let mut table = lock(&self.pages);
        table.reserved.reset_accumulated();
        table.homes.reset_accumulated();
        lock(&self.pools).sleeping.reset_accumulated();
        table.totals = PageTotals::default();
        for count in [&self.counts.retries, &self.counts.ooms, &self.counts.syncs] {
            count.store(0, Ordering::Relaxed);
        }
    }

    /// The next request looks its heap up.
    #[cold]
    pub(super) fn forget_last_heap(&self) {
        if let Some(last) = self.key.forget() {
            self.collect(last);
        }
    }

    pub(super) fn stats(&self) -> Stats {
        let mut stats = self.stats_without_inactive();
        self.with_inactive(|inactive| {
            (stats.inactive_split, stats.inactive_split_bytes) = (inactive.parts, inactive.bytes);
        });
        stats
    }

    /// The statistics but those of free parts, and memory by stream and pool, one part per heap.
    pub(super) fn usage(&self) -> (Stats, Vec<UsagePart>) {
        let part = |heap: &mut Heap| {
            let kinds = [SegmentKind::Small, SegmentKind::Large];
            let active = heap.counters().active_bytes();
            UsagePart {
                pool: heap.pool,
                stream: heap.stream_raw,
                bytes_reserved: active + heap.free_bytes(),
                bytes_allocated: kinds.map(|kind| heap.counters().allocated_bytes(kind)).iter().sum(),
                bytes_active: active,
                bytes_elastic: heap.elastic_bytes(),
            }
        };
        let parts = self.heaps.iter().map(|(_, heap)| part(&mut heap.lock())).collect();
        (self.stats_without_inactive(), parts)
    }

    fn stats_without_inactive(&self) -> Stats {
        let mut stats = Stats { max_split_size: -1, ..Stats::default() };
        self.with_totals(|totals, added| totals.write(added, &mut stats));
        let table = lock(&self.pages);
        stats.reserved_bytes = table.reserved;
        stats.segment = table.homes.segments;
        stats.reserved_bytes_by_private_pools.clone_from(&table.homes.by_pool);
        stats.num_device_alloc = table.totals.created + table.homes.segment_allocs;
        stats.num_device_free = table.totals.released + table.homes.segment_frees;
        drop(table);
        lock(&self.pools).sleeping.write(&mut stats);
        stats.num_alloc_retries = self.counts.retries.load(Ordering::Relaxed);
        stats.num_ooms = self.counts.ooms.load(Ordering::Relaxed);
        stats.num_sync_all_streams = self.counts.syncs.load(Ordering::Relaxed);
        stats
    }
}

/// Captures and pending frees.
impl PagedDevice {
    /// Reports an allocation to a driver that tracks suballocations: under the heap's lock, so that no other thread
    /// sees a block as allocated which is not reported yet.
    #[inline]
    pub(super) fn report_allocated(&self, allocation: &Allocation) {
        if self.shared().tracks_suballocations {
            self.driver().suballocated(allocation.ptr, allocation.bytes, allocation.stream);
        }
    }

    /// Reports that a block is about to be freed. Memory of a private pool may be a graph's, whose replays go on using
    /// it.
    #[inline]
    pub(super) fn report_free(&self, heap: &Heap, block: BlockId) {
        if self.shared().tracks_suballocations && heap.pool.is_default() {
            let block = heap.block(block);
            self.driver().suballocation_freed(DevicePtr(block.addr()), block.bytes());
        }
    }

    /// Whether nobody is told of allocations and frees.
    #[inline]
    pub(super) fn is_unobserved(&self) -> bool {
        !self.shared().tracks_suballocations && self.history_flags.is_off(self.observers())
    }

    /// Whether a history is recorded whose entries say no more than what happened and when, and nobody else is told of
    /// allocations and frees.
    #[inline]
    pub(super) fn only_records(&self) -> bool {
        !self.shared().tracks_suballocations && self.history_flags.is_plain(self.observers())
    }

    /// Whether a request for a stream is one for its default pool's heap: no scope, no capture, and no pending free
    /// that could be completed first.
    #[inline]
    pub(super) fn is_undisturbed(&self) -> bool {
        !self.has_pending() && !self.has_captures() && !self.scopes.is_any_open()
    }

    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        self.has_pending.load(Ordering::Relaxed)
    }

    pub(super) fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<BlockRef>) -> R) -> R {
        let mut fences = lock(&self.fences);
        let result = act(&mut fences);
        self.has_pending.store(!fences.is_empty(), Ordering::Relaxed);
        result
    }
}

/// The history.
impl PagedDevice {
    pub(super) fn record_history(&self, options: Option<&HistoryOptions>) {
        self.history.lock().history.set(options.cloned());
        self.history_flags.set(options);
    }

    /// Writes the entries of a free that is completed at once, if entries are recorded.
    #[inline]
    pub(super) fn record_free(&self, addr: u64, bytes: u64, heap: &Heap, details: &EntryDetails) {
        if !details.is_off() {
            self.history.lock().record_free(addr, bytes, heap.stream_raw, heap.pool, details);
        }
    }

    /// Writes the entry of an allocation while the device [only records](Self::only_records) it.
    #[inline]
    pub(super) fn record_plain_allocation(&self, addr: u64, bytes: u64, heap: &Heap, time_us: i64) {
        let mut recorder = self.history.lock();
        recorder.history.write_plain(Action::Alloc, addr, bytes, heap.stream_raw, heap.pool, time_us);
    }

    /// The same of a free that is completed at once.
    #[inline]
    pub(super) fn record_plain_free(&self, addr: u64, bytes: u64, heap: &Heap, time_us: i64) {
        self.history.lock().history.write_plain_free(addr, bytes, heap.stream_raw, heap.pool, time_us);
    }

    /// Writes an entry, if entries are recorded.
    #[inline]
    pub(super) fn record(&self, action: Action, addr: u64, bytes: u64, heap: &Heap, details: &EntryDetails) {
        if !details.is_off() {
            self.history.lock().record(action, addr, bytes, heap.stream_raw, heap.pool, details);
        }
    }

    /// Shows trackers the entries that they have not seen. No lock may be held.
    pub(super) fn report(&self) {
        if self.observers().tracked().is_empty() || std::thread::panicking() {
            return;
        }
        let entries = self.history.lock().take_unreported();
        if !entries.is_empty() {
            self.observers().track(self.id, &entries);
        }
    }
}
