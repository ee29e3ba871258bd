//! Modules and kernels.

use std::sync::Arc;

use crate::sim::driver::SimDriver;
use crate::sim::refuse::refuse;
use crate::sim::state::SimState;
use crate::sim::work::{KernelWork, Work};
use crate::{
    Call, DeviceId, ErrorCode, FunctionId, KernelArg, KernelSource, Kernels, LaunchShape, ModuleId, Result, StreamId,
};

/// The maxima of threads in a block, and of blocks and threads in each dimension, as on every CUDA device of the last
/// decade.
const MAX_BLOCK_THREADS: u64 = 1024;
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];

impl Kernels for SimDriver {
    fn module_load(&self, device: DeviceId, source: &KernelSource) -> Result<ModuleId> {
        self.call(Call::ModuleLoad, |state| {
            state.use_device(device)?;
            Ok(state.modules.load(*source))
        })
    }

    fn module_unload(&self, module: ModuleId) -> Result<()> {
        self.call(Call::ModuleUnload, |state| {
            check_module(state, module)?;
            state.modules.unload(module);
            Ok(())
        })
    }

    fn function_get(&self, module: ModuleId, name: &str) -> Result<FunctionId> {
        self.call(Call::FunctionGet, |state| {
            check_module(state, module)?;
            match state.modules.function(module, name) {
                Some(function) => Ok(function),
                None => refuse(ErrorCode::NotFound, format!("{module} has no kernel named {name}")),
            }
        })
    }

    fn function_parameters(&self, function: FunctionId) -> Result<Option<Vec<u64>>> {
        self.call(Call::FunctionParameters, |state| {
            state.host_kernel(function)?;
            Ok(state.modules.parameters(function).unwrap_or_default())
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
        self.submit(Call::KernelLaunch, stream, |state, _| {
            let host = state.host_kernel(function)?;
            let fits = |size: [u32; 3], max: [u32; 3]| size.iter().zip(max).all(|(&n, max)| (1..=max).contains(&n));
            let block: u64 = shape.block.iter().map(|&n| u64::from(n)).product();
            if !fits(shape.grid, MAX_GRID) || !fits(shape.block, MAX_BLOCK) || block > MAX_BLOCK_THREADS {
                return refuse(ErrorCode::InvalidValue, format!("no device can run {shape:?}"));
            }
            let kernel = KernelWork { function: Some(function), host, shape, args: args.to_vec() };
            let nanos = state.kernel_nanos(&kernel);
            Ok((Work::Kernel(Arc::new(kernel)), nanos))
        })
    }
}

fn check_module(state: &mut SimState, module: ModuleId) -> Result<()> {
    match state.modules.kernels(module) {
        Ok(_) => Ok(()),
        Err(why) => Err(state.missing(why, module)),
    }
}
