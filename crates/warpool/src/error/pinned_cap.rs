//! The report of a refusal by a cap on pinned memory. Not out of memory: the machine may have memory, and raising the
//! cap helps.

use std::fmt;

use warpool_driver::DeviceId;

use super::size::Size;

/// The request, the cap, and how pinned memory is used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedCapReport {
    /// Bytes that the caller requested.
    pub bytes_requested: u64,
    /// The least bytes that would have had to be pinned.
    pub bytes_segment: u64,
    /// The cap in bytes.
    pub bytes_cap: u64,
    /// The device whose cap it is; `None` for the cap over all devices.
    pub device: Option<DeviceId>,
    /// Bytes that are pinned, for that device or in total.
    pub bytes_pinned: u64,
    /// Pinned bytes that are allocated.
    pub bytes_allocated: u64,
    /// Pinned bytes that were freed and wait for streams or graphs.
    pub bytes_pending: u64,
}

impl fmt::Display for PinnedCapReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, whose) = match self.device {
            Some(device) => ("pinned_device_cap_mb", format!("for {device}")),
            None => ("pinned_cap_mb", "in all".to_owned()),
        };
        write!(
            f,
            "pinned memory is capped: {} requested, which pins {} more; {} is pinned {whose}, of which {} is allocated \
             and {} waits for streams or graphs, and {key} allows {}; free some, or raise the cap",
            Size(self.bytes_requested),
            Size(self.bytes_segment),
            Size(self.bytes_pinned),
            Size(self.bytes_allocated),
            Size(self.bytes_pending),
            Size(self.bytes_cap),
        )
    }
}
