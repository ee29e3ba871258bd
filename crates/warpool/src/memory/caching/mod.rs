//! The caching allocator: blocks stand where PyTorch's native allocator would put them.
//!
//! # The life of an allocation
//! 1. The request is routed to a pool (`pools.rs`) and rounded (`size.rs`).
//! 2. What was given back meanwhile is looked after, if there is anything (`pending.rs`, `capture.rs`).
//! 3. The smallest free block of the stream that fits is taken, and cut if too much would be left over (`place.rs`,
//!    `cut.rs`). This is the hot path: one lock, no driver call.
//! 4. If none fits, a ladder is climbed (`ladder.rs`), with memory from the driver (`segment.rs`, `expandable.rs`).
//! 5. Freed, a block that only its own stream used is joined with its free neighbours at once. Others wait for marks in
//!    the streams that used them.
//!
//! # Locks
//! Each device has two. `state` is held for one step of the books, never during a driver call. `slow` is held by the
//! one thread that asks the driver for memory or gives it back; it comes before `state`. Observers are called with
//! neither.

mod annotate;
mod block;
mod calls;
mod capture;
mod check;
mod checkpoint;
mod cut;
mod exact;
mod expandable;
mod free_set;
mod ladder;
mod peers;
mod pending;
mod place;
mod policy;
mod pools;
mod segment;
mod slow;
mod snapshot;
mod state;
mod uncached;

pub use checkpoint::{PoolCheckpoint, Restored};

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{DeviceId, DevicePtr, Driver, StreamId};

use self::block::BlockKey;
use self::policy::Policy;
pub(super) use self::policy::share_of;
use self::state::State;
use self::uncached::Uncached;
use super::journal::{Cause, Recording};
use super::scopes::Scopes;
use super::{Observers, Settings, StackLevel};
use crate::{Error, Instance, Result, lock};

/// PyTorch's caching allocator, over any driver. See the [module](crate::memory) for how it is used.
pub struct CachingAllocator {
    instance: Instance,
    cells: Box<[Cell]>,
    settings: Mutex<Arc<Settings>>,
    observers: Observers,
    /// Whether the driver tracks suballocations.
    tracks_suballocations: bool,
    /// Off, every request goes straight to the driver.
    caching: AtomicBool,
    uncached: Uncached,
    next_user_pool: AtomicU32,
    next_graph_pool: AtomicU32,
    /// Classes of streams, for the sizes of their expandable segments.
    stream_classes: Mutex<BTreeMap<StreamId, String>>,
}

/// What there is per device.
struct Cell {
    device: DeviceId,
    bytes_total: u64,
    granularity: u64,
    rdma: bool,
    virtual_memory: bool,
    state: Mutex<State>,
    /// Held by whoever asks the driver for memory or gives it back.
    slow: Mutex<()>,
    slow_holder: slow::Holder,
    limits: Mutex<Limits>,
    scopes: Scopes,
    /// How many captures are under way, on all devices together: another device's stream may have used this one's
    /// memory, and a thread that captures is guarded on every device.
    captures: Arc<AtomicU32>,
    recording: Recording,
    /// Other devices that may use this one's memory.
    peers: Mutex<Vec<DeviceId>>,
}

/// What may be held from a device.
#[derive(Clone, Copy)]
struct Limits {
    fraction: f64,
    cap: Option<u64>,
}

impl Cell {
    fn has_captures(&self) -> bool {
        self.captures.load(Ordering::Acquire) > 0
    }

    fn peers(&self) -> Vec<DeviceId> {
        lock(&self.peers).clone()
    }

    fn limit(&self) -> Option<u64> {
        let Limits { fraction, cap } = *lock(&self.limits);
        let by_fraction = (fraction < 1.0).then(|| share_of(self.bytes_total, fraction));
        [by_fraction, cap].into_iter().flatten().min()
    }
}

impl CachingAllocator {
    /// An allocator for all devices of `instance`. Makes no driver call.
    #[must_use]
    pub fn new(instance: &Instance, settings: Settings) -> Self {
        let captures = Arc::new(AtomicU32::new(0));
        let cells = instance.devices().map(|device| {
            let properties = device.properties();
            let limits = Limits { fraction: settings.per_process_memory_fraction, cap: settings.memory_cap_bytes };
            let policy = Policy::new(&settings, properties.bytes_total, None, properties.virtual_memory);
            let cell = Cell {
                device: device.id(),
                bytes_total: properties.bytes_total,
                granularity: properties.granularity.max(1),
                rdma: properties.rdma,
                virtual_memory: properties.virtual_memory,
                state: Mutex::new(State::new(device.id(), policy)),
                slow: Mutex::new(()),
                slow_holder: slow::Holder::default(),
                limits: Mutex::new(limits),
                scopes: Scopes::default(),
                captures: Arc::clone(&captures),
                recording: Recording::default(),
                peers: Mutex::default(),
            };
            lock(&cell.state).policy.limit = cell.limit();
            if settings.expandable_segments && !properties.virtual_memory {
                tracing::warn!(device = %cell.device, "expandable_segments: the device has no virtual memory; it is off there");
            }
            cell
        });
        Self {
            instance: instance.clone(),
            cells: cells.collect(),
            tracks_suballocations: instance.driver().tracks_suballocations(),
            settings: Mutex::new(Arc::new(settings)),
            observers: Observers::default(),
            caching: AtomicBool::new(true),
            uncached: Uncached::default(),
            next_user_pool: AtomicU32::new(1),
            next_graph_pool: AtomicU32::new(1),
            stream_classes: Mutex::default(),
        }
    }

    /// The settings that are in force.
    #[must_use]
    pub fn settings(&self) -> Arc<Settings> {
        Arc::clone(&lock(&self.settings))
    }

    /// Puts other settings in force. What is cached stays; segments that grow stay usable only while
    /// `expandable_segments` is on. Memory fraction and cap are those of the start, or of the last call that set them.
    pub fn set_settings(&self, settings: Settings) {
        for cell in &self.cells {
            let mut policy = Policy::new(&settings, cell.bytes_total, None, cell.virtual_memory);
            self.with(cell, |state| {
                policy.limit = state.policy.limit;
                let order_changed = policy.by_registration != state.policy.by_registration;
                state.stats.max_split_size = policy.max_split_stat();
                state.policy = policy;
                state.recount_oversize();
                if order_changed {
                    state.reorder_free();
                }
            });
        }
        *lock(&self.settings) = Arc::new(settings);
    }

    /// Limits what is held from a device to `bytes`, beside the fraction; `None` is no limit.
    pub fn set_memory_cap(&self, device: DeviceId, bytes: Option<u64>) -> Result<()> {
        self.change_limits(self.cell(device)?, |limits| limits.cap = bytes);
        Ok(())
    }

    /// Turns caching off or on. Off, every request goes straight to the driver and appears in no counter; what was
    /// given out either way is taken back the way it came.
    pub fn set_caching(&self, on: bool) {
        self.caching.store(on, Ordering::Release);
    }

    /// Puts a stream into a class, which decides how many addresses its expandable segments reserve
    /// (`expandable_segments_reserve_by_class`); an empty name takes it out.
    pub fn set_stream_class(&self, stream: StreamId, class: &str) {
        let mut classes = lock(&self.stream_classes);
        if class.is_empty() {
            classes.remove(&stream);
        } else {
            classes.insert(stream, class.to_owned());
        }
    }

    fn stream_class(&self, stream: StreamId) -> Option<String> {
        lock(&self.stream_classes).get(&stream).cloned()
    }

    fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    fn cell(&self, device: DeviceId) -> Result<&Cell> {
        let count = self.instance.device_count();
        self.cells.get(device.0 as usize).ok_or(Error::DeviceOutOfRange { index: device.0, count })
    }

    /// One step under a device's lock; trackers are told afterwards, without it and without the slow one.
    fn with<R>(&self, cell: &Cell, step: impl FnOnce(&mut State) -> R) -> R {
        let mut state = lock(&cell.state);
        let result = step(&mut state);
        if state.journal.has_news() && !cell.slow_holder.is_me() {
            let events = state.journal.take_news();
            drop(state);
            self.observers.track(cell.device, &events);
        }
        result
    }

    /// The same, of a step that can fail.
    fn try_with<R>(&self, cell: &Cell, step: impl FnOnce(&mut State) -> Result<R>) -> Result<R> {
        self.with(cell, step)
    }

    /// Gathers what the history wants to know, before a lock is taken.
    fn cause(&self, cell: &Cell, level: StackLevel) -> Cause {
        cell.recording.cause(level, &self.observers, self.driver())
    }

    fn change_limits(&self, cell: &Cell, change: impl FnOnce(&mut Limits)) {
        change(&mut lock(&cell.limits));
        let limit = cell.limit();
        self.with(cell, |state| state.policy.limit = limit);
    }

    /// Finds what starts at `ptr` on any device.
    fn locate(&self, ptr: DevicePtr) -> Result<(&Cell, BlockKey)> {
        self.cells
            .iter()
            .find_map(|cell| lock(&cell.state).live_at(ptr).map(|block| (cell, block)))
            .ok_or(Error::UnknownPointer { ptr })
    }
}

impl fmt::Debug for CachingAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingAllocator").field("gpu", &self.instance).finish_non_exhaustive()
    }
}
