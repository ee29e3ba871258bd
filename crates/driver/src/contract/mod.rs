//! The contract: what a GPU driver must offer, split by subject into object-safe traits.
//!
//! **For every method:**
//! - It may be called from any thread, even one that never used a GPU. Its arguments determine the device; the calling
//!   thread's current device does not matter, and changes only in [`Devices::set_current_device`].
//! - An unknown id, or one whose object is destroyed, gives [`InvalidHandle`]; a device number out of range gives
//!   [`InvalidDevice`]. A failed call changes nothing, except captures: a forbidden call invalidates them, and a failed
//!   `capture_end` ends one.
//! - Once a device is unusable ([`DriverError::is_sticky`]), every call on it may return the same code.
//! - Inside a host callback, every call gives [`NotPermitted`].
//! - *During capture* it follows one of the rules of [`CaptureRule`]; its documentation says which.
//!
//! **Safe methods are safe:** whatever its arguments, a safe method cannot corrupt this process's memory. What the
//! driver cannot check is an unsafe method, or an unsafe constructor of an argument, that states what the caller
//! promises. Device memory is not this process's memory: work that uses freed device memory may fault, or read other
//! data.
//!
//! A backend guarantees what the documentation says; callers may not rely on more. The crate `warpool-conformance`
//! tests both backends against it.
//!
//! [`InvalidHandle`]: crate::ErrorCode::InvalidHandle
//! [`InvalidDevice`]: crate::ErrorCode::InvalidDevice
//! [`NotPermitted`]: crate::ErrorCode::NotPermitted
//! [`DriverError::is_sticky`]: crate::DriverError::is_sticky

mod call;
mod capture;
mod copy;
mod device;
mod event;
mod graph;
mod host;
mod kernel;
mod library;
mod memory;
mod pool;
mod stream;
mod suballocations;
mod virtual_memory;

pub use call::{Call, CaptureRule};
pub use capture::{CaptureMode, CaptureState, Captures};
pub use copy::{Copies, Pattern};
pub use device::{DeviceProperties, Devices};
pub use event::{EventOptions, EventScope, Events, IpcEventHandle};
pub use graph::{ConditionalKind, GraphTopology, Graphs, InstantiateOptions, Node, NodeKind};
pub use host::{HostMemory, HostOptions};
pub use kernel::{HostKernel, KernelArg, KernelFault, KernelMemory, KernelScope, KernelSource, Kernels, LaunchShape};
pub use library::{BlasMath, BlasMatrix, Libraries, Library, Sgemm};
pub use memory::{IpcMemoryHandle, Memory, MemoryInfo};
pub use pool::{PoolAttribute, Pools};
pub use stream::{HostCallback, PriorityRange, StreamHandle, StreamInfo, StreamOptions, Streams};
pub use suballocations::Suballocations;
pub use virtual_memory::{Access, DeviceAccess, Granularity, PhysicalOptions, ShareKind, SharedMemory, VirtualMemory};

use std::time::Duration;

use crate::DevicePtr;

/// A GPU driver: all calls that Warpool makes.
pub trait Driver:
    Devices
    + Streams
    + Events
    + Memory
    + VirtualMemory
    + Pools
    + HostMemory
    + Copies
    + Captures
    + Graphs
    + Kernels
    + Libraries
    + Suballocations
    + Send
    + Sync
{
    /// The name of the backend: `sim` or `cuda`.
    fn kind(&self) -> &'static str;

    /// The time since a fixed start: the virtual clock of a simulated device, else the machine's monotonic clock.
    fn now(&self) -> Duration;

    /// A random number, a different one at each call, for seeds. On a simulated device it depends on the device's seed,
    /// so that runs are reproducible.
    fn entropy(&self) -> u64;

    /// Whether all of `[ptr, ptr + bytes)` is device memory: allocated, mapped, or memory of another library that the
    /// driver knows. Pinned host memory is not. Not a [`Call`]: it cannot fail, and may be used during capture.
    fn is_device_memory(&self, ptr: DevicePtr, bytes: u64) -> bool;
}
