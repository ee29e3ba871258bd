//! Launches of this crate's own kernels, and of graphs.
//!
//! A kernel accesses the memory that its arguments point to, so
//! [`Kernels::kernel_launch`](warpool_driver::Kernels::kernel_launch) is unsafe. The kernels here are few and known:
//! each function states what its kernel accesses.
#![expect(unsafe_code, reason = "launches of this crate's own kernels, and of graphs")]

use warpool_driver::{
    ConditionalId, DevicePtr, Driver, DriverError, ErrorCode, FunctionId, GraphExecId, KernelArg, LaunchShape, NodeId,
    Result, StreamId,
};

use crate::memory::DeviceBlock;

/// Launches a graph of this crate.
#[inline]
pub(crate) fn graph(driver: &dyn Driver, exec: GraphExecId, stream: StreamId) -> Result<()> {
    // SAFETY: the graph owns the memory that it was captured with through `Capture`, and is alive. Kernels were
    // captured under a promise that holds for replays.
    unsafe { driver.graph_launch(exec, stream) }
}

/// Launches a kernel that fills `bytes` bytes at `target` with random numbers. `args` begin with the target's address
/// and the count of numbers; the others are numbers, and the generator's slot. `InvalidValue` unless the target is
/// device memory.
pub(crate) fn fill_random(
    driver: &dyn Driver,
    function: FunctionId,
    (target, bytes): (DevicePtr, u64),
    shape: LaunchShape,
    args: &[KernelArg],
    stream: StreamId,
) -> Result<()> {
    expect_device_memory(driver, target, bytes)?;
    // SAFETY: the kernel writes the numbers to the target, which is device memory, and reads the 16 bytes of the slot,
    // which the graph owns.
    unsafe { driver.kernel_launch(function, shape, args, stream) }
}

/// The number of bytes that the seed kernel writes.
const SEED_BYTES: u64 = 16;

/// Fails unless it is device memory: a user's allocator may return any address, and a kernel would write there.
fn expect_device_memory(driver: &dyn Driver, ptr: DevicePtr, bytes: u64) -> Result<()> {
    if driver.is_device_memory(ptr, bytes) {
        return Ok(());
    }
    let detail = format!("{bytes} bytes at {ptr} are not memory of a device");
    Err(DriverError::new("kernel_launch", ErrorCode::InvalidValue).with_detail(detail))
}

/// Launches the kernel that writes seed and offset into a generator's slot.
pub(crate) fn write_seed(
    driver: &dyn Driver,
    function: FunctionId,
    slot: &DeviceBlock,
    (seed, offset): (u64, u64),
    stream: StreamId,
) -> Result<()> {
    expect_device_memory(driver, slot.ptr(), SEED_BYTES)?;
    let args = seed_args(slot, seed, offset);
    // SAFETY: the kernel writes 16 bytes into the slot, which is device memory and belongs to the graph that captures
    // this.
    unsafe { driver.kernel_launch(function, LaunchShape::ONE, &args, stream) }
}

/// Sets another seed and offset for that kernel in an executable.
pub(crate) fn set_seed(
    driver: &dyn Driver,
    exec: GraphExecId,
    node: NodeId,
    function: FunctionId,
    slot: &DeviceBlock,
    (seed, offset): (u64, u64),
) -> Result<()> {
    let args = seed_args(slot, seed, offset);
    // SAFETY: as in `write_seed`: the slot is the one that the node was captured with.
    unsafe { driver.graph_exec_set_kernel(exec, node, function, LaunchShape::ONE, &args) }
}

fn seed_args(slot: &DeviceBlock, seed: u64, offset: u64) -> [KernelArg; 3] {
    [slot.ptr().into(), KernelArg::U64(seed), KernelArg::U64(offset)]
}

/// Launches the kernel that sets a conditional node's flag from device memory.
pub(crate) fn set_conditional(
    driver: &dyn Driver,
    function: FunctionId,
    flag: ConditionalId,
    value: DevicePtr,
    stream: StreamId,
) -> Result<()> {
    let args = [KernelArg::Conditional(flag), value.into()];
    // SAFETY: the kernel writes nothing but the flag, and reads at most 4 bytes of a block that the graph owns.
    unsafe { driver.kernel_launch(function, LaunchShape::ONE, &args, stream) }
}
