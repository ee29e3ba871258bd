//! Why a cap on pinned memory refused a request. Not out of memory: the machine may have room, and raising the cap
//! helps.

use std::fmt;

use warpool_driver::DeviceId;

use crate::memory::oom::Size;

/// What was asked for, what is allowed, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedCapReport {
    /// What the caller asked for.
    pub bytes_requested: u64,
    /// What would have had to be pinned, at least.
    pub bytes_segment: u64,
    /// The cap.
    pub bytes_cap: u64,
    /// The device whose cap it is; `None` for the one on all.
    pub device: Option<DeviceId>,
    /// What is pinned, for that device or in all.
    pub bytes_pinned: u64,
    /// What of it callers have.
    pub bytes_allocated: u64,
    /// What of it was given back and waits for streams or graphs.
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
            "pinned memory is capped: asked {}, which pins {} more; {} is pinned {whose}, of it {} is with callers and {} waits for streams or graphs, and \
             {key} allows {}; free some, or raise the cap",
            Size(self.bytes_requested),
            Size(self.bytes_segment),
            Size(self.bytes_pinned),
            Size(self.bytes_allocated),
            Size(self.bytes_pending),
            Size(self.bytes_cap),
        )
    }
}
