//! Where a stream stands with captures, as far as a free is concerned.

use warpool_driver::{CaptureId, CaptureState, Driver, ErrorCode, StreamId};

use crate::Result;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It does its work.
    Working,
    /// It takes part in this capture.
    Captures(CaptureId),
    /// It takes part in a capture that is broken, or is the default stream and another captures: nothing can be put
    /// into it now.
    Blocked,
    /// It is no more. Its last work may not be done.
    Gone,
}

impl Standing {
    pub(crate) fn of(stream: StreamId, driver: &dyn Driver) -> Result<Self> {
        match driver.capture_state(stream) {
            Ok(CaptureState::None) => Ok(Self::Working),
            Ok(CaptureState::Active(capture)) => Ok(Self::Captures(capture)),
            Ok(CaptureState::Invalidated) => Ok(Self::Blocked),
            Err(error) if error.code == ErrorCode::StreamCaptureImplicit => Ok(Self::Blocked),
            Err(error) if error.code == ErrorCode::InvalidHandle => Ok(Self::Gone),
            Err(error) => Err(error.into()),
        }
    }
}
