//! The root of everything: a [`Instance`] around a driver, and its [`Device`]s.
//!
//! A `Instance` owns what is kept per device (pools of streams and events); what is kept per thread is in `current.rs`.
//! The rule: making a `Instance` or a `Device` creates no context, and dropping one makes no driver call.

mod current;
mod event;
mod event_pool;
mod lease;
mod stream;
mod stream_pool;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use warpool_driver::{DeviceId, DeviceProperties, Driver, StreamId};

use crate::capture::CaptureRegistry;
use crate::generator::Seat;
use crate::graph::GraphShelf;
use crate::handle::StrayHandles;
use crate::kernels::KernelShelf;
use crate::{Error, Result};

pub use current::{DeviceGuard, MultiStreamGuard, StreamGuard};
pub use event::{Event, EventOptions};
use event_pool::EventShelf;
pub use event_pool::{EventPool, PooledEvent};
pub use lease::StreamLease;
pub use stream::Stream;
use stream_pool::StreamShelf;
pub use stream_pool::{PRIORITIES_MAX, STREAMS_PER_POOL};

/// A driver with its devices, and the pools that Warpool keeps for them. Cheap to clone; clones are the same `Instance`.
///
/// Streams, events and leases hold on to the `Instance` that they came from. Dropping the last of them makes no driver call:
/// what the pools still hold stays with the driver, and goes with it. [`close`](Self::close) gives it back by hand.
#[derive(Clone)]
pub struct Instance {
    shared: Arc<Shared>,
}

/// What all clones of a `Instance` share.
struct Shared {
    key: InstanceKey,
    /// Lives as long as this; threads watch it to know when their notes about this `Instance` are stale.
    alive: Arc<()>,
    driver: Arc<dyn Driver>,
    devices: Box<[DeviceState]>,
    captures: CaptureRegistry,
}

/// Which `Instance`. Never reused in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InstanceKey(u64);

/// What is kept per device.
pub(crate) struct DeviceState {
    properties: DeviceProperties,
    /// Asked for at first use: on some drivers even that makes a context.
    default_stream: OnceLock<StreamId>,
    pub(crate) streams: StreamShelf,
    pub(crate) events: EventShelf,
    pub(crate) kernels: KernelShelf,
    pub(crate) stray_handles: StrayHandles,
    pub(crate) graphs: GraphShelf,
    pub(crate) default_generator: OnceLock<Arc<Seat>>,
}

impl Instance {
    /// Takes in a driver and reads what its devices are. Creates no context, stream or event.
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
                    streams: StreamShelf::new(DeviceId(index)),
                    events: EventShelf::new(DeviceId(index)),
                    kernels: KernelShelf::new(DeviceId(index)),
                    stray_handles: StrayHandles::default(),
                    graphs: GraphShelf::default(),
                    default_generator: OnceLock::new(),
                })
            })
            .collect::<Result<_>>()?;
        let key = InstanceKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed));
        Ok(Self {
            shared: Arc::new(Shared {
                key,
                alive: Arc::new(()),
                driver,
                devices,
                captures: CaptureRegistry::default(),
            }),
        })
    }

    /// The driver underneath.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// How many devices there are; at least one.
    #[must_use]
    pub fn device_count(&self) -> u32 {
        u32::try_from(self.shared.devices.len()).expect("the driver counted them in a u32")
    }

    /// The device with that index.
    pub fn device(&self, index: u32) -> Result<Device> {
        let count = self.device_count();
        if index >= count {
            return Err(Error::DeviceOutOfRange { index, count });
        }
        Ok(Device { instance: self.clone(), id: DeviceId(index) })
    }

    /// All devices, in order.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = Device> + '_ {
        (0..self.device_count()).map(|index| Device { instance: self.clone(), id: DeviceId(index) })
    }

    /// Destroys what dropped graphs left, every pooled stream and event, unloads our own kernels, and lets the driver
    /// go.
    ///
    /// Nothing else may hold on to this `Instance` any more, not even a [`Device`]: [`Error::StillInUse`] otherwise, and
    /// nothing is destroyed; call it on the last handle. Of several driver calls that fail the first is reported, and
    /// the rest is still given back.
    pub fn close(self) -> Result<()> {
        match Arc::try_unwrap(self.shared) {
            Ok(shared) => {
                let mut outcome = Ok(());
                for state in &shared.devices {
                    outcome = outcome.and(state.graphs.destroy_all(&*shared.driver));
                    outcome = outcome.and(state.streams.destroy_all(&*shared.driver));
                    outcome = outcome.and(state.events.destroy_all(&*shared.driver));
                    outcome = outcome.and(state.kernels.destroy_all(&*shared.driver));
                    state.stray_handles.destroy_all(&*shared.driver);
                }
                outcome
            }
            Err(shared) => Err(Error::StillInUse { references: Arc::strong_count(&shared) - 1 }),
        }
    }

    /// The state of a device that is known to exist.
    pub(crate) fn state(&self, device: DeviceId) -> &DeviceState {
        &self.shared.devices[device.0 as usize]
    }

    /// The captures that are under way.
    pub(crate) fn captures(&self) -> &CaptureRegistry {
        &self.shared.captures
    }

    pub(crate) fn key(&self) -> InstanceKey {
        self.shared.key
    }

    pub(crate) fn alive(&self) -> &Arc<()> {
        &self.shared.alive
    }

    pub(crate) fn default_stream_id(&self, device: DeviceId) -> Result<StreamId> {
        let cell = &self.state(device).default_stream;
        if let Some(&id) = cell.get() {
            return Ok(id);
        }
        // Two threads may both ask; the driver always gives the same id.
        let id = self.driver().stream_default(device)?;
        Ok(*cell.get_or_init(|| id))
    }

    /// Fails if `other` is another `Instance`; `object` is the argument that it came with.
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

/// One device of a [`Instance`]. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Device {
    instance: Instance,
    id: DeviceId,
}

impl Device {
    /// The `Instance` that it belongs to.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// Its name for the driver.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// Its number, from 0.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.id.0
    }

    /// What it is and can do, as read when the [`Instance`] was made.
    #[must_use]
    pub fn properties(&self) -> &DeviceProperties {
        &self.state().properties
    }

    /// Waits until all work on the device is done.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.driver().device_synchronize(self.id)?)
    }

    /// Makes it the calling thread's device for the driver too.
    ///
    /// Warpool names the device in every call and does not need this; foreign code on the same thread that
    /// asks the driver for "the current device" does. Creates the device's context.
    pub fn bind_to_thread(&self) -> Result<()> {
        Ok(self.driver().set_current_device(self.id)?)
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    pub(crate) fn state(&self) -> &DeviceState {
        self.instance.state(self.id)
    }

    /// A handle for a device that is known to exist.
    pub(crate) fn known(instance: &Instance, id: DeviceId) -> Self {
        debug_assert!(id.0 < instance.device_count());
        Self { instance: instance.clone(), id }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.id, self.properties().name)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}
