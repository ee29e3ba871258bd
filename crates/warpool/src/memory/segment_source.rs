//! Segments that are one allocation of the driver or of a pool's upstream.

use std::fmt;
use std::sync::Arc;

use warpool_driver::{DevicePtr, ErrorCode, StreamId};

use super::core::DeviceCore;
use super::{OomCause, Upstream};
use crate::Result;

/// A result, or the cause of the out-of-memory condition.
pub(crate) type OrOom<T> = std::result::Result<T, OomCause>;

/// Where such a segment comes from, and returns to.
#[derive(Clone)]
pub(crate) enum SegmentSource {
    Driver,
    Upstream(Arc<dyn Upstream>),
}

impl SegmentSource {
    /// The source of a pool's segments.
    pub(crate) fn of(upstream: Option<Arc<dyn Upstream>>) -> Self {
        upstream.map_or(Self::Driver, Self::Upstream)
    }

    /// Whether its addresses have to be checked: an upstream's results are untrusted.
    pub(crate) fn is_untrusted(&self) -> bool {
        matches!(self, Self::Upstream(_))
    }

    /// The size of a segment of at least `bytes`.
    pub(crate) fn rounded(&self, bytes: u64) -> u64 {
        match self {
            Self::Driver => bytes,
            Self::Upstream(upstream) => {
                bytes.checked_next_multiple_of(upstream.granularity().max(1)).unwrap_or(u64::MAX)
            }
        }
    }

    /// Allocates `bytes` for `stream`. An upstream is called without any lock.
    pub(crate) fn allocate(&self, device: &DeviceCore, bytes: u64, stream: StreamId) -> Result<OrOom<DevicePtr>> {
        match self {
            Self::Driver => {
                let _safe = device.capture_safe()?;
                match device.driver().mem_alloc(device.id, bytes) {
                    Ok(ptr) => Ok(Ok(ptr)),
                    Err(error) if error.code == ErrorCode::OutOfMemory => Ok(Err(OomCause::Device)),
                    Err(error) => Err(error.into()),
                }
            }
            Self::Upstream(upstream) => {
                let _relaxed = device.relaxed_mode()?;
                Ok(upstream.allocate(device.id, bytes, stream)?.ok_or(OomCause::External))
            }
        }
    }

    /// Returns a segment that was allocated for `stream`. An upstream is called without any lock.
    pub(crate) fn free(&self, device: &DeviceCore, ptr: DevicePtr, bytes: u64, stream: StreamId) -> Result<()> {
        match self {
            Self::Driver => {
                let _safe = device.capture_safe()?;
                Ok(device.driver().mem_free(ptr)?)
            }
            Self::Upstream(upstream) => {
                let _relaxed = device.relaxed_mode()?;
                upstream.free(ptr, bytes, device.id, stream)
            }
        }
    }
}

impl fmt::Debug for SegmentSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Driver => "Driver",
            Self::Upstream(_) => "Upstream",
        })
    }
}
