//! The context of a check: a driver, a device, kernels, random numbers, and functions that create and track objects.
//! Everything created here is destroyed after the check ([`cleanup`]), however it ended.

mod cleanup;
mod graphs;
mod kernels;
mod launch;
mod memory;
mod rng;
mod sequences;
mod streams;
mod unsafe_calls;
mod vm;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use warpool::{Device, Instance};
use warpool_driver::{DeviceId, DeviceProperties, Driver};

use crate::expect::{CheckResult, skip};
use crate::sync::{join, lock};

pub(crate) use cleanup::Resource;
pub(crate) use graphs::Capture;
pub(crate) use kernels::{KernelCache, SOURCE, mix_u32_on_host};
pub(crate) use launch::KernelLog;
pub(crate) use memory::{to_bytes, to_words};
pub use vm::VmContext;

use memory::HostPage;

/// The context of a check, shared by its threads.
pub struct TestContext {
    /// The driver under test.
    pub driver: Arc<dyn Driver>,
    /// The device that the check works on.
    pub device_id: DeviceId,
    /// For checks of [`Level::Resources`](crate::Level::Resources).
    instance: Option<(Instance, Device)>,
    kernel_cache: Arc<KernelCache>,
    rng: Mutex<fastrand::Rng>,
    resources: Mutex<Vec<Resource>>,
    /// The second device, once the check has used it.
    second_device: OnceLock<DeviceId>,
    /// Ordinary host memory that was registered or may be: it must live until the cleanup is done.
    host_pages: Mutex<Vec<Vec<HostPage>>>,
}

impl TestContext {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        device_id: DeviceId,
        kernel_cache: Arc<KernelCache>,
        rng: fastrand::Rng,
    ) -> Self {
        Self {
            driver,
            device_id,
            instance: None,
            kernel_cache,
            rng: Mutex::new(rng),
            resources: Mutex::default(),
            second_device: OnceLock::new(),
            host_pages: Mutex::default(),
        }
    }

    /// Creates the instance, and loads the kernels so that a check can use them during a capture.
    pub(crate) fn open_instance(&mut self) -> CheckResult {
        let instance = Instance::new(Arc::clone(&self.driver))?;
        let device = instance.device(self.device_id.0)?;
        self.kernels()?;
        self.instance = Some((instance, device));
        Ok(())
    }

    /// Destroys everything that the check created and has not destroyed. After a check that passed, nothing of the
    /// instance may be in use.
    pub(crate) fn cleanup(&mut self, passed: bool) -> CheckResult {
        let closed = match self.instance.take() {
            Some((instance, device)) if passed => close(instance, device),
            _ => Ok(()),
        };
        let resources = std::mem::take(&mut *lock(&self.resources));
        closed.and(cleanup::cleanup(self, resources))
    }

    /// Adds `resource` to what is cleaned up.
    pub(crate) fn track(&self, resource: Resource) {
        lock(&self.resources).push(resource);
    }

    /// Removes `resource` from what is cleaned up: the check has destroyed it, or will.
    pub(crate) fn untrack(&self, resource: Resource) {
        let mut resources = lock(&self.resources);
        let index = resources.iter().rposition(|each| *each == resource);
        resources.remove(index.unwrap_or_else(|| panic!("{resource:?} is not tracked")));
    }

    fn rng(&self) -> MutexGuard<'_, fastrand::Rng> {
        lock(&self.rng)
    }

    // ---- instance

    /// The instance of a check of [`Level::Resources`](crate::Level::Resources).
    ///
    /// # Panics
    /// In a check of [`Level::Driver`](crate::Level::Driver).
    pub fn instance(&self) -> &Instance {
        &self.instance.as_ref().expect("only suites of Level::Resources have an instance").0
    }

    /// The instance's device that the check works on.
    ///
    /// # Panics
    /// In a check of [`Level::Driver`](crate::Level::Driver).
    pub fn device(&self) -> &Device {
        &self.instance.as_ref().expect("only suites of Level::Resources have an instance").1
    }

    /// Another device of the instance. Skips the check if there is none.
    pub(crate) fn second_device(&self) -> CheckResult<Device> {
        Ok(self.instance().device(self.second_device_id()?.0)?)
    }

    // ---- devices

    /// The properties of the device that the check works on.
    pub fn properties(&self) -> CheckResult<DeviceProperties> {
        Ok(self.driver.device_properties(self.device_id)?)
    }

    /// The id of no device.
    pub(crate) fn invalid_device_id(&self) -> CheckResult<DeviceId> {
        Ok(DeviceId(self.driver.device_count()?))
    }

    /// Another device. Skips the check if there is none.
    pub(crate) fn second_device_id(&self) -> CheckResult<DeviceId> {
        let count = self.driver.device_count()?;
        match (0..count).map(DeviceId).find(|device| *device != self.device_id) {
            Some(device) => Ok(*self.second_device.get_or_init(|| device)),
            None => skip("there is only one device"),
        }
    }

    /// Another device that this one has peer access to. Skips the check if there is none.
    pub(crate) fn peer_device_id(&self) -> CheckResult<DeviceId> {
        let peers = self.properties()?.peers;
        self.second_device_id()?;
        match peers.first() {
            Some(peer) => Ok(*peer),
            None => skip("the device has no peers"),
        }
    }

    fn second_device_used(&self) -> Option<DeviceId> {
        self.second_device.get().copied()
    }

    // ---- threads

    /// Runs `body` on a new thread, which has not used the driver before, and waits for that to end.
    pub(crate) fn on_new_thread<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| join(scope.spawn(body)))
    }
}

fn close(instance: Instance, device: Device) -> CheckResult {
    device.synchronize()?;
    drop(device);
    Ok(instance.close()?)
}
