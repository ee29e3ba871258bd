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
//! ```
//! use warpool_driver::sim::{SimConfig, SimDriver};
//! use warpool_driver::*;
//!
//! # fn main() -> warpool_driver::Result<()> {
//! let gpu = SimDriver::new(SimConfig::default());
//! let device = DeviceId(0);
//! // Streams and events.
//! let properties: DeviceProperties = gpu.device_properties(device)?;
//! let uuid: DeviceUuid = properties.uuid; // the same in every process of the machine
//! assert!(uuid.to_string().starts_with("GPU-"));
//! let range: PriorityRange = gpu.stream_priority_range(device)?;
//! let stream = gpu.stream_create(device, StreamOptions { priority: range.greatest, ..StreamOptions::default() })?;
//! let handle: StreamHandle = gpu.stream_handle(stream)?; // what other libraries call it
//! assert_eq!(handle.device, device);
//! let options = EventOptions { interprocess: properties.ipc_events, ..EventOptions::default() };
//! let event = gpu.event_create(device, options)?;
//! let callback: HostCallback = std::sync::Arc::new(|| println!("all earlier work of the stream is done"));
//! gpu.stream_host_callback(stream, callback)?;
//! gpu.event_record(event, stream, EventScope::Plain)?;
//! gpu.event_synchronize(event)?;
//!
//! // Memory: pinned, virtual, and from the driver's pool.
//! let pinned = gpu.host_alloc(device, 4096, HostOptions::default())?;
//! gpu.host_write(pinned, b"hello")?;
//! let bytes = gpu.vm_granularity(device, Granularity::Recommended)?;
//! let address = gpu.vm_reserve(bytes, bytes, None)?;
//! let options = PhysicalOptions { share: Some(ShareKind::PosixFd), ..PhysicalOptions::default() };
//! let physical = gpu.vm_create(device, bytes, options)?;
//! gpu.vm_map(address, physical)?;
//! gpu.vm_set_access(address, bytes, &[DeviceAccess { device, access: Access::ReadWrite }])?;
//! let pool = gpu.pool_default(device)?;
//! let block = gpu.pool_alloc(pool, 1 << 20, stream)?;
//! gpu.pool_free(block, stream)?;
//! assert!(gpu.pool_get(pool, PoolAttribute::ReservedCurrent)? > 0);
//! gpu.label_memory(address, bytes, "staging"); // for hazards of the simulated GPU
//!
//! // For other processes.
//! let shared: SharedMemory = gpu.vm_export(physical, ShareKind::PosixFd)?;
//! let exported: IpcEventHandle = gpu.event_export(event)?;
//! let memory: IpcMemoryHandle = gpu.mem_export(gpu.mem_alloc(device, 1 << 20)?)?;
//!
//! // A capture, and its graph.
//! let body = gpu.stream_create(device, StreamOptions::default())?;
//! assert_eq!(Call::DeviceSynchronize.capture_rule(), CaptureRule::Never);
//! gpu.capture_begin(stream, CaptureMode::ThreadLocal)?;
//! assert!(matches!(gpu.capture_state(stream)?, CaptureState::Active(_)));
//! gpu.copy(address.into(), pinned.into(), 5, stream)?;
//! let condition: ConditionalId = gpu.conditional_create(stream, 1)?; // a node that runs if a kernel leaves it at 1
//! gpu.conditional_begin(stream, condition, ConditionalKind::If, body, CaptureMode::ThreadLocal)?;
//! gpu.fill(address, Pattern::U8(0), 5, body)?;
//! gpu.capture_end(body)?;
//! let graph = gpu.capture_end(stream)?;
//! let topology: GraphTopology = gpu.graph_topology(graph)?;
//! let node: &Node = &topology.nodes[0];
//! assert_eq!((topology.nodes.len(), node.kind), (2, NodeKind::Copy));
//! let exec = gpu.graph_instantiate(graph, InstantiateOptions::default())?;
//! // SAFETY: the memory that was captured is still there.
//! unsafe { gpu.graph_launch(exec, stream)? };
//!
//! // Handles of libraries.
//! let blas = gpu.library_create(Library::Blas, device)?;
//! gpu.library_set_stream(blas, stream)?;
//! gpu.stream_synchronize(stream)?;
//! # Ok(())
//! # }
//! ```
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
pub use device::{DeviceProperties, DeviceUuid, Devices};
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
