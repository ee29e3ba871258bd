//! Modules and kernels of the simulated machine: the Rust doubles of CUDA kernels.

use std::sync::Arc;

use crate::sim::SimDriver;
use crate::sim::work::{KernelWork, Work};
use crate::sim::world::{Function, World};
use crate::{
    Call, DeviceId, ErrorCode, FunctionId, KernelArg, KernelMirror, KernelSource, Kernels, LaunchShape, ModuleId,
    Result, StreamId,
};

/// The most threads of a block, and the most blocks and threads in each dimension, as on every CUDA device of the last
/// decade.
const BLOCK_THREADS: u64 = 1024;
const GRID_MOST: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
const BLOCK_MOST: [u32; 3] = [1024, 1024, 64];

impl Kernels for SimDriver {
    fn module_load(&self, device: DeviceId, source: &KernelSource) -> Result<ModuleId> {
        self.call(Call::ModuleLoad, |world| {
            world.device(device)?;
            Ok(ModuleId(world.modules.insert(source.mirrors)))
        })
    }

    fn module_unload(&self, module: ModuleId) -> Result<()> {
        self.call(Call::ModuleUnload, |world| {
            world.module(module)?;
            world.modules.remove(module.0);
            for id in world.functions.ids() {
                if world.functions.get(id).is_some_and(|function| function.module == module) {
                    world.functions.remove(id);
                }
            }
            Ok(())
        })
    }

    fn function_get(&self, module: ModuleId, name: &str) -> Result<FunctionId> {
        self.call(Call::FunctionGet, |world| {
            let mirrors = world.module(module)?;
            let Some(&mirror) = mirrors.iter().find(|mirror| mirror.name == name) else {
                return world.fail(ErrorCode::NotFound, format!("{module} has no kernel named {name}"));
            };
            let same = |function: &Function| function.module == module && function.mirror.name == name;
            let known = world.functions.ids().into_iter().find(|&id| world.functions.get(id).is_some_and(same));
            Ok(FunctionId(known.unwrap_or_else(|| world.functions.insert(Function { module, mirror }))))
        })
    }

    unsafe fn kernel_launch(
        &self,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
        stream: StreamId,
    ) -> Result<()> {
        Self::kernel_launch(self, function, shape, args, stream)
    }
}

impl SimDriver {
    /// [`Kernels::kernel_launch`], which is safe on the simulated device: a host implementation reaches memory only
    /// through its [`KernelScope`](crate::KernelScope), which checks every access.
    pub fn kernel_launch(
        &self,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
        stream: StreamId,
    ) -> Result<()> {
        self.submit(Call::KernelLaunch, stream, |world, _| {
            let mirror = world.function(function)?;
            let fits = |size: [u32; 3], most: [u32; 3]| size.iter().zip(most).all(|(&n, most)| (1..=most).contains(&n));
            let block: u64 = shape.block.iter().map(|&n| u64::from(n)).product();
            if !fits(shape.grid, GRID_MOST) || !fits(shape.block, BLOCK_MOST) || block > BLOCK_THREADS {
                return world.fail(ErrorCode::InvalidValue, format!("no device can run {shape:?}"));
            }
            let kernel = KernelWork { function: Some(function), mirror, shape, args: args.to_vec() };
            let nanos = world.kernel_nanos(&kernel);
            Ok((Work::Kernel(Arc::new(kernel)), nanos))
        })
    }
}

impl World {
    /// The double of a kernel that is there.
    pub fn function(&mut self, function: FunctionId) -> Result<KernelMirror> {
        match self.functions.get(function.0) {
            Some(&Function { mirror, .. }) => Ok(mirror),
            None => {
                let why = self.functions.why_missing(function.0);
                Err(self.missing(why, function.to_string()))
            }
        }
    }

    /// How long a kernel runs.
    pub fn kernel_nanos(&self, kernel: &KernelWork) -> u64 {
        match kernel.mirror.nanos {
            Some(nanos) => nanos(&kernel.shape, &kernel.args),
            None => self.config.work.kernel_nanos(&kernel.shape),
        }
    }

    fn module(&mut self, module: ModuleId) -> Result<&'static [KernelMirror]> {
        match self.modules.get(module.0) {
            Some(&mirrors) => Ok(mirrors),
            None => {
                let why = self.modules.why_missing(module.0);
                Err(self.missing(why, module.to_string()))
            }
        }
    }
}
