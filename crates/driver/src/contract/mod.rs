//! The contract: what a GPU driver must offer, split by subject into object-safe traits.
//!
//! **What holds for every method.**
//! - Callable from any thread, also one that never touched a GPU. A call names its device, or a stream or event that
//!   has one; what the calling thread has as its current device neither matters nor changes, except for
//!   [`Devices::set_current_device`].
//! - An id that was never handed out, or whose object is gone, gives [`InvalidHandle`]; a device number out of range
//!   gives [`InvalidDevice`]. A failed call changes nothing, but for captures: a forbidden call breaks them, and a
//!   failed `capture_end` ends one.
//! - Once a device is broken ([`DriverError::is_sticky`]), every call on it may return that same code.
//! - From inside a host callback, every call gives [`NotPermitted`].
//! - *During capture* each method is of one of the kinds that [`CaptureRule`] lists; its doc says which.
//!
//! A backend promises what the docs say; a caller may rely on no more. Both backends are held to it by the
//! `warpool-conformance` suite.
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
pub use kernel::{KernelArg, KernelFault, KernelMemory, KernelMirror, KernelScope, KernelSource, Kernels, LaunchShape};
pub use library::{BlasMath, BlasMatrix, Libraries, Library, Sgemm};
pub use memory::{Memory, MemoryInfo};
pub use pool::{PoolAttribute, Pools};
pub use stream::{HostCallback, PriorityRange, StreamHandle, StreamInfo, StreamOptions, Streams};
pub use suballocations::Suballocations;
pub use virtual_memory::{Access, DeviceAccess, Granularity, PhysicalOptions, ShareKind, SharedMemory, VirtualMemory};

use std::time::Duration;

use crate::DevicePtr;

/// A GPU driver: everything that Warpool asks of the system below it.
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
    /// The name that the backend is chosen by: `sim` or `cuda`.
    fn kind(&self) -> &'static str;

    /// The time as this driver sees it, from some fixed start: the virtual clock of a simulated device, the
    /// monotonic clock of the machine otherwise. Differences of it are what calls cost.
    fn now(&self) -> Duration;

    /// A number that nobody can foresee, another one at each call: what a program seeds itself with that was given no
    /// seed. On a simulated device it follows from the device's own seed, so that runs repeat.
    fn entropy(&self) -> u64;

    /// Whether all of `[ptr, ptr + bytes)` is device memory: allocated, mapped, or memory of another library that the
    /// driver knows. Pinned host memory is not. Not a [`Call`]: it cannot fail, and may be used during capture.
    fn is_device_memory(&self, ptr: DevicePtr, bytes: u64) -> bool;
}
