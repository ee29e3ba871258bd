//! Who is told what an allocator does, and who helps it: trackers, observers of failures, callbacks under memory
//! pressure, hooks of trims, and the hook that gathers call stacks.
//!
//! All of them run without any lock of the allocator held, and may call it. Asking whether there are any costs one
//! load.

use std::fmt;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::DeviceId;

use super::history::HistoryEntry;
use super::stats::WorkspaceMeter;
use super::{Action, OomReport, Stack};
use crate::lock;

/// Sees what happens, also while no history is recorded.
pub type Tracker = Arc<dyn Fn(DeviceId, &HistoryEntry) + Send + Sync>;

/// Sees every failure for lack of memory, before the caller does.
pub type OomObserver = Arc<dyn Fn(&OomReport) + Send + Sync>;

/// Asked for help when a request finds nothing cached, before the driver is asked: says whether it freed anything.
pub type PressureCallback = Arc<dyn Fn(DeviceId) -> bool + Send + Sync>;

/// Told that cached memory of a device is about to go back to the driver: the moment to give up what is held only for
/// later.
pub type TrimHook = Arc<dyn Fn(DeviceId) + Send + Sync>;

/// Gathers the caller's call stack.
pub type StackHook = Arc<dyn Fn() -> Option<Stack> + Send + Sync>;

/// A set of actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ActionSet(u16);

impl ActionSet {
    fn of(actions: &[Action]) -> Self {
        Self(actions.iter().fold(0, |bits, &action| bits | 1 << action as u16))
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn has(self, action: Action) -> bool {
        self.0 & (1 << action as u16) != 0
    }
}

/// What was attached, to detach it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObserverId(u64);

/// The observers of one allocator.
#[derive(Default)]
pub struct Observers {
    trackers: List<(ActionSet, Tracker)>,
    /// What any tracker wants to see.
    tracked: AtomicU16,
    ooms: List<OomObserver>,
    pressure: List<PressureCallback>,
    trims: List<TrimHook>,
    stacks: List<StackHook>,
    next: AtomicU64,
    /// What of the allocator's memory libraries work with, as told by those who lend it to them.
    pub(crate) workspaces: WorkspaceMeter,
}

impl Observers {
    /// Tells `tracker` about every one of `actions` ([`Action::ALL`] is everything).
    pub fn attach_tracker(&self, actions: &[Action], tracker: Tracker) -> ObserverId {
        let id = self.trackers.add(self.next_id(), (ActionSet::of(actions), tracker));
        self.count_tracked();
        id
    }

    /// Tells `observer` about failures. Refusals by policy count too.
    pub fn attach_oom_observer(&self, observer: OomObserver) -> ObserverId {
        self.ooms.add(self.next_id(), observer)
    }

    /// Asks `callback` for help before the driver is asked.
    pub fn attach_pressure_callback(&self, callback: PressureCallback) -> ObserverId {
        self.pressure.add(self.next_id(), callback)
    }

    /// Calls `hook` before cached memory goes back by [`trim`](super::DeviceAllocator::trim) of the default pool.
    pub fn attach_trim_hook(&self, hook: TrimHook) -> ObserverId {
        self.trims.add(self.next_id(), hook)
    }

    /// Gathers call stacks with `hook`, where the history asks for them; `None` gathers none, which is how it starts.
    pub fn set_stack_hook(&self, hook: Option<StackHook>) {
        self.stacks.replace(hook.map(|hook| (self.next_id(), hook)));
    }

    /// Forgets what was attached; whether it was there.
    pub fn detach(&self, id: ObserverId) -> bool {
        if self.trackers.remove(id) {
            self.count_tracked();
            return true;
        }
        self.ooms.remove(id) || self.pressure.remove(id) || self.trims.remove(id)
    }

    /// What any tracker wants to see.
    pub(crate) fn tracked(&self) -> ActionSet {
        ActionSet(self.tracked.load(Ordering::Relaxed))
    }

    pub(crate) fn track(&self, device: DeviceId, events: &[HistoryEntry]) {
        for (wanted, tracker) in self.trackers.all() {
            for event in events.iter().filter(|event| wanted.has(event.action)) {
                tracker(device, event);
            }
        }
    }

    fn count_tracked(&self) {
        let all = self.trackers.all().iter().fold(0, |all, (wanted, _)| all | wanted.0);
        self.tracked.store(all, Ordering::Relaxed);
    }

    pub(crate) fn out_of_memory(&self, report: &OomReport) {
        for observer in self.ooms.all() {
            observer(report);
        }
    }

    /// Asks all of them, and says whether any freed something.
    pub(crate) fn relieve(&self, device: DeviceId) -> bool {
        // All of them, also after one has freed something.
        self.pressure.all().iter().filter(|callback| callback(device)).count() > 0
    }

    pub(crate) fn before_trim(&self, device: DeviceId) {
        for hook in self.trims.all() {
            hook(device);
        }
    }

    pub(crate) fn stack(&self) -> Option<Stack> {
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
            .finish()
    }
}

/// A list that is seldom changed and often empty.
struct List<T> {
    entries: Mutex<Vec<(ObserverId, T)>>,
    count: AtomicU32,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { entries: Mutex::new(Vec::new()), count: AtomicU32::new(0) }
    }
}

impl<T: Clone> List<T> {
    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
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
        removed.is_some()
    }

    /// Copies, so that they are called without the lock.
    fn all(&self) -> Vec<T> {
        if self.is_empty() {
            return Vec::new();
        }
        lock(&self.entries).iter().map(|(_, entry)| entry.clone()).collect()
    }

    /// What is taken out is returned, and dropped without the lock: it may own blocks, whose drop is told to the
    /// trackers.
    fn change<R>(&self, act: impl FnOnce(&mut Vec<(ObserverId, T)>) -> R) -> R {
        let mut entries = lock(&self.entries);
        let result = act(&mut entries);
        self.count.store(u32::try_from(entries.len()).expect("few observers"), Ordering::Relaxed);
        result
    }
}
