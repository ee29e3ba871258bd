//! The front caches: every thread works on one, and mostly alone, so taking and giving back a block is one lock that
//! nobody contends for.
//!
//! A cache has whole blocks, newest on top, and the counters of the requests that it served. A block goes back to the
//! cache that it came from, whoever gives it back: there it is wanted next, and there it was counted. Nothing here
//! belongs to a thread, so threads may end at any time. The rule: no driver call, and no other lock, under a cache's
//! lock.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::DeviceId;

use super::block::BlockCell;
use super::size::{CLASSES, Fit, class_of_block};
use crate::memory::Stat;

/// How many blocks of one class a cache keeps.
const CLASS_MAX: usize = 64;

/// How many blocks without a class a cache keeps.
const LOOSE_MAX: usize = 16;

/// How many bytes a cache keeps. They are no loss: before anything more is pinned, all caches are emptied. So it is
/// much: at 64 MiB, a block of that size went to the heap and back as soon as any other was cached, which made a pair
/// ten times slower.
const BYTES_MAX: u64 = 1 << 30;

/// A cache with a cache line of its own; two, since some machines fetch them in pairs.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Shard(pub(super) Mutex<Cache>);

/// What a cache holds.
pub(super) struct Cache {
    classes: [Vec<Arc<BlockCell>>; CLASSES],
    /// Large blocks, and unrounded ones.
    loose: Vec<Arc<BlockCell>>,
    bytes: u64,
    /// Once the allocator is gone it takes nothing back.
    closed: bool,
    /// Of the requests that it served.
    pub(super) requests: Stat,
    pub(super) request_bytes: Stat,
}

impl Default for Cache {
    fn default() -> Self {
        Self {
            classes: [const { Vec::new() }; CLASSES],
            loose: Vec::new(),
            bytes: 0,
            closed: false,
            requests: Stat::default(),
            request_bytes: Stat::default(),
        }
    }
}

impl Cache {
    /// A block that fits, counted as given out.
    #[inline]
    pub(super) fn take(&mut self, fit: &Fit, device: Option<DeviceId>) -> Option<Arc<BlockCell>> {
        let cell = match fit.class {
            Some(class) => {
                let list = &mut self.classes[usize::from(class)];
                match device {
                    None => list.pop()?,
                    Some(device) => {
                        let at = list.iter().rposition(|cell| cell.device == device)?;
                        list.remove(at)
                    }
                }
            }
            None => self.take_loose(fit, device)?,
        };
        self.bytes -= cell.size;
        self.count(cell.size);
        Some(cell)
    }

    /// Of those that are near enough the smallest, and of these the newest.
    fn take_loose(&mut self, fit: &Fit, device: Option<DeviceId>) -> Option<Arc<BlockCell>> {
        let sizes = fit.size..=fit.size + fit.slack;
        let fits = |cell: &BlockCell| sizes.contains(&cell.size) && device.is_none_or(|device| cell.device == device);
        let candidates = self.loose.iter().enumerate().rev().filter(|(_, cell)| fits(cell));
        let (at, _) = candidates.min_by_key(|(_, cell)| cell.size)?;
        Some(self.loose.remove(at))
    }

    /// Takes a block in; gives it back if it has no room.
    #[inline]
    pub(super) fn put(&mut self, cell: Arc<BlockCell>) -> Result<(), Arc<BlockCell>> {
        let (list, most) = match class_of_block(cell.size) {
            Some(class) => (&mut self.classes[usize::from(class)], CLASS_MAX),
            None => (&mut self.loose, LOOSE_MAX),
        };
        if self.closed || list.len() >= most || self.bytes + cell.size > BYTES_MAX {
            return Err(cell);
        }
        self.bytes += cell.size;
        list.push(cell);
        Ok(())
    }

    /// Counts a block as given out.
    #[inline]
    pub(super) fn count(&mut self, size: u64) {
        self.requests.increase(1);
        self.request_bytes.increase(size);
    }

    /// Counts a block as given back.
    #[inline]
    pub(super) fn uncount(&mut self, size: u64) {
        self.requests.decrease(1);
        self.request_bytes.decrease(size);
    }

    /// How many bytes it holds.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All that it holds, oldest first within a class.
    pub(super) fn empty(&mut self) -> Vec<Arc<BlockCell>> {
        self.bytes = 0;
        let lists = self.classes.iter_mut().chain([&mut self.loose]);
        lists.flat_map(|list| list.drain(..)).collect()
    }

    /// The same, and it takes nothing in any more.
    pub(super) fn close(&mut self) -> Vec<Arc<BlockCell>> {
        self.closed = true;
        self.empty()
    }

    /// All that it holds.
    pub(super) fn cells(&self) -> impl Iterator<Item = &Arc<BlockCell>> {
        self.classes.iter().flatten().chain(&self.loose)
    }

    /// What must hold.
    pub(super) fn check(&self) {
        assert_eq!(self.bytes, self.cells().map(|cell| cell.size).sum::<u64>(), "a cache knows what it has");
        for (class, list) in self.classes.iter().enumerate() {
            assert!(list.iter().all(|cell| class_of_block(cell.size) == Some(class as u8)), "class {class}");
        }
    }
}

/// As many caches as threads rarely need: four for each that can run at once, so that two seldom meet.
pub(super) fn shards() -> Box<[Shard]> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let count = (4 * threads).next_power_of_two().max(32);
    (0..count).map(|_| Shard::default()).collect()
}

/// The calling thread's number. Numbers go round: which cache a thread has is a matter of speed only.
#[inline]
pub(super) fn thread_number() -> u32 {
    thread_local! {
        // Without a destructor, so it is there also while those of other thread-locals run. 0 is none yet.
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
