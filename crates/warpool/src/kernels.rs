//! Warpool's own kernels: loaded once per device at first use, and kept until the [`Instance`](crate::Instance) is
//! closed. Launches are in `launch.rs`.

use std::sync::Mutex;

use warpool_driver::{DeviceId, Driver, FunctionId, KernelSource, ModuleId};

use crate::capture::RelaxedMode;
use crate::instance::{Extension, ExtensionSlot};
use crate::{Device, Result, lock};

/// The loaded kernels of one device.
struct KernelCache {
    device: DeviceId,
    modules: Mutex<Vec<Module>>,
}

struct Module {
    source: KernelSource,
    id: ModuleId,
    functions: Vec<(&'static str, FunctionId)>,
}

impl Device {
    /// The kernel `name` of `source`, loaded if necessary.
    pub(crate) fn kernel(&self, source: &KernelSource, name: &'static str) -> Result<FunctionId> {
        let make = || KernelCache { device: self.id(), modules: Mutex::default() };
        self.extensions().get_or_init(make).get(self.driver(), source, name)
    }
}

impl KernelCache {
    fn get(&self, driver: &dyn Driver, source: &KernelSource, name: &'static str) -> Result<FunctionId> {
        if let Some(function) = self.find(source, name) {
            return Ok(function);
        }
        let id = self.module(driver, source)?;
        let function = driver.function_get(id, name)?;
        let mut modules = lock(&self.modules);
        let module = modules.iter_mut().find(|module| module.id == id).expect("modules stay until the end");
        if module.functions.iter().all(|&(other, _)| other != name) {
            module.functions.push((name, function));
        }
        Ok(function)
    }

    fn find(&self, source: &KernelSource, name: &str) -> Option<FunctionId> {
        let modules = lock(&self.modules);
        let module = modules.iter().find(|module| is_same(&module.source, source))?;
        module.functions.iter().find(|(other, _)| *other == name).map(|&(_, function)| function)
    }

    fn module(&self, driver: &dyn Driver, source: &KernelSource) -> Result<ModuleId> {
        let find =
            |modules: &[Module]| modules.iter().find(|module| is_same(&module.source, source)).map(|module| module.id);
        if let Some(id) = find(&lock(&self.modules)) {
            return Ok(id);
        }
        // Compiling takes long, so it is done without the lock. If two threads do it, one module is unloaded again.
        let id = driver.module_load(self.device, source)?;
        let mut modules = lock(&self.modules);
        let Some(first) = find(&modules) else {
            modules.push(Module { source: *source, id, functions: Vec::new() });
            return Ok(id);
        };
        drop(modules);
        // Kernels may be loaded while a stream is capturing, and unloading would invalidate the capture.
        RelaxedMode::run(driver, || Ok(driver.module_unload(id)?))?;
        Ok(first)
    }
}

/// Whether two sources give the same kernels. Usually they are the same constant; the text is rarely compared.
fn is_same(known: &KernelSource, other: &KernelSource) -> bool {
    known.name == other.name
        && std::ptr::eq(known.host_kernels, other.host_kernels)
        && (std::ptr::eq(known.cuda, other.cuda) || known.cuda == other.cuda)
}

impl Extension for KernelCache {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::Kernels
    }

    fn destroy(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for module in std::mem::take(&mut *lock(&self.modules)) {
            outcome = outcome.and(driver.module_unload(module.id));
        }
        Ok(outcome?)
    }
}
