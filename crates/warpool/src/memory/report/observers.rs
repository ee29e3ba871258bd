//! The callbacks of an allocator: trackers, range observers, observers of out-of-memory errors, pressure callbacks,
//! trim hooks, and the hook that collects call stacks.
//!
//! All run without any lock of the allocator, and may call it. Checking whether there are any costs one load.
//!
//! A panic of one reaches the caller of the allocator, after the others were called. A thread that is already unwinding
//! calls none, except out-of-memory observers and pressure callbacks, whose panics are then caught.

use std::fmt;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use warpool_driver::fork::Origin;
use warpool_driver::{DeviceId, DevicePtr};

use super::entry::HistoryEntry;
use super::ranges::{RangeChange, RangeEvent, Ranges, merge_runs};
use super::stats::WorkspaceStats;
use super::{Action, Stack};
use crate::error::OomReport;
use crate::lock;
use crate::unwind::call_each;

/// Called with every entry, even while no history is recorded.
pub type Tracker = Arc<dyn Fn(DeviceId, &HistoryEntry) + Send + Sync>;

/// Called with every out-of-memory report, before the request fails.
pub type OomObserver = Arc<dyn Fn(&OomReport) + Send + Sync>;

/// Called when no cached block fits a request, before the driver is called. Returns whether it freed anything.
pub type PressureCallback = Arc<dyn Fn(DeviceId) -> bool + Send + Sync>;

/// Called before cached memory of a device is returned to the driver. It should free memory that is only kept for later
/// use.
pub type TrimHook = Arc<dyn Fn(DeviceId) + Send + Sync>;

/// Called with every change of the memory behind addresses.
pub type RangeObserver = Arc<dyn Fn(&RangeChange) + Send + Sync>;

/// Collects the call stack of the calling thread.
pub type StackHook = Arc<dyn Fn() -> Option<Stack> + Send + Sync>;

/// A set of actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ActionSet(u16);

impl ActionSet {
    pub(crate) const NONE: Self = Self(0);

    pub(super) fn of(actions: &[Action]) -> Self {
        Self(actions.iter().fold(0, |bits, &action| bits | 1 << action as u16))
    }

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[inline]
    pub(crate) fn has(self, action: Action) -> bool {
        self.0 & (1 << action as u16) != 0
    }
}

/// Identifies an attached callback, for detaching it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObserverId(u64);

/// The observers of one allocator. In a forked child there are none, and none can be attached.
#[derive(Default)]
pub struct Observers {
    trackers: List<(ActionSet, Entries, Tracker)>,
    /// The actions that any tracker sees.
    tracked: AtomicU16,
    ooms: List<OomObserver>,
    pressure: List<PressureCallback>,
    trims: List<TrimHook>,
    ranges: List<RangeObserver>,
    /// Which changes these see.
    shown: OnceLock<Ranges>,
    /// How many they have seen.
    generation: AtomicU64,
    stacks: List<StackHook>,
    next: AtomicU64,
    /// Statistics of the memory that libraries use as workspaces.
    pub(crate) workspaces: WorkspaceStats,
}

impl Observers {
    /// Calls `tracker` for every entry with one of `actions` ([`Action::ALL`] for all). Pages beside each other that
    /// are mapped, or taken, by one call are one entry.
    pub fn attach_tracker(&self, actions: &[Action], tracker: Tracker) -> ObserverId {
        self.add_tracker((ActionSet::of(actions), Entries::Ranges, tracker))
    }

    /// As [`attach_tracker`](Self::attach_tracker), with every page by itself, as snapshots have them.
    pub fn attach_history_tracker(&self, actions: &[Action], tracker: Tracker) -> ObserverId {
        self.add_tracker((ActionSet::of(actions), Entries::Pages, tracker))
    }

    fn add_tracker(&self, tracker: (ActionSet, Entries, Tracker)) -> ObserverId {
        let id = self.trackers.add(self.next_id(), tracker);
        self.count_tracked();
        id
    }

    /// Calls `observer` with out-of-memory reports, including those of rejections.
    pub fn attach_oom_observer(&self, observer: OomObserver) -> ObserverId {
        self.ooms.add(self.next_id(), observer)
    }

    /// Calls `callback` when no cached block fits a request.
    pub fn attach_pressure_callback(&self, callback: PressureCallback) -> ObserverId {
        self.pressure.add(self.next_id(), callback)
    }

    /// Calls `hook` before [`trim`](crate::memory::DeviceAllocator::trim) of the default pool releases memory.
    pub fn attach_trim_hook(&self, hook: TrimHook) -> ObserverId {
        self.trims.add(self.next_id(), hook)
    }

    /// Calls `observer` when the memory behind a range of addresses changes: so registrations with hardware and
    /// libraries can follow. No lock of the allocator is held. (While tags fall asleep or wake, other threads that
    /// put tags to sleep or wake them wait.) Before memory returns to the driver or falls asleep it is called first,
    /// even while work of the memory's stream may still run: an observer whose transfers run in other streams waits
    /// for them. When the paged allocator moves pages it is called afterwards, before the call that moved them returns.
    ///
    /// Of memory in stable pools it hears when it comes and when it goes, and in between nothing. It hears nothing of
    /// memory that was there before it was attached, of requests while caching is off, and from allocators without a
    /// cache.
    pub fn attach_range_observer(&self, observer: RangeObserver) -> ObserverId {
        let id = self.ranges.add(self.next_id(), observer);
        self.count_tracked();
        id
    }

    /// Sets the hook that collects call stacks for the history; `None`, the default, collects none.
    pub fn set_stack_hook(&self, hook: Option<StackHook>) {
        self.stacks.replace(hook.map(|hook| (self.next_id(), hook)));
    }

    /// Detaches a callback; returns whether it was attached.
    pub fn detach(&self, id: ObserverId) -> bool {
        if self.trackers.remove(id) || self.ranges.remove(id) {
            self.count_tracked();
            return true;
        }
        self.ooms.remove(id) || self.pressure.remove(id) || self.trims.remove(id)
    }

    /// The actions that any tracker sees.
    #[inline]
    pub(crate) fn tracked(&self) -> ActionSet {
        ActionSet(self.tracked.load(Ordering::Relaxed))
    }

    /// Calls the trackers.
    pub(crate) fn track(&self, device: DeviceId, entries: &[HistoryEntry]) {
        let (trackers, ranges) = (self.trackers.all(), merge_runs(entries));
        let shown = self.shown.get().copied().unwrap_or_default();
        let changes = || ranges.iter().filter_map(|entry| Some((shown.event(entry.action)?, entry.addr, entry.size)));
        let told = if self.tells_ranges() { changes().collect() } else { Vec::new() };
        // Even after a tracker has panicked.
        let tell = |(event, addr, bytes)| self.range_changes(device, event, DevicePtr(addr), bytes);
        let calls = trackers.iter().flat_map(|(actions, kind, tracker)| {
            let entries = if *kind == Entries::Pages { entries } else { &*ranges };
            entries.iter().filter(|entry| actions.has(entry.action)).map(move |entry| (tracker, entry))
        });
        let calls = calls.map(Call::Tracker).chain(told.into_iter().map(Call::Range));
        call_each(calls, |call| match call {
            Call::Tracker((tracker, entry)) => tracker(device, entry),
            Call::Range(change) => tell(change),
        });
    }

    /// Sets which changes range observers see. To be called by the allocator that owns these.
    pub(crate) fn show_ranges(&self, shown: Ranges) {
        let _ = self.shown.set(shown);
    }

    /// Whether anybody is told of ranges.
    pub(crate) fn tells_ranges(&self) -> bool {
        !self.ranges.is_empty()
    }

    /// Tells the range observers. No lock may be held. A thread that is unwinding tells nobody.
    pub(crate) fn range_changes(&self, device: DeviceId, event: RangeEvent, ptr: DevicePtr, bytes: u64) {
        if !self.tells_ranges() || std::thread::panicking() {
            return;
        }
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let change = RangeChange { event, device, ptr, bytes, generation };
        call_each(self.ranges.all(), |observer| observer(&change));
    }

    fn count_tracked(&self) {
        let ranges = [Action::SegmentAlloc, Action::SegmentMap, Action::SegmentUnmap];
        let of_ranges = if self.tells_ranges() { ActionSet::of(&ranges).0 } else { 0 };
        let all = self.trackers.all().iter().fold(of_ranges, |all, (actions, ..)| all | actions.0);
        self.tracked.store(all, Ordering::Relaxed);
    }

    pub(crate) fn report_oom(&self, report: &OomReport) {
        call_each(self.ooms.all(), |observer| observer(report));
    }

    /// Calls all pressure callbacks, even after one has freed something. Returns whether any did.
    pub(crate) fn run_pressure_callbacks(&self, device: DeviceId) -> bool {
        let mut freed = false;
        call_each(self.pressure.all(), |callback| freed |= callback(device));
        freed
    }

    pub(crate) fn run_trim_hooks(&self, device: DeviceId) {
        call_each(self.trims.all(), |hook| hook(device));
    }

    pub(crate) fn stack(&self) -> Option<Stack> {
        if std::thread::panicking() {
            return None;
        }
        self.stacks.all().first().and_then(|hook| hook())
    }

    fn next_id(&self) -> ObserverId {
        ObserverId(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observers")
            .field("trackers", &self.trackers.all().len())
            .field("oom_observers", &self.ooms.all().len())
            .field("pressure_callbacks", &self.pressure.all().len())
            .field("trim_hooks", &self.trims.all().len())
            .field("range_observers", &self.ranges.all().len())
            .finish()
    }
}

/// What a tracker gets for pages beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entries {
    /// One entry.
    Ranges,
    /// An entry for each.
    Pages,
}

/// One call of a callback.
enum Call<T, R> {
    Tracker(T),
    Range(R),
}

/// A list that rarely changes and is often empty.
struct List<T> {
    /// In a forked child the lock may be held forever.
    origin: Origin,
    entries: Mutex<Vec<(ObserverId, T)>>,
    count: AtomicU32,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { origin: Origin::here(), entries: Mutex::new(Vec::new()), count: AtomicU32::new(0) }
    }
}

impl<T: Clone> List<T> {
    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0 || !self.origin.is_here()
    }

    fn add(&self, id: ObserverId, entry: T) -> ObserverId {
        self.change(|entries| entries.push((id, entry)));
        id
    }

    fn replace(&self, with: Option<(ObserverId, T)>) {
        drop(self.change(|entries| std::mem::replace(entries, with.into_iter().collect())));
    }

    fn remove(&self, id: ObserverId) -> bool {
        let removed = self.change(|entries| {
            let at = entries.iter().position(|(other, _)| *other == id)?;
            Some(entries.remove(at))
        });
        removed.flatten().is_some()
    }

    /// Copies of the entries, to be called without the lock.
    fn all(&self) -> Vec<T> {
        if self.is_empty() {
            return Vec::new();
        }
        lock(&self.entries).iter().map(|(_, entry)| entry.clone()).collect()
    }

    /// Returns the result of `act`, such as removed entries, for the caller to drop without the lock: they may own
    /// blocks, whose drop calls trackers. `None`, without any change, in a forked child.
    fn change<R>(&self, act: impl FnOnce(&mut Vec<(ObserverId, T)>) -> R) -> Option<R> {
        if !self.origin.is_here() {
            return None;
        }
        let mut entries = lock(&self.entries);
        let result = act(&mut entries);
        self.count.store(u32::try_from(entries.len()).expect("few observers"), Ordering::Relaxed);
        Some(result)
    }
}
