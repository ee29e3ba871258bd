//! Kernels of this crate's own, loaded once per device at their first use and kept until the [`Instance`](crate::Instance) is
//! closed.

use std::sync::Mutex;

use warpool_driver::{DeviceId, Driver, FunctionId, KernelSource, ModuleId};

use crate::capture::RelaxedMode;
use crate::{Result, lock};

/// The loaded kernels of one device.
pub(crate) struct KernelShelf {
    device: DeviceId,
    loaded: Mutex<Vec<Loaded>>,
}

struct Loaded {
    source: &'static str,
    module: ModuleId,
    functions: Vec<(&'static str, FunctionId)>,
}

impl KernelShelf {
    pub(crate) fn new(device: DeviceId) -> Self {
        Self { device, loaded: Mutex::default() }
    }

    /// The kernel of that name. Sources are told apart by their names.
    pub(crate) fn get(&self, driver: &dyn Driver, source: &KernelSource, name: &'static str) -> Result<FunctionId> {
        if let Some(function) = self.find(source, name) {
            return Ok(function);
        }
        let module = self.module(driver, source)?;
        let function = driver.function_get(module, name)?;
        let mut loaded = lock(&self.loaded);
        let entry = loaded.iter_mut().find(|entry| entry.module == module).expect("modules stay until the end");
        if entry.functions.iter().all(|&(known, _)| known != name) {
            entry.functions.push((name, function));
        }
        Ok(function)
    }

    fn find(&self, source: &KernelSource, name: &str) -> Option<FunctionId> {
        let loaded = lock(&self.loaded);
        let entry = loaded.iter().find(|entry| entry.source == source.name)?;
        entry.functions.iter().find(|(known, _)| *known == name).map(|&(_, function)| function)
    }

    fn module(&self, driver: &dyn Driver, source: &KernelSource) -> Result<ModuleId> {
        let known =
            |loaded: &[Loaded]| loaded.iter().find(|entry| entry.source == source.name).map(|entry| entry.module);
        if let Some(module) = known(&lock(&self.loaded)) {
            return Ok(module);
        }
        // Compiling takes long, and without the lock. Of two threads that both did, one's module goes away again.
        let module = driver.module_load(self.device, source)?;
        let mut loaded = lock(&self.loaded);
        let Some(first) = known(&loaded) else {
            loaded.push(Loaded { source: source.name, module, functions: Vec::new() });
            return Ok(module);
        };
        drop(loaded);
        // Relaxed: kernels are also loaded while a stream captures, which would forbid this, and break.
        RelaxedMode::run(driver, || Ok(driver.module_unload(module)?))?;
        Ok(first)
    }

    /// Unloads everything; goes on after a failure and reports the first.
    pub(crate) fn destroy_all(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for entry in std::mem::take(&mut *lock(&self.loaded)) {
            outcome = outcome.and(driver.module_unload(entry.module));
        }
        Ok(outcome?)
    }
}
