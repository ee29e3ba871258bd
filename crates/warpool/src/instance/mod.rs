//! The root object, [`Instance`]: a driver with its devices, streams and events, and the current device and streams of
//! each thread.
//!
//! Creating an `Instance` or a `Device` creates no context, and dropping one makes no driver call. State that other
//! modules keep per device is in `extensions.rs`.

mod current;
mod device;
mod event;
mod event_pool;
mod extensions;
mod lease;
mod stream;
mod stream_pool;

use std::fmt;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use rustc_hash::FxHashSet;
use warpool_driver::fork::{self, Origin};
use warpool_driver::{DeviceId, DeviceProperties, Driver, StreamId, source_line};

use crate::sync::CaptureGate;
use crate::{Error, Result};

pub use current::{DeviceGuard, MultiStreamGuard, StreamGuard};
pub use device::Device;
pub use event::{Event, EventOptions};
use event_pool::EventCache;
pub use event_pool::{EventPool, PooledEvent};
use extensions::Extensions;
pub(crate) use extensions::{Extension, ExtensionSlot};
pub use lease::StreamLease;
pub use stream::Stream;
use stream_pool::StreamPools;
pub use stream_pool::{PRIORITIES_MAX, STREAMS_PER_POOL};

/// A driver with its devices, and the pools that Warpool keeps for them. Cheap to clone; clones refer to the same
/// `Instance`.
///
/// Devices, streams, events and leases keep their `Instance` alive. Dropping the last of them makes no driver call: the
/// pooled streams and events are left to the driver. [`close`](Self::close) destroys them.
#[derive(Clone)]
pub struct Instance {
    shared: Arc<Shared>,
}

/// The state that all clones of an `Instance` share.
struct Shared {
    key: InstanceKey,
    /// Threads hold weak references to it, which tell them that their entries for this `Instance` are stale.
    alive: Arc<()>,
    driver: Arc<dyn Driver>,
    /// Whether the driver detects hazards, and names the program's lines in them.
    detects_hazards: bool,
    origin: Origin,
    devices: Box<[DeviceState]>,
    /// Streams of others that exist as long as this `Instance`.
    promised_streams: RwLock<FxHashSet<StreamId>>,
    /// Maintained by `capture/`. Stored here and not in the extensions, because every allocation and replay reads it.
    captures_under_way: AtomicUsize,
    /// Stored here too, because every typed call enters it.
    capture_gate: CaptureGate,
    /// Maintained by `memory/`, and stored here for the same reason.
    ranges_asleep: AtomicUsize,
    extensions: Extensions,
}

/// Identifies an `Instance`. Never reused in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InstanceKey(u64);

/// The state of one device.
struct DeviceState {
    properties: DeviceProperties,
    /// Read at first use: on some drivers that creates a context.
    default_stream: OnceLock<StreamId>,
    streams: StreamPools,
    events: EventCache,
    extensions: Extensions,
}

impl Instance {
    /// Wraps a driver and reads the properties of its devices. Creates no context, stream or event.
    pub fn new(driver: Arc<dyn Driver>) -> Result<Self> {
        static NEXT_KEY: AtomicU64 = AtomicU64::new(0);
        let count = driver.device_count()?;
        if count == 0 {
            return Err(Error::NoDevice { driver: driver.kind() });
        }
        let devices = (0..count)
            .map(|index| {
                Ok(DeviceState {
                    properties: driver.device_properties(DeviceId(index))?,
                    default_stream: OnceLock::new(),
                    streams: StreamPools::new(DeviceId(index)),
                    events: EventCache::new(DeviceId(index)),
                    extensions: Extensions::default(),
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            shared: Arc::new(Shared {
                key: InstanceKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed)),
                alive: Arc::new(()),
                detects_hazards: driver.tracks_suballocations(),
                driver,
                origin: Origin::here(),
                devices,
                promised_streams: RwLock::default(),
                captures_under_way: AtomicUsize::new(0),
                capture_gate: CaptureGate::default(),
                ranges_asleep: AtomicUsize::new(0),
                extensions: Extensions::default(),
            }),
        })
    }

    /// The driver.
    #[inline]
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// Whether this process was forked after this `Instance` was created. It cannot be used then: allocators and
    /// drivers return an error, and freed or dropped objects are left to the parent.
    #[inline]
    #[must_use]
    pub fn is_inherited(&self) -> bool {
        fork::is_child() && !self.shared.origin.is_here()
    }

    /// Fails in a forked child, before a lock is taken that another thread may have held at the fork.
    #[inline]
    pub(crate) fn expect_own_process(&self, call: &'static str) -> Result<()> {
        if self.is_inherited() { Err(fork::error(call).into()) } else { Ok(()) }
    }

    /// How many devices there are; at least one.
    #[must_use]
    pub fn device_count(&self) -> u32 {
        u32::try_from(self.shared.devices.len()).expect("the driver counted them in a u32")
    }

    /// Destroys the driver objects of dropped graphs, unloads Warpool's own kernels, destroys every pooled stream and
    /// event, and drops the driver.
    ///
    /// Call it on the last handle: while anything else holds this `Instance`, even a [`Device`], it fails with
    /// [`Error::StillInUse`] and destroys nothing. After a failed driver call it continues, and returns the first
    /// error.
    pub fn close(self) -> Result<()> {
        match Arc::try_unwrap(self.shared) {
            Ok(shared) => {
                let driver = &*shared.driver;
                let mut outcome = Ok(());
                for state in &shared.devices {
                    outcome = outcome.and(state.extensions.destroy_all(driver));
                    outcome = outcome.and(state.streams.destroy_all(driver));
                    outcome = outcome.and(state.events.destroy_all(driver));
                }
                outcome.and(shared.extensions.destroy_all(driver))
            }
            Err(shared) => Err(Error::StillInUse { references: Arc::strong_count(&shared) - 1 }),
        }
    }

    fn check_index(&self, index: u32) -> Result<()> {
        let count = self.device_count();
        if index < count { Ok(()) } else { Err(Error::DeviceOutOfRange { index, count }) }
    }

    /// The state of a device that is known to exist.
    fn state(&self, device: DeviceId) -> &DeviceState {
        &self.shared.devices[device.0 as usize]
    }

    /// The state that other modules keep for this `Instance`.
    pub(crate) fn extensions(&self) -> &Extensions {
        &self.shared.extensions
    }

    /// How many captures are active, or about to begin.
    #[inline]
    pub(crate) fn captures_under_way(&self) -> &AtomicUsize {
        &self.shared.captures_under_way
    }

    /// Held open by typed calls, and closed while a capture begins or ends.
    #[inline]
    pub(crate) fn capture_gate(&self) -> &CaptureGate {
        &self.shared.capture_gate
    }

    /// How many address ranges are asleep, or about to be.
    #[inline]
    pub(crate) fn ranges_asleep(&self) -> &AtomicUsize {
        &self.shared.ranges_asleep
    }

    #[inline]
    pub(crate) fn key(&self) -> InstanceKey {
        self.shared.key
    }

    /// Whether the driver detects hazards.
    #[inline]
    pub(crate) fn detects_hazards(&self) -> bool {
        self.shared.detects_hazards
    }

    /// Runs `calls`, and attributes their driver calls to the program's line `line`.
    #[inline]
    pub(crate) fn at_line<R>(&self, line: &'static Location<'static>, calls: impl FnOnce() -> R) -> R {
        source_line::at_if(self.shared.detects_hazards, line, calls)
    }

    pub(crate) fn default_stream_id(&self, device: DeviceId) -> Result<StreamId> {
        let cell = &self.state(device).default_stream;
        if let Some(&id) = cell.get() {
            return Ok(id);
        }
        // Two threads may both get here; the driver always returns the same id.
        let id = self.driver().stream_default(device)?;
        Ok(*cell.get_or_init(|| id))
    }

    /// Whether a stream lives as long as this `Instance`: a default stream, or one that was created here. Any other may
    /// be destroyed by its owner.
    pub(crate) fn keeps_stream(&self, device: DeviceId, stream: StreamId) -> Result<bool> {
        Ok(stream == self.default_stream_id(device)? || self.state(device).streams.contain(stream))
    }

    /// Whether a stream may be named as long as this `Instance` lives: [`keeps_stream`](Self::keeps_stream), or its
    /// owner has promised it. No driver call: a default stream counts once it was used through this `Instance`.
    pub(crate) fn may_name(&self, stream: StreamId) -> bool {
        let keeps = |state: &DeviceState| state.default_stream.get() == Some(&stream) || state.streams.contain(stream);
        self.shared.devices.iter().any(keeps)
            || self.shared.promised_streams.read().unwrap_or_else(PoisonError::into_inner).contains(&stream)
    }

    /// The owner of a stream promises that it exists as long as this `Instance`.
    pub(super) fn promise(&self, stream: StreamId) {
        self.shared.promised_streams.write().unwrap_or_else(PoisonError::into_inner).insert(stream);
    }

    /// Fails if `other` is another `Instance`; `object` names the argument that it belongs to.
    #[inline]
    pub(crate) fn expect_same(&self, other: &Self, object: &'static str) -> Result<()> {
        if self == other { Ok(()) } else { Err(Error::ForeignInstance { object }) }
    }
}

impl PartialEq for Instance {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for Instance {}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instance")
            .field("driver", &self.driver().kind())
            .field("devices", &self.device_count())
            .finish()
    }
}
