//! The front caches: every thread uses one, mostly alone, so allocating or freeing a cached block takes one uncontended
//! lock. It is a spin lock, with one atomic exchange where a mutex needs two.
//!
//! A cache holds whole blocks, newest on top, and the counters of the requests that it served. A block returns to the
//! cache that it was taken from, whichever thread frees it: it is likely to be needed there next, and it was counted
//! there. A thread that finds no block of the required size in its cache or in its shard of the heap takes one from
//! another cache; the block then belongs to the thread's cache. Nothing here belongs to a thread, so threads may end at
//! any time. Rule: no driver call is made and no other lock is taken under a cache's lock.
//!
//! The block that was freed last is in no list yet, and its free is not counted: the next request of the same size
//! takes it back, which changes no current value and no peak. Every other step puts it into its list first.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::block::PinnedBlock;
use super::size_class::{CLASSES, Fit, SMALL_MAX, class_of_block};
use super::stats::HostStats;
use crate::memory::Stat;
use crate::steps;
use crate::sync::spin_lock::{SpinGuard, SpinLock};

/// How many blocks of one class a cache keeps.
const CLASS_MAX: usize = 64;

/// How many blocks without a class a cache keeps.
const UNCLASSED_MAX: usize = 32;

/// How many bytes a cache keeps. All caches are emptied before more memory is pinned, so the limit can be high. With 64
/// MiB, a block of that size went to the heap and back as soon as another was cached, which made a pair of allocate and
/// free ten times slower.
const BYTES_MAX: u64 = 1 << 30;

/// All front caches of an allocator.
pub(super) struct FrontCaches {
    caches: Box<[Aligned]>,
    /// Which caches have ever held a block; the others are not searched.
    used: Box<[AtomicBool]>,
}

/// A kind of cached blocks, by the size of their requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Blocks of small requests.
    Small,
    /// Blocks of large requests.
    Large,
    All,
}

impl Kind {
    fn has(self, size: u64) -> bool {
        match self {
            Self::Small => size <= SMALL_MAX,
            Self::Large => size > SMALL_MAX,
            Self::All => true,
        }
    }
}

/// A front cache on two cache lines of its own, since some machines prefetch lines in pairs.
#[repr(align(128))]
#[derive(Default)]
struct Aligned(SpinLock<FrontCache>);

struct FrontCache {
    /// The block that was freed last. There is room for it in its list.
    recent: Option<Arc<PinnedBlock>>,
    /// The size of the request that it served; 0 if there is no such block.
    recent_bytes: u64,
    classes: [Vec<Arc<PinnedBlock>>; CLASSES],
    /// Large blocks, and unrounded ones, with their sizes, so that a search does not read blocks that do not fit.
    unclassed: Vec<(u64, Arc<PinnedBlock>)>,
    bytes: u64,
    /// Set when the allocator is gone; blocks are refused then.
    closed: bool,
    requests: Stat,
    request_bytes: Stat,
}

impl Default for FrontCache {
    fn default() -> Self {
        Self {
            recent: None,
            recent_bytes: 0,
            classes: [const { Vec::new() }; CLASSES],
            unclassed: Vec::new(),
            bytes: 0,
            closed: false,
            requests: Stat::default(),
            request_bytes: Stat::default(),
        }
    }
}

impl FrontCaches {
    /// Four for each thread that can run at once, so that two rarely share one.
    pub(super) fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let count = (4 * threads).next_power_of_two().max(32);
        Self {
            caches: (0..count).map(|_| Aligned::default()).collect(),
            used: (0..count).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// The index of the calling thread's cache.
    #[inline]
    pub(super) fn of_thread(&self) -> usize {
        thread_number() as usize & (self.caches.len() - 1)
    }

    /// A cache, with every block in its list and every free counted.
    fn settled(&self, at: usize) -> SpinGuard<'_, FrontCache> {
        let mut cache = self.caches[at].0.lock();
        cache.settle();
        cache
    }

    /// The block that was freed last, if it served such a request, or else a block that fits; counted as allocated.
    #[inline]
    pub(super) fn take_recent_or(&self, at: usize, bytes: u64, fit: impl FnOnce() -> Fit) -> Option<Arc<PinnedBlock>> {
        let mut cache = self.caches[at].0.lock();
        match cache.take_recent(bytes) {
            Some(block) => Some(block),
            None => cache.settle_and_take(&fit()),
        }
    }

    /// A block that fits, counted as allocated.
    pub(super) fn take(&self, at: usize, fit: &Fit) -> Option<Arc<PinnedBlock>> {
        self.settled(at).take(fit)
    }

    /// A block that fits from a cache other than `own` that no thread has locked. It is not counted here: it moves to
    /// `own`.
    pub(super) fn take_from_others(&self, own: usize, fit: &Fit) -> Option<Arc<PinnedBlock>> {
        // Each thread searches in another order, so that threads do not all start with the same cache.
        let others = (1..self.caches.len()).map(|step| own ^ step);
        others.filter(|&other| self.used[other].load(Ordering::Relaxed)).find_map(|other| {
            steps::count();
            let mut cache = self.caches[other].0.try_lock()?;
            cache.settle();
            cache.remove(fit)
        })
    }

    /// Counts a block that was not taken from the thread's cache as allocated.
    pub(super) fn count_allocated(&self, at: usize, size: u64) {
        self.settled(at).count_allocated(size);
    }

    /// Counts a block that is not put into a cache as free.
    pub(super) fn count_freed(&self, at: usize, size: u64) {
        self.settled(at).count_freed(size);
    }

    /// Counts a block as free and caches it; returns it if there is no room or it is not to be kept.
    #[inline]
    pub(super) fn free(&self, block: Arc<PinnedBlock>, keep: bool) -> Result<(), Arc<PinnedBlock>> {
        let home = block.home();
        let mut cache = self.caches[home].0.lock();
        cache.settle();
        if !keep || !cache.has_room(&block) {
            cache.count_freed(block.size());
            return Err(block);
        }
        cache.recent_bytes = block.requested();
        cache.recent = Some(block);
        drop(cache);
        self.mark_used(home);
        Ok(())
    }

    /// Caches a block that was counted as free before; returns it if there is no room.
    pub(super) fn put(&self, block: Arc<PinnedBlock>) -> Result<(), Arc<PinnedBlock>> {
        let home = block.home();
        self.settled(home).put(block)?;
        self.mark_used(home);
        Ok(())
    }

    #[inline]
    fn mark_used(&self, cache: usize) {
        // Written once, so that the flags stay in every core's cache.
        if !self.used[cache].load(Ordering::Relaxed) {
            self.used[cache].store(true, Ordering::Relaxed);
        }
    }

    /// How many caches there are.
    pub(super) fn len(&self) -> usize {
        self.caches.len()
    }

    /// Takes out the blocks of one cache, oldest first within a class.
    pub(super) fn drain_one(&self, at: usize, kind: Kind) -> Vec<Arc<PinnedBlock>> {
        self.settled(at).drain(kind)
    }

    /// Takes out the blocks of all caches, one by one, oldest first within a class.
    pub(super) fn drain(&self, kind: Kind) -> impl Iterator<Item = Vec<Arc<PinnedBlock>>> {
        (0..self.caches.len()).map(move |at| self.settled(at).drain(kind)).filter(|blocks| !blocks.is_empty())
    }

    /// Empties and closes the caches.
    pub(super) fn close(&self) -> Vec<Arc<PinnedBlock>> {
        let close = |at: usize| {
            let mut cache = self.settled(at);
            cache.closed = true;
            cache.drain(Kind::All)
        };
        (0..self.caches.len()).flat_map(close).collect()
    }

    /// Adds the counters of requests and the cached bytes.
    pub(super) fn add_to(&self, stats: &mut HostStats) {
        for at in 0..self.caches.len() {
            let cache = self.settled(at);
            add(&mut stats.active_requests, cache.requests);
            add(&mut stats.active_bytes, cache.request_bytes);
            stats.cached_bytes += cache.bytes;
        }
    }

    pub(super) fn for_each_stat(&self, act: fn(&mut Stat)) {
        for at in 0..self.caches.len() {
            let mut cache = self.settled(at);
            act(&mut cache.requests);
            act(&mut cache.request_bytes);
        }
    }

    /// Panics if an invariant does not hold.
    pub(super) fn check(&self) {
        (0..self.caches.len()).for_each(|at| self.settled(at).check());
    }
}

impl FrontCache {
    /// The block that was freed last, if it served a request of that size, counted as freed and allocated again.
    #[inline]
    fn take_recent(&mut self, bytes: u64) -> Option<Arc<PinnedBlock>> {
        if self.recent_bytes != bytes {
            return None;
        }
        let block = self.recent.take()?;
        self.recent_bytes = 0;
        self.requests.repeat(1);
        self.request_bytes.repeat(block.size());
        Some(block)
    }

    /// Puts the block that was freed last into its list, and counts its free.
    #[inline]
    fn settle(&mut self) {
        if let Some(block) = self.recent.take() {
            self.recent_bytes = 0;
            self.count_freed(block.size());
            self.put_unchecked(block);
        }
    }

    #[inline(never)]
    fn settle_and_take(&mut self, fit: &Fit) -> Option<Arc<PinnedBlock>> {
        self.settle();
        self.take(fit)
    }

    #[inline]
    fn take(&mut self, fit: &Fit) -> Option<Arc<PinnedBlock>> {
        let block = self.remove(fit)?;
        self.count_allocated(block.size());
        Some(block)
    }

    #[inline]
    fn remove(&mut self, fit: &Fit) -> Option<Arc<PinnedBlock>> {
        let block = match fit.class {
            Some(class) => {
                let list = &mut self.classes[usize::from(class)];
                match fit.device {
                    None => list.pop()?,
                    Some(device) => {
                        let at = list.iter().rposition(|block| block.device() == device)?;
                        list.remove(at)
                    }
                }
            }
            None => self.take_unclassed(fit)?,
        };
        self.bytes -= block.size();
        Some(block)
    }

    /// The smallest block that fits within the slack; among equals, the newest.
    fn take_unclassed(&mut self, fit: &Fit) -> Option<Arc<PinnedBlock>> {
        let sizes = fit.size..=fit.size + fit.slack;
        let is_of_device = |block: &PinnedBlock| fit.device.is_none_or(|device| block.device() == device);
        let fits = |size: &u64, block: &PinnedBlock| sizes.contains(size) && is_of_device(block);
        let candidates = self.unclassed.iter().enumerate().rev().filter(|(_, (size, block))| fits(size, block));
        let (at, _) = candidates.min_by_key(|(_, (size, _))| *size)?;
        Some(self.unclassed.remove(at).1)
    }

    fn put(&mut self, block: Arc<PinnedBlock>) -> Result<(), Arc<PinnedBlock>> {
        if !self.has_room(&block) {
            return Err(block);
        }
        self.put_unchecked(block);
        Ok(())
    }

    #[inline]
    fn has_room(&self, block: &PinnedBlock) -> bool {
        let has_place = match block.class() {
            Some(class) => self.classes[usize::from(class)].len() < CLASS_MAX,
            None => self.unclassed.len() < UNCLASSED_MAX,
        };
        has_place && !self.closed && self.bytes + block.size() <= BYTES_MAX
    }

    /// Puts a block into its list, which has room.
    #[inline]
    fn put_unchecked(&mut self, block: Arc<PinnedBlock>) {
        let size = block.size();
        match block.class() {
            Some(class) => self.classes[usize::from(class)].push(block),
            None => self.unclassed.push((size, block)),
        }
        self.bytes += size;
    }

    #[inline]
    fn count_allocated(&mut self, size: u64) {
        self.requests.increase(1);
        self.request_bytes.increase(size);
    }

    #[inline]
    fn count_freed(&mut self, size: u64) {
        self.requests.decrease(1);
        self.request_bytes.decrease(size);
    }

    fn drain(&mut self, kind: Kind) -> Vec<Arc<PinnedBlock>> {
        let mut blocks = Vec::new();
        if kind != Kind::Large {
            self.classes.iter_mut().for_each(|list| blocks.append(list));
        }
        blocks.extend(self.unclassed.extract_if(.., |(size, _)| kind.has(*size)).map(|(_, block)| block));
        self.bytes -= blocks.iter().map(|block| block.size()).sum::<u64>();
        blocks
    }

    fn check(&self) {
        assert!(self.recent.is_none() && self.recent_bytes == 0, "the last block is in its list");
        let blocks = self.classes.iter().flatten().chain(self.unclassed.iter().map(|(_, block)| block));
        assert_eq!(self.bytes, blocks.map(|block| block.size()).sum::<u64>(), "bytes of a front cache");
        for (class, list) in self.classes.iter().enumerate() {
            assert!(list.iter().all(|block| class_of_block(block.size()) == Some(class as u8)), "class {class}");
        }
    }
}

fn add(sum: &mut Stat, stat: Stat) {
    sum.current += stat.current;
    sum.peak += stat.peak;
    sum.allocated += stat.allocated;
    sum.freed += stat.freed;
}

/// The calling thread's number. Numbers wrap around: they only choose a cache.
#[inline]
fn thread_number() -> u32 {
    thread_local! {
        // Without a destructor, so that it works while other thread-locals are being destroyed. 0 means not assigned
        // yet.
        static NUMBER: Cell<u32> = const { Cell::new(0) };
    }
    NUMBER.with(|number| match number.get() {
        0 => {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let next = NEXT.fetch_add(1, Ordering::Relaxed) | 1 << 31;
            number.set(next);
            next
        }
        known => known,
    })
}
