//! Statistics: each heap counts for itself, and the device's figures are made of the heaps' when they are needed.
//!
//! A device's peak is not the sum of its heaps' peaks. So each heap keeps its own highest value since it was last
//! *collected*, and is collected when the calling thread goes on with another heap: until then no other heap changed,
//! as far as that thread is concerned. With one thread every figure is exact. With several, current values and sums
//! are exact whenever all heaps are at rest; a peak may miss what several threads held at the same moment.

use crate::memory::{SegmentKind, Stat, StatByKind, Stats};

const COUNT: usize = 0;
const BYTES: usize = 1;
const ACTIVE: usize = 2;
const ACTIVE_BYTES: usize = 3;
const REQUESTED: usize = 4;

pub(super) type Tally = [u64; 5];

/// Which sum of increases a metric has.
const ADDED: [usize; 5] = [0, 1, 0, 1, 2];

fn sum([small, large]: &[Tally; 2]) -> Tally {
    std::array::from_fn(|metric| small[metric] + large[metric])
}

/// The statistics of one heap.
#[derive(Debug, Default)]
pub(super) struct HeapCounters {
    /// Small, large: allocated blocks, their bytes, and the requested bytes of active ones.
    allocated: [[u64; 3]; 2],
    /// Small, large: pending frees, and their bytes. Active is what is allocated or pending.
    pending: [[u64; 2]; 2],
    /// Highest values since it was last collected: small, large, both.
    highest: [Tally; 3],
    /// Sums of all increases. Nothing is allocated without being active, so both have the same.
    added: [[u64; 3]; 2],
    /// The current values when it was last collected.
    collected: [Tally; 2],
    /// How many blocks and bytes can at least be allocated before a value is a new highest one: small, large,
    /// both. Frees give some back; set anew when one is used up.
    room: [[u64; 2]; 3],
}

impl HeapCounters {
    /// Counts an allocation.
    #[inline]
    pub(super) fn allocated(&mut self, kind: SegmentKind, bytes: u64, requested: u64) {
        for sums in [&mut self.added[kind as usize], &mut self.allocated[kind as usize]] {
            *sums = [sums[0] + 1, sums[1] + bytes, sums[2] + requested];
        }
        if use_room(&mut self.room[kind as usize], bytes) | use_room(&mut self.room[2], bytes) {
            self.raise_highest();
        }
    }

    /// Notes the values that are new highest ones.
    #[cold]
    fn raise_highest(&mut self) {
        let [small, large] = self.currents();
        for (kind, current) in [small, large, sum(&[small, large])].into_iter().enumerate() {
            let left: Tally = std::array::from_fn(|metric| {
                raise(&mut self.highest[kind][metric], current[metric]);
                self.highest[kind][metric] - current[metric]
            });
            // No allocation has fewer bytes than were requested.
            let bytes = left[BYTES].min(left[ACTIVE_BYTES]).min(left[REQUESTED]);
            self.room[kind] = [left[COUNT].min(left[ACTIVE]), bytes];
        }
    }

    /// A block is no longer allocated, but still active.
    pub(super) fn freed(&mut self, kind: SegmentKind, bytes: u64) {
        let (allocated, pending) = (&mut self.allocated[kind as usize], &mut self.pending[kind as usize]);
        allocated[0] -= 1;
        allocated[1] -= bytes;
        pending[0] += 1;
        pending[1] += bytes;
    }

    /// It is not active any more.
    pub(super) fn reclaimed(&mut self, kind: SegmentKind, bytes: u64, requested: u64) {
        let pending = &mut self.pending[kind as usize];
        pending[0] -= 1;
        pending[1] -= bytes;
        self.allocated[kind as usize][2] -= requested;
    }

    /// Both at once.
    #[inline]
    pub(super) fn freed_and_reclaimed(&mut self, kind: SegmentKind, bytes: u64, requested: u64) {
        let allocated = &mut self.allocated[kind as usize];
        *allocated = [allocated[0] - 1, allocated[1] - bytes, allocated[2] - requested];
        give_room(&mut self.room[kind as usize], requested);
        give_room(&mut self.room[2], requested);
    }

    /// Blocks, bytes and requested bytes that are allocated; those that are active.
    pub(super) fn current(&self, kind: SegmentKind) -> Tally {
        let ([count, bytes, requested], [pending, pending_bytes]) =
            (self.allocated[kind as usize], self.pending[kind as usize]);
        [count, bytes, count + pending, bytes + pending_bytes, requested]
    }

    fn currents(&self) -> [Tally; 2] {
        [SegmentKind::Small, SegmentKind::Large].map(|kind| self.current(kind))
    }

    /// Bytes of allocated blocks.
    pub(super) fn allocated_bytes(&self, kind: SegmentKind) -> u64 {
        self.current(kind)[BYTES]
    }

    /// Bytes of allocated blocks and pending frees.
    pub(super) fn active_bytes(&self) -> u64 {
        sum(&self.currents())[ACTIVE_BYTES]
    }
}

/// Whether there was not enough for a block of that size.
#[inline]
fn use_room(room: &mut [u64; 2], bytes: u64) -> bool {
    let (count, without_count) = room[0].overflowing_sub(1);
    let (bytes, without_bytes) = room[1].overflowing_sub(bytes);
    *room = [count, bytes];
    without_count | without_bytes
}

/// A block is gone: no value is lower by fewer bytes than were requested. What was used up may be below zero.
#[inline]
fn give_room(room: &mut [u64; 2], requested: u64) {
    *room = [room[0].wrapping_add(1), room[1].wrapping_add(requested)];
}

fn raise(highest: &mut u64, value: u64) {
    if value > *highest {
        *highest = value;
    }
}

/// The statistics of one device, as of its heaps' last collection.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// Small, large.
    current: [Tally; 2],
    /// Small, large, both.
    peak: [Tally; 3],
    /// The most active bytes since they were last [taken](Self::take_active_peak).
    active_peak: u64,
    /// What the sums of increases and of decreases were when they were last reset.
    added_before: [Tally; 2],
    freed_before: [Tally; 2],
}

impl Totals {
    /// Takes over what a heap counted.
    pub(super) fn collect(&mut self, heap: &mut HeapCounters) {
        let others: [Tally; 2] = std::array::from_fn(|kind| {
            std::array::from_fn(|metric| self.current[kind][metric] - heap.collected[kind][metric])
        });
        let (of_all, current) = (sum(&others), heap.currents());
        for (kind, others) in others.iter().enumerate() {
            for (metric, &others) in others.iter().enumerate() {
                raise(&mut self.peak[kind][metric], others + heap.highest[kind][metric]);
                self.current[kind][metric] = others + current[kind][metric];
            }
        }
        for (metric, &others) in of_all.iter().enumerate() {
            raise(&mut self.peak[2][metric], others + heap.highest[2][metric]);
        }
        raise(&mut self.active_peak, of_all[ACTIVE_BYTES] + heap.highest[2][ACTIVE_BYTES]);
        heap.collected = current;
        let [small, large] = current;
        heap.highest = [small, large, sum(&current)];
        heap.room = Default::default();
    }

    pub(super) fn reset_peak(&mut self) {
        let [small, large] = self.current;
        self.peak = [small, large, sum(&self.current)];
    }

    /// Active bytes now, and the most since the last call. All heaps are collected.
    pub(super) fn take_active_peak(&mut self) -> (u64, u64) {
        let now = sum(&self.current)[ACTIVE_BYTES];
        (now, std::mem::replace(&mut self.active_peak, now).max(now))
    }

    /// `added`: the sums of increases of all heaps.
    pub(super) fn reset_accumulated(&mut self, added: &Added) {
        self.added_before = added.0;
        self.freed_before = self.freed(added);
    }

    fn freed(&self, added: &Added) -> [Tally; 2] {
        std::array::from_fn(|kind| std::array::from_fn(|metric| added.0[kind][metric] - self.current[kind][metric]))
    }

    /// Fills in the statistics of blocks.
    pub(super) fn write(&self, added: &Added, stats: &mut Stats) {
        let freed = self.freed(added);
        let stat = |kind: usize, metric: usize| Stat {
            current: self.current[kind][metric],
            peak: self.peak[kind][metric],
            allocated: added.0[kind][metric] - self.added_before[kind][metric],
            freed: freed[kind][metric] - self.freed_before[kind][metric],
        };
        let by_kind = |metric: usize| {
            let (small, large) = (stat(0, metric), stat(1, metric));
            let all = Stat {
                current: small.current + large.current,
                peak: self.peak[2][metric],
                allocated: small.allocated + large.allocated,
                freed: small.freed + large.freed,
            };
            StatByKind { all, small_pool: small, large_pool: large }
        };
        stats.allocation = by_kind(COUNT);
        stats.allocated_bytes = by_kind(BYTES);
        stats.active = by_kind(ACTIVE);
        stats.active_bytes = by_kind(ACTIVE_BYTES);
        stats.requested_bytes = by_kind(REQUESTED);
    }
}

/// The sums of increases of several heaps.
#[derive(Debug, Default)]
pub(super) struct Added([Tally; 2]);

impl Added {
    pub(super) fn add(&mut self, heap: &HeapCounters) {
        for kind in 0..2 {
            for (metric, &from) in ADDED.iter().enumerate() {
                self.0[kind][metric] += heap.added[kind][from];
            }
        }
    }
}
