//! The plain data of sleeping memory.

use warpool_driver::DeviceId;

use crate::memory::MemPoolId;

/// What happens to the contents of memory that is put to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// They are copied to pinned host memory, and restored on waking.
    Host,
    /// They are dropped; the memory is zeroed when it wakes.
    Discard,
}

impl Keep {
    /// The name of the variant: `host` or `discard`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Discard => "discard",
        }
    }
}

/// Whether a tag's memory is asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagState {
    /// The memory is present and can be used.
    Awake,
    /// The memory is asleep: it has addresses, but no physical memory.
    Asleep {
        /// What happened to the contents.
        keep: Keep,
        /// Since when, in microseconds of [`Driver::now`](warpool_driver::Driver::now).
        since_us: i64,
    },
}

/// A tag's memory on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TagInfo {
    /// The name of the tag.
    pub tag: String,
    /// The device.
    pub device: DeviceId,
    /// Its private pool.
    pub pool: MemPoolId,
    /// Whether the memory is asleep.
    pub state: TagState,
    /// How many segments it has.
    pub segments: u64,
    /// Bytes of their addresses, and of the committed blocks of elastic memory.
    pub bytes: u64,
    /// Bytes of physical device memory. 0 while it is asleep, unless the driver failed to release some: later calls
    /// retry that.
    pub bytes_device: u64,
    /// Bytes of pinned host memory with its contents.
    pub bytes_host: u64,
}

/// The result of [`Tags::sleep`](super::Tags::sleep) or [`Tags::wake`](super::Tags::wake).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepReport {
    /// Tags that changed their state, with their devices.
    pub changed: Vec<(String, DeviceId)>,
    /// Tags that were in the requested state already.
    pub unchanged: Vec<(String, DeviceId)>,
    /// Bytes of device memory that were released to the driver, or allocated from it.
    pub bytes_device: u64,
    /// Bytes that were copied to the host, or back.
    pub bytes_copied: u64,
    /// Bytes of device memory that the driver failed to release. Later calls retry that.
    pub bytes_not_returned: u64,
}
