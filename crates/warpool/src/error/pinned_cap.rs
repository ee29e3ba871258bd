//! The report of a refusal by a cap on pinned memory. Not out of memory: the machine may have memory, and raising the
//! cap helps.

use std::fmt;

use warpool_driver::DeviceId;

use super::size::Size;

/// What was requested, what is allowed, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedCapReport {
    /// What the caller requested.
    pub bytes_requested: u64,
    /// What would have had to be pinned, at least.
    pub bytes_segment: u64,
    /// The cap.
    pub bytes_cap: u64,
    /// The device whose cap it is; `None` for the cap over all devices.
    pub device: Option<DeviceId>,
    /// What is pinned, for that device or in all.
    pub bytes_pinned: u64,
    /// What of it is allocated.
    pub bytes_allocated: u64,
    /// What of it was freed and waits for streams or graphs.
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
