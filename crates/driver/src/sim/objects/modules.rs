//! Modules and their functions: the host implementations of CUDA kernels.

use super::signature;
use crate::sim::table::{Missing, Table};
use crate::{FunctionId, HostKernel, KernelSource, ModuleId};

#[derive(Clone, Copy, Debug)]
struct Function {
    module: ModuleId,
    host: HostKernel,
}

/// All loaded modules.
#[derive(Debug, Default)]
pub struct Modules {
    modules: Table<KernelSource>,
    functions: Table<Function>,
}

impl Modules {
    pub fn load(&mut self, source: KernelSource) -> ModuleId {
        ModuleId(self.modules.insert(source))
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
        let source = self.modules.get(module.0).ok_or_else(|| self.modules.why_missing(module.0))?;
        Ok(source.host_kernels)
    }

    /// The function of that name in a module that exists; the same id each time.
    pub fn function(&mut self, module: ModuleId, name: &str) -> Option<FunctionId> {
        let &host = self.modules.get(module.0)?.host_kernels.iter().find(|kernel| kernel.name == name)?;
        let is_same = |function: &Function| function.module == module && function.host.name == name;
        let known = self.functions.ids().into_iter().find(|&id| self.functions.get(id).is_some_and(is_same));
        Some(FunctionId(known.unwrap_or_else(|| self.functions.insert(Function { module, host }))))
    }

    /// The sizes of a function's arguments, if they are known from the module's CUDA source.
    pub fn parameters(&self, function: FunctionId) -> Result<Option<Vec<u64>>, Missing> {
        let known = self.functions.get(function.0).ok_or_else(|| self.functions.why_missing(function.0))?;
        let source = self.modules.get(known.module.0);
        Ok(source.and_then(|source| signature::parameter_sizes(source.cuda, known.host.name)))
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
