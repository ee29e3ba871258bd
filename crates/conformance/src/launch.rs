//! The unsafe calls of the suites, in one place: launches of kernels and graphs, and the freeing of reserved addresses.

use warpool_driver::{DevicePtr, Driver, FunctionId, GraphExecId, KernelArg, LaunchShape, NodeId, Result, StreamId};

/// Launches a kernel of a suite.
pub(crate) fn launch_kernel(
    driver: &dyn Driver,
    function: FunctionId,
    shape: LaunchShape,
    args: &[KernelArg],
    stream: StreamId,
) -> Result<()> {
    // SAFETY: checks pass addresses of memory that they own, of sizes that the kernel stays within; it is freed, or
    // given back, after the check has waited for its streams.
    unsafe { driver.kernel_launch(function, shape, args, stream) }
}

/// Launches an executable of a suite.
pub(crate) fn launch_graph(driver: &dyn Driver, exec: GraphExecId, stream: StreamId) -> Result<()> {
    // SAFETY: as in `launch_kernel`; the check's graphs are destroyed before its memory is.
    unsafe { driver.graph_launch(exec, stream) }
}

/// Gives back addresses that a check reserved.
pub(crate) fn free_range(driver: &dyn Driver, ptr: DevicePtr, bytes: u64) -> Result<()> {
    // SAFETY: a check waits for its streams before it frees what they use.
    unsafe { driver.vm_free_range(ptr, bytes) }
}

/// Gives a kernel of a suite new arguments in an executable.
pub(crate) fn set_kernel(
    driver: &dyn Driver,
    exec: GraphExecId,
    node: NodeId,
    function: FunctionId,
    shape: LaunchShape,
    args: &[KernelArg],
) -> Result<()> {
    // SAFETY: as in `launch_kernel`.
    unsafe { driver.graph_exec_set_kernel(exec, node, function, shape, args) }
}
