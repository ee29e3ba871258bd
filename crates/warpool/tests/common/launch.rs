//! Safe wrappers of launches on the simulated device, which checks every memory access of a kernel. The wrapped calls
//! are unsafe.

use warpool::driver::{DevicePtr, Driver, FunctionId, GraphExecId, KernelArg, LaunchShape, StreamId};
use warpool::generator::Target;
use warpool::graph::{Capture, GraphArg};
use warpool::{Result, Stream};

/// Launches a kernel of one thread.
pub fn launch_kernel(driver: &dyn Driver, function: FunctionId, args: &[KernelArg], stream: StreamId) -> Result<()> {
    assert_eq!(driver.kind(), "sim");
    // SAFETY: the simulated device checks every access of a kernel.
    Ok(unsafe { driver.kernel_launch(function, LaunchShape::ONE, args, stream) }?)
}

/// Captures a kernel of one thread.
pub fn capture_kernel(
    capture: &mut Capture<'_>,
    function: FunctionId,
    args: &[GraphArg],
    stream: &Stream,
) -> Result<()> {
    assert_eq!(stream.instance().driver().kind(), "sim");
    // SAFETY: the simulated device checks every access of a kernel.
    unsafe { capture.launch(function, LaunchShape::ONE, args, stream) }
}

/// Launches a graph.
pub fn launch_graph(driver: &dyn Driver, exec: GraphExecId, stream: StreamId) -> Result<()> {
    assert_eq!(driver.kind(), "sim");
    // SAFETY: the simulated device checks every access of a node.
    Ok(unsafe { driver.graph_launch(exec, stream) }?)
}

/// A target of random numbers at any address.
pub fn raw_target(driver: &dyn Driver, ptr: DevicePtr, count: u64) -> Target {
    assert_eq!(driver.kind(), "sim");
    // SAFETY: the simulated device checks every access of a kernel.
    unsafe { Target::raw(ptr, count) }
}
