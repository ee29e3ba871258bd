//! Devices: what there is, primary contexts, the calling thread's current device, peers.

use crate::{DeviceId, RawHandle, Result};

/// What a device is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The vendor's name for it.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Device memory in all.
    pub bytes_total: u64,
    /// How many multiprocessors it has.
    pub multiprocessors: u32,
    /// The least unit of physical memory that can be created and mapped. 0 without virtual memory.
    pub granularity: u64,
    /// Whether physical memory can be mapped by hand ([`VirtualMemory`](crate::VirtualMemory)).
    pub virtual_memory: bool,
    /// Whether host memory can be pinned where it is.
    pub host_registration: bool,
    /// Whether the driver has stream-ordered pools ([`Pools`](crate::Pools)).
    pub async_pools: bool,
    /// Whether graphs may hold `if` and `while` nodes.
    pub conditional_nodes: bool,
    /// Whether events can be shared between processes.
    pub ipc_events: bool,
    /// Whether physical memory can be shared as a file descriptor.
    pub share_posix_fd: bool,
    /// Whether physical memory can be shared over a fabric.
    pub share_fabric: bool,
    /// Whether physical memory can be made reachable for other hardware (GPUDirect RDMA).
    pub rdma: bool,
    /// The devices whose memory this one can reach directly.
    pub peers: Vec<DeviceId>,
}

/// Devices and their contexts.
pub trait Devices {
    /// How many devices there are. Creates no context. *During capture: free.*
    fn device_count(&self) -> Result<u32>;

    /// What `device` is and can do. Creates no context. *During capture: free.*
    fn device_properties(&self, device: DeviceId) -> Result<DeviceProperties>;

    /// Makes the device's primary context if there is none, and holds it until as many
    /// [`context_release`](Self::context_release) calls. The handle is the driver's own. The first call that needs a
    /// context also makes one, which the driver then holds, at least for its own life. *During capture: free.*
    fn context_retain(&self, device: DeviceId) -> Result<RawHandle>;

    /// Gives back one [`context_retain`](Self::context_retain). `InvalidContext` if none is left to give back. *During
    /// capture: free.*
    fn context_release(&self, device: DeviceId) -> Result<()>;

    /// Whether the device has a primary context; asking makes none. *During capture: free.*
    fn context_is_active(&self, device: DeviceId) -> Result<bool>;

    /// The calling thread's device; `None` if the thread has no context, as worker threads of a framework
    /// often have none. *During capture: free.*
    fn current_device(&self) -> Result<Option<DeviceId>>;

    /// Makes `device` the calling thread's own, with its primary context current. *During capture: free.*
    fn set_current_device(&self, device: DeviceId) -> Result<()>;

    /// Waits until all work on `device` is done. Returns the code of work that failed meanwhile. *During capture:
    /// never.*
    fn device_synchronize(&self, device: DeviceId) -> Result<()>;

    /// Whether `device` can reach `peer`'s memory directly. `false` for a device and itself. Creates no context.
    /// *During capture: free.*
    fn peer_can_access(&self, device: DeviceId, peer: DeviceId) -> Result<bool>;

    /// Lets kernels on `device` use what `peer` allocated with `mem_alloc`. `PeerAccessUnsupported` if it cannot,
    /// `PeerAccessAlreadyEnabled` the second time. *During capture: free.*
    fn peer_enable(&self, device: DeviceId, peer: DeviceId) -> Result<()>;

    /// Takes that back. `PeerAccessNotEnabled` if it was not on. *During capture: free.*
    fn peer_disable(&self, device: DeviceId, peer: DeviceId) -> Result<()>;
}
