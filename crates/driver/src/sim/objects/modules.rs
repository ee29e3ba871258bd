//! Modules and their functions: the host implementations of CUDA kernels.

use crate::sim::table::{Missing, Table};
use crate::{FunctionId, HostKernel, ModuleId};

#[derive(Clone, Copy, Debug)]
struct Function {
    module: ModuleId,
    host: HostKernel,
}

/// All loaded modules.
#[derive(Debug, Default)]
pub struct Modules {
    modules: Table<&'static [HostKernel]>,
    functions: Table<Function>,
}

impl Modules {
    pub fn load(&mut self, kernels: &'static [HostKernel]) -> ModuleId {
        ModuleId(self.modules.insert(kernels))
    }

    /// Unloads a module that exists, with its functions.
    pub fn unload(&mut self, module: ModuleId) {
        self.modules.remove(module.0);
        for id in self.functions.ids() {
            if self.functions.get(id).is_some_and(|function| function.module == module) {
                self.functions.remove(id);
            }
        }
    }

    /// The kernels of a module.
    pub fn kernels(&self, module: ModuleId) -> Result<&'static [HostKernel], Missing> {
        self.modules.get(module.0).copied().ok_or_else(|| self.modules.why_missing(module.0))
    }

    /// The function of that name in a module that exists; the same id each time.
    pub fn function(&mut self, module: ModuleId, name: &str) -> Option<FunctionId> {
        let &host = self.modules.get(module.0)?.iter().find(|kernel| kernel.name == name)?;
        let is_same = |function: &Function| function.module == module && function.host.name == name;
        let known = self.functions.ids().into_iter().find(|&id| self.functions.get(id).is_some_and(is_same));
        Some(FunctionId(known.unwrap_or_else(|| self.functions.insert(Function { module, host }))))
    }

    /// The host implementation of a function.
    pub fn host_kernel(&self, function: FunctionId) -> Result<HostKernel, Missing> {
        match self.functions.get(function.0) {
            Some(&Function { host, .. }) => Ok(host),
            None => Err(self.functions.why_missing(function.0)),
        }
    }

    pub fn len(&self) -> usize {
        self.modules.len()
    }
}
