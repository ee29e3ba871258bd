//! Launches of the suites' kernels: the one place for the unsafe calls.

use warpool_driver::{Driver, FunctionId, GraphExecId, KernelArg, LaunchShape, NodeId, Result, StreamId};

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
