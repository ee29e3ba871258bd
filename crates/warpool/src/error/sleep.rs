//! The report of a failed sleep or wake: what was missing, and in which state the memory is.

use std::fmt;

use super::Error;
use super::size::Size;

/// The call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepCall {
    /// [`Tags::sleep`](crate::memory::Tags::sleep).
    Sleep,
    /// [`Tags::wake`](crate::memory::Tags::wake).
    Wake,
}

impl fmt::Display for SleepCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sleep => "sleep",
            Self::Wake => "wake",
        })
    }
}

/// The resource that was missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SleepShortage {
    /// Pinned host memory for the contents.
    PinnedMemory {
        /// Bytes that all contents need.
        bytes_needed: u64,
        /// Bytes that were allocated when it ran out.
        bytes_found: u64,
    },
    /// Device memory.
    DeviceMemory {
        /// Bytes that all of the tags need.
        bytes_needed: u64,
        /// Bytes that were allocated when it ran out.
        bytes_found: u64,
    },
    /// Room within the memory fraction or cap.
    Limit {
        /// Bytes that the tag needs and that did not fit.
        bytes_needed: u64,
    },
    /// Nothing: a driver call failed.
    Nothing,
}

/// Why tags could not be put to sleep, or not be woken. All of them are in one state: the one before the call, unless
/// [`is_undone`](Self::is_undone) is `false`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepFailure {
    /// The call that failed.
    pub call: SleepCall,
    /// The tags.
    pub tags: Vec<String>,
    /// The resource that was missing.
    pub shortage: SleepShortage,
    /// The error of the driver call that failed; `None` for a limit.
    pub source: Option<Error>,
    /// Whether the tags are in the state from before the call. If not, undoing a failed sleep failed as well: the tags
    /// are asleep, with all contents, and can be woken.
    pub is_undone: bool,
}

impl fmt::Display for SleepFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tags = self.tags.join(", ");
        match self.call {
            SleepCall::Sleep => write!(f, "cannot put {tags} to sleep: ")?,
            SleepCall::Wake => write!(f, "cannot wake {tags}: ")?,
        }
        match self.shortage {
            SleepShortage::PinnedMemory { bytes_needed, bytes_found } => write!(
                f,
                "the contents need {} of pinned host memory, and {} could be allocated; \
                 raise the cap on pinned memory, free host memory, or discard the contents",
                Size(bytes_needed),
                Size(bytes_found)
            )?,
            SleepShortage::DeviceMemory { bytes_needed, bytes_found } => write!(
                f,
                "{} of device memory are needed, and {} could be allocated; \
                 free memory on the device, also that of other processes, or wake fewer tags",
                Size(bytes_needed),
                Size(bytes_found)
            )?,
            SleepShortage::Limit { bytes_needed } => write!(
                f,
                "{} more would exceed the memory fraction or memory_cap_mb; raise it, or free memory first",
                Size(bytes_needed)
            )?,
            SleepShortage::Nothing => f.write_str("a driver call failed")?,
        }
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        f.write_str(match (self.call, self.is_undone) {
            (SleepCall::Sleep, true) => ". All of them are awake, as before.",
            (SleepCall::Sleep, false) => ". Undoing it failed too: all of them sleep, with their contents; wake them.",
            (SleepCall::Wake, _) => ". All of them sleep, as before, with what was kept of their contents.",
        })
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::{DriverError, ErrorCode};

    use super::*;

    #[test]
    fn a_failure_says_what_was_missing_and_what_is_left() {
        let failure = SleepFailure {
            call: SleepCall::Wake,
            tags: vec!["weights".into(), "kv".into()],
            shortage: SleepShortage::DeviceMemory { bytes_needed: 20 << 30, bytes_found: 13 << 30 },
            source: Some(Error::Driver(DriverError::new("vm_create", ErrorCode::OutOfMemory))),
            is_undone: true,
        };
        let text = failure.to_string();
        assert!(text.starts_with("cannot wake weights, kv: 20.00 GiB of device memory are needed, and 13.00 GiB"));
        assert!(text.contains("vm_create"), "{text}");
        assert!(text.ends_with("All of them sleep, as before, with what was kept of their contents."), "{text}");
    }
}
