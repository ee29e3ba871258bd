//! The plain data of sleeping memory.

use warpool_driver::DeviceId;

use crate::memory::MemPoolId;

/// What becomes of the contents of memory that falls asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// They are copied to pinned host memory, and are there again after waking.
    Host,
    /// They are dropped: the memory is zeroed when it wakes.
    Discard,
}

impl Keep {
    /// Its name: `host`, `discard`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Discard => "discard",
        }
    }
}

/// Whether a tag's memory sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagState {
    /// It does not.
    Awake,
    /// It does.
    Asleep {
        /// What became of the contents.
        keep: Keep,
        /// Since when, in microseconds of [`Driver::now`](warpool_driver::Driver::now).
        since_us: i64,
    },
}

/// A tag's memory on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TagInfo {
    /// The tag.
    pub tag: String,
    /// The device.
    pub device: DeviceId,
    /// Its private pool.
    pub pool: MemPoolId,
    /// Whether it sleeps.
    pub state: TagState,
    /// How many segments it has.
    pub segments: u64,
    /// Bytes of their addresses.
    pub bytes: u64,
    /// Bytes of device memory that it has. 0 while it sleeps, unless the driver refused to take some back: that is
    /// retried by later calls.
    pub bytes_device: u64,
    /// Bytes of pinned host memory with its contents.
    pub bytes_host: u64,
}

/// What a call of [`Tags::sleep`](super::Tags::sleep) or [`Tags::wake`](super::Tags::wake) did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepReport {
    /// Tags that fell asleep or woke, with their devices.
    pub changed: Vec<(String, DeviceId)>,
    /// Those that were in that state already.
    pub unchanged: Vec<(String, DeviceId)>,
    /// Bytes of device memory that the driver got, or gave.
    pub bytes_device: u64,
    /// Bytes that were copied to the host, or back.
    pub bytes_copied: u64,
    /// Bytes of device memory that the driver refused to take back. That is retried by later calls.
    pub bytes_not_returned: u64,
}
