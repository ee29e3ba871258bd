//! One device of an [`Instance`].

use std::fmt;

use warpool_driver::{DeviceId, DeviceProperties, Driver};

use super::extensions::Extensions;
use super::{DeviceState, Instance};
use crate::Result;

/// One device of an [`Instance`]. Cheap to clone.
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

    /// The driver's id of it.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// Its index, from 0.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.id.0
    }

    /// Its properties, read when the [`Instance`] was created.
    #[must_use]
    pub fn properties(&self) -> &DeviceProperties {
        &self.state().properties
    }

    /// Waits until all work on the device is done.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.driver().device_synchronize(self.id)?)
    }

    /// Makes it the driver's current device of the calling thread. Creates the device's context.
    ///
    /// Warpool names the device in every call and does not need this; other libraries on the same thread that use the
    /// driver's current device do.
    pub fn bind_to_thread(&self) -> Result<()> {
        Ok(self.driver().set_current_device(self.id)?)
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    /// The state that other modules keep for this device.
    pub(crate) fn extensions(&self) -> &Extensions {
        &self.state().extensions
    }

    pub(super) fn state(&self) -> &DeviceState {
        self.instance.state(self.id)
    }

    /// The device with an id that is known to exist.
    pub(crate) fn from_id(instance: &Instance, id: DeviceId) -> Self {
        debug_assert!(id.0 < instance.device_count());
        Self { instance: instance.clone(), id }
    }
}

impl Instance {
    /// The device with that index.
    pub fn device(&self, index: u32) -> Result<Device> {
        self.check_index(index)?;
        Ok(Device::from_id(self, DeviceId(index)))
    }

    /// All devices, in order.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = Device> + '_ {
        (0..self.device_count()).map(|index| Device::from_id(self, DeviceId(index)))
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
