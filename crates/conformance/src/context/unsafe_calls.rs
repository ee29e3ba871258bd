//! The unsafe calls of the contract, for kernels, graphs and memory of a check.

#![expect(unsafe_code, reason = "launches, and freeing reserved addresses, are unsafe in the contract")]

use warpool_driver::{DevicePtr, Driver, FunctionId, GraphExecId, KernelArg, LaunchShape, NodeId, Result, StreamId};

use super::TestContext;

/// Launches a kernel with memory that the check owns.
pub(super) fn launch_kernel(
    driver: &dyn Driver,
    function: FunctionId,
    shape: LaunchShape,
    args: &[KernelArg],
    stream: StreamId,
) -> Result<()> {
    // SAFETY: checks pass addresses of memory that they own, of sizes that the kernel stays within; the memory is freed
    // after the check has waited for its streams.
    unsafe { driver.kernel_launch(function, shape, args, stream) }
}

impl TestContext {
    /// Launches a kernel with memory that the check owns.
    pub(crate) fn launch_kernel(
        &self,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
        stream: StreamId,
    ) -> Result<()> {
        launch_kernel(&*self.driver, function, shape, args, stream)
    }

    /// Sets the arguments of a kernel node of an executable graph, to memory that the check owns.
    pub(crate) fn set_exec_kernel(
        &self,
        exec: GraphExecId,
        node: NodeId,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
    ) -> Result<()> {
        // SAFETY: as in `launch_kernel`.
        unsafe { self.driver.graph_exec_set_kernel(exec, node, function, shape, args) }
    }

    /// Launches a graph of the check.
    pub(crate) fn launch_graph(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        // SAFETY: as in `launch_kernel`; the check's graphs are destroyed before its memory is freed.
        unsafe { self.driver.graph_launch(exec, stream) }
    }

    /// Frees addresses that the check reserved.
    pub(crate) fn free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        // SAFETY: a check waits for its streams before it frees what they use.
        unsafe { self.driver.vm_free_range(ptr, bytes) }
    }
}
