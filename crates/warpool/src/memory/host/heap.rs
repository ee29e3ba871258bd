//! The heap: shards, each under its own lock, and the ledger of the totals over all shards.
//!
//! A thread uses the shard with the index of its front cache: segments that it pins are added there. Threads that
//! allocate and free at the same time therefore rarely wait for each other. Memory is not divided between them: before
//! anything is pinned, all shards are searched. A spare segment of another shard moves to the thread's own; if only
//! part of a segment is free, the thread searches that shard second from then on.
//!
//! Lock order: several shards are locked in ascending order, or with `try_lock` only; the ledger is a leaf.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use warpool_driver::DeviceId;

use super::Shared;
use super::block::{BlockOwner, PinnedBlock};
use super::ledger::{CapExceeded, Ledger};
use super::pin::PinnedRange;
use super::shard::{Piece, Segment, SegmentUse, Shard};
use super::size_class::Fit;
use super::stats::HostStats;
use crate::memory::{PinnedSettings, Stack, Stat};
use crate::sync::try_lock;
use crate::{lock, steps};

/// All pinned memory of an allocator.
pub(super) struct Heap {
    shards: Box<[Aligned]>,
    /// Which shards have ever had a segment: a search does not touch the others.
    used: Box<[AtomicBool]>,
    totals: Totals,
}

/// The totals of all shards. On cache lines of its own, because every call reads the neighbouring fields.
#[repr(align(128))]
#[derive(Default)]
struct Totals {
    ledger: Mutex<Ledger>,
    /// Signalled when a segment is no longer in transit.
    transit_ended: Condvar,
    /// How often a thread had to wait for the lock of a shard.
    waits: AtomicU64,
}

/// A shard on cache lines of its own.
#[repr(align(128))]
struct Aligned {
    shard: Mutex<Shard>,
    /// The shard that threads of this shard search second.
    preferred: AtomicU32,
}

/// All shards and the ledger, locked.
pub(super) struct LockedHeap<'a> {
    shards: Vec<MutexGuard<'a, Shard>>,
    ledger: MutexGuard<'a, Ledger>,
}

/// A segment that is being unpinned, and the shard that it is from.
pub(super) struct InTransit {
    segment: Segment,
    shard: usize,
}

impl InTransit {
    pub(super) fn range(&self) -> &PinnedRange {
        self.segment.range()
    }
}

impl Aligned {
    fn new(index: u32) -> Self {
        Self { shard: Mutex::default(), preferred: AtomicU32::new(index) }
    }
}

/// A segment that was just pinned.
pub(super) struct NewSegment {
    pub(super) serves: SegmentUse,
    /// The device that it counts for.
    pub(super) device: DeviceId,
    pub(super) range: PinnedRange,
    pub(super) stack: Option<Stack>,
    /// How long pinning took.
    pub(super) duration: Duration,
}

impl Heap {
    /// Creates `shards` shards, a power of two.
    pub(super) fn new(shards: usize) -> Self {
        Self {
            shards: (0..shards as u32).map(Aligned::new).collect(),
            used: (0..shards).map(|_| AtomicBool::new(false)).collect(),
            totals: Totals::default(),
        }
    }

    /// A block for a thread whose shard is `own`: from that shard, or from the preferred one if no thread has it
    /// locked.
    pub(super) fn take(&self, own: usize, fit: &Fit, shared: &Arc<Shared>) -> Option<Arc<PinnedBlock>> {
        let found = self.lock_shard(own).take(fit, BlockOwner { shared, shard: own });
        let preferred = self.preferred(own).load(Ordering::Relaxed) as usize;
        if found.is_some() || preferred == own {
            return found;
        }
        try_lock(&self.shards[preferred].shard)?.take(fit, BlockOwner { shared, shard: preferred })
    }

    /// A block from another shard that no thread has locked. A spare segment moves to `own`; otherwise that shard
    /// becomes the preferred one.
    pub(super) fn take_from_others(&self, own: usize, fit: &Fit, shared: &Arc<Shared>) -> Option<Arc<PinnedBlock>> {
        let preferred = self.preferred(own).load(Ordering::Relaxed) as usize;
        // Each thread searches in another order, so that threads do not all start with the same shard.
        let others = (1..self.shards.len()).map(|step| own ^ step).filter(|&other| other != preferred);
        for other in others.filter(|&other| self.used[other].load(Ordering::Relaxed)) {
            steps::count();
            let Some(mut theirs) = try_lock(&self.shards[other].shard) else { continue };
            let Some(range) = theirs.find(fit) else { continue };
            if let Some(start) = theirs.spare_of(range)
                && let Some(mut mine) = try_lock(&self.shards[own].shard)
                && let Some(segment) = theirs.remove(start)
            {
                self.preferred(own).store(own as u32, Ordering::Relaxed);
                self.mark_used(own);
                mine.insert(segment);
                return Some(mine.take_from(start, fit, BlockOwner { shared, shard: own }));
            }
            self.preferred(own).store(other as u32, Ordering::Relaxed);
            return Some(theirs.split(range, fit, BlockOwner { shared, shard: other }));
        }
        None
    }

    /// Marks a shard that is about to get a segment as used.
    fn mark_used(&self, shard: usize) {
        // Written once, so that the flags stay in every core's cache.
        if !self.used[shard].load(Ordering::Relaxed) {
            self.used[shard].store(true, Ordering::Relaxed);
        }
    }

    fn preferred(&self, own: usize) -> &AtomicU32 {
        &self.shards[own].preferred
    }

    /// A block from any shard, `own` first. Waits for locks.
    pub(super) fn take_from_all(&self, own: usize, fit: &Fit, shared: &Arc<Shared>) -> Option<Arc<PinnedBlock>> {
        let take = |shard| self.lock_shard(shard).take(fit, BlockOwner { shared, shard });
        (own..self.shards.len()).chain(0..own).find_map(take)
    }

    /// Adds a segment whose quota was reserved to a shard.
    pub(super) fn add(&self, shard: usize, segment: NewSegment) {
        self.mark_used(shard);
        self.add_locked(&mut self.lock_shard(shard), segment);
    }

    /// As [`add`](Self::add), and splits a block off the segment.
    pub(super) fn add_and_take(
        &self,
        shard: usize,
        segment: NewSegment,
        fit: &Fit,
        shared: &Arc<Shared>,
    ) -> Arc<PinnedBlock> {
        let start = segment.range.start();
        self.preferred(shard).store(shard as u32, Ordering::Relaxed);
        self.mark_used(shard);
        let mut locked = self.lock_shard(shard);
        self.add_locked(&mut locked, segment);
        locked.take_from(start, fit, BlockOwner { shared, shard })
    }

    fn add_locked(&self, shard: &mut Shard, segment: NewSegment) {
        let NewSegment { serves, device, range, stack, duration } = segment;
        lock(&self.totals.ledger).pinned(serves, range.bytes(), duration);
        shard.add(serves, device, range, stack);
    }

    /// Merges free blocks. `merged` is called with each under its shard's lock, and with the start of its segment if
    /// that is spare now. Returns the pieces for the caller to drop without a lock: the last block of an allocator that
    /// is gone drops the allocator's state.
    pub(super) fn merge(
        &self,
        blocks: &[Arc<PinnedBlock>],
        mut merged: impl FnMut(&PinnedBlock, Option<u64>),
    ) -> Vec<Option<Piece>> {
        let mut pieces = Vec::with_capacity(blocks.len());
        for same_shard in blocks.chunk_by(|one, next| one.shard() == next.shard()) {
            let wrong = usize::from(crate::defect::Defect::HostFreesToWrongShard.is_on());
            let mut shard = self.lock_shard((same_shard[0].shard() + wrong) % self.shards.len());
            for block in same_shard {
                steps::count();
                let (spare, piece) = shard.merge(block);
                merged(block, spare);
                pieces.push(piece);
            }
        }
        pieces
    }

    /// Counts a segment of `least` to `most` bytes against the caps, before it is pinned. Returns how many bytes.
    pub(super) fn reserve_quota(
        &self,
        least: u64,
        most: u64,
        device: DeviceId,
        settings: &PinnedSettings,
    ) -> Result<u64, CapExceeded> {
        lock(&self.totals.ledger).reserve_quota(least, most, device, settings)
    }

    /// Releases the quota of a segment that was not pinned, or is unpinned.
    pub(super) fn release_quota(&self, device: DeviceId, bytes: u64) {
        lock(&self.totals.ledger).release_quota(device, bytes);
    }

    /// Spare segments of a device, or of all: size and start, smallest first.
    pub(super) fn spare(&self, device: Option<DeviceId>) -> Vec<(u64, u64)> {
        let mut spare = Vec::new();
        for shard in &self.shards {
            spare.extend(lock(&shard.shard).spare(device));
        }
        spare.sort_unstable();
        spare
    }

    /// Removes a segment to be unpinned, if it is free. It is removed before the driver call, because afterwards
    /// another thread may get the same address.
    pub(super) fn begin_transit(&self, start: u64) -> Option<InTransit> {
        for (index, shard) in self.shards.iter().enumerate() {
            let mut shard = lock(&shard.shard);
            if let Some(segment) = shard.remove(start) {
                lock(&self.totals.ledger).begin_transit(segment.range().bytes());
                return Some(InTransit { segment, shard: index });
            }
        }
        None
    }

    /// Ends the transit of a segment: it was unpinned in `duration`, or unpinning failed and it is put back.
    pub(super) fn end_transit(&self, in_transit: InTransit, duration: Option<Duration>) {
        let InTransit { segment, shard } = in_transit;
        {
            let mut shard = lock(&self.shards[shard].shard);
            lock(&self.totals.ledger).end_transit(&segment, duration);
            if duration.is_none() {
                shard.insert(segment);
            }
        }
        self.totals.transit_ended.notify_all();
    }

    /// How many transits of segments have ended.
    pub(super) fn transits_ended(&self) -> u64 {
        lock(&self.totals.ledger).transits_ended()
    }

    /// Waits until a transit ends, if at least `bytes` are in transit. Returns at once if one has ended since
    /// `transits_ended` was read. Returns `false` without waiting if neither holds.
    pub(super) fn await_transit(&self, transits_ended: u64, bytes: u64) -> bool {
        let ledger = lock(&self.totals.ledger);
        if ledger.transits_ended() != transits_ended {
            return true;
        }
        let waits = ledger.bytes_in_transit() >= bytes;
        if waits {
            drop(self.totals.transit_ended.wait(ledger).unwrap_or_else(PoisonError::into_inner));
        }
        waits
    }

    /// Waits until no segment is in transit.
    pub(super) fn wait_for_transit(&self) {
        let mut ledger = lock(&self.totals.ledger);
        while ledger.bytes_in_transit() > 0 {
            ledger = self.totals.transit_ended.wait(ledger).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn bytes_pinned(&self) -> u64 {
        lock(&self.totals.ledger).bytes_pinned()
    }

    /// Bytes of segments for small requests.
    pub(super) fn bytes_small(&self) -> u64 {
        lock(&self.totals.ledger).bytes_small()
    }

    /// Whether nothing is pinned, in transit or not.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.totals.ledger).is_empty()
    }

    pub(super) fn has_reserve(&self) -> bool {
        lock(&self.totals.ledger).has_reserve()
    }

    /// The block that contains an address; `own` is searched first.
    pub(super) fn block_with(&self, own: usize, ptr: u64) -> Option<Arc<PinnedBlock>> {
        let find = |shard: usize| self.lock_shard(shard).block_with(ptr).cloned();
        (own..self.shards.len()).chain(0..own).find_map(find)
    }

    /// Removes all segments and blocks, for the caller to drop without a lock. The ledger stays for segments in
    /// transit.
    pub(super) fn close(&self) -> Vec<impl Sized> {
        self.shards.iter().map(|shard| lock(&shard.shard).close()).collect()
    }

    pub(super) fn for_each_stat(&self, act: fn(&mut Stat)) {
        lock(&self.totals.ledger).for_each_stat(act);
    }

    pub(super) fn reset_accumulated_stats(&self) {
        lock(&self.totals.ledger).reset_accumulated_stats();
    }

    pub(super) fn lock_all(&self) -> LockedHeap<'_> {
        let shards = self.shards.iter().map(|shard| lock(&shard.shard)).collect();
        LockedHeap { shards, ledger: lock(&self.totals.ledger) }
    }

    /// How often a thread had to wait for the lock of a shard.
    pub(super) fn waits(&self) -> u64 {
        self.totals.waits.load(Ordering::Relaxed)
    }

    fn lock_shard(&self, shard: usize) -> MutexGuard<'_, Shard> {
        let mutex = &self.shards[shard].shard;
        try_lock(mutex).unwrap_or_else(|| {
            self.totals.waits.fetch_add(1, Ordering::Relaxed);
            lock(mutex)
        })
    }
}

impl LockedHeap<'_> {
    /// Segments, by address.
    pub(super) fn segments(&self) -> BTreeMap<u64, &Segment> {
        self.shards.iter().flat_map(|shard| shard.segments()).map(|(&start, segment)| (start, segment)).collect()
    }

    /// Every block, allocated or in a cache.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Arc<PinnedBlock>> {
        self.shards.iter().flat_map(|shard| shard.blocks())
    }

    /// Adds the counters of pinned memory and the free bytes.
    pub(super) fn add_to(&self, stats: &mut HostStats, device_count: u32) {
        self.ledger.add_to(stats);
        stats.cached_bytes += self.shards.iter().map(|shard| shard.bytes_free()).sum::<u64>();
        stats.pinned_bytes_by_device = vec![0; device_count as usize];
        for segment in self.shards.iter().flat_map(|shard| shard.segments().values()) {
            stats.pinned_bytes_by_device[segment.device().0 as usize] += segment.range().bytes();
        }
    }

    /// Panics if an invariant does not hold.
    pub(super) fn check(&self) {
        let mut pinned = BTreeMap::<DeviceId, (u64, u64)>::new();
        for (index, shard) in self.shards.iter().enumerate() {
            shard.check(index);
            for segment in shard.segments().values() {
                let (bytes, count) = pinned.entry(segment.device()).or_default();
                *bytes += segment.range().bytes();
                *count += 1;
            }
        }
        self.ledger.check(&pinned);
    }
}
