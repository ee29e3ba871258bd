//! Devices: properties, primary contexts, the calling thread's current device, peer access.

use std::fmt;

use crate::{DeviceId, RawHandle, Result};

/// The id of a card, or of a part of one (MIG), which is the same in every process of the machine. Ordinals are not:
/// `CUDA_VISIBLE_DEVICES` changes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    /// As `nvidia-smi -L` shows a card.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (index, byte) in self.0.iter().enumerate() {
            let separator = if matches!(index, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{separator}{byte:02x}")?;
        }
        Ok(())
    }
}

/// The properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Its product name.
    pub name: String,
    /// Which card it is.
    pub uuid: DeviceUuid,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// The size of its memory.
    pub bytes_total: u64,
    /// The number of multiprocessors.
    pub multiprocessors: u32,
    /// The minimum granularity of physical memory. 0 without virtual memory management.
    pub granularity: u64,
    /// Whether it has virtual memory management ([`VirtualMemory`](crate::VirtualMemory)).
    pub virtual_memory: bool,
    /// Whether existing host memory can be pinned.
    pub host_registration: bool,
    /// Whether it has stream-ordered memory pools ([`Pools`](crate::Pools)).
    pub async_pools: bool,
    /// Whether graphs may have `if` and `while` nodes.
    pub conditional_nodes: bool,
    /// Whether events can be shared between processes.
    pub ipc_events: bool,
    /// Whether physical memory can be shared as a file descriptor.
    pub share_posix_fd: bool,
    /// Whether physical memory can be shared over a fabric.
    pub share_fabric: bool,
    /// Whether physical memory can be accessed by other hardware (GPUDirect RDMA).
    pub rdma: bool,
    /// The sizes and addresses of memory that a multicast object binds are multiples of this. 0 without multicast.
    pub multicast_granularity: u64,
    /// The devices whose memory this one can access directly.
    pub peers: Vec<DeviceId>,
}

/// Devices and their contexts.
pub trait Devices {
    /// The number of devices. Creates no context. *During capture: free.*
    fn device_count(&self) -> Result<u32>;

    /// The properties of `device`. Creates no context. *During capture: free.*
    fn device_properties(&self, device: DeviceId) -> Result<DeviceProperties>;

    /// Retains the device's primary context, and creates it if there is none, until as many
    /// [`context_release`](Self::context_release) calls. Returns the context's handle. The first call that needs a
    /// context also retains it, at least as long as the driver exists. *During capture: free.*
    fn context_retain(&self, device: DeviceId) -> Result<RawHandle>;

    /// Releases one [`context_retain`](Self::context_retain). `InvalidContext` if all are released. *During capture:
    /// free.*
    fn context_release(&self, device: DeviceId) -> Result<()>;

    /// Whether the device has a primary context. Creates none. *During capture: free.*
    fn context_is_active(&self, device: DeviceId) -> Result<bool>;

    /// The calling thread's current device; `None` if the thread has no current context, as worker threads of a
    /// framework often have none. *During capture: free.*
    fn current_device(&self) -> Result<Option<DeviceId>>;

    /// Makes `device` the calling thread's current device, with its primary context current. *During capture: free.*
    fn set_current_device(&self, device: DeviceId) -> Result<()>;

    /// Waits until all work on `device` is done. Returns the error of work that failed meanwhile. *During capture:
    /// never.*
    fn device_synchronize(&self, device: DeviceId) -> Result<()>;

    /// Whether `device` can access `peer`'s memory directly. `false` for a device and itself. Creates no context.
    /// *During capture: free.*
    fn peer_can_access(&self, device: DeviceId, peer: DeviceId) -> Result<bool>;

    /// Gives kernels on `device` access to memory of `peer` from `mem_alloc`. `PeerAccessUnsupported` if that is
    /// impossible, `PeerAccessAlreadyEnabled` the second time. *During capture: free.*
    fn peer_enable(&self, device: DeviceId, peer: DeviceId) -> Result<()>;

    /// Disables that access. `PeerAccessNotEnabled` if it was not enabled. *During capture: free.*
    fn peer_disable(&self, device: DeviceId, peer: DeviceId) -> Result<()>;
}
