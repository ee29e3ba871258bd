//! The capture status of a stream: the result of the driver's `capture_state`, including the errors that imply a
//! status. This module is below streams and captures, so that both use this interpretation.

use warpool_driver::{CaptureId, CaptureState, Driver, ErrorCode, StreamId};

use crate::{Error, Result};

/// Whether a stream is capturing, and whether work (an event, a wait) can be enqueued in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureStatus {
    /// It is not capturing: enqueued work is executed.
    NotCapturing,
    /// It takes part in this capture.
    Capturing(CaptureId),
    /// It takes part in a capture that was invalidated. Work before the capture may still run.
    Invalidated,
    /// It is the default stream, and a blocking stream is capturing: any work enqueued in it would invalidate that
    /// capture.
    Blocked,
    /// The stream was destroyed. Its last work may still run.
    StreamDestroyed,
}

impl CaptureStatus {
    /// The status of `stream`. One driver call.
    pub(crate) fn of(driver: &dyn Driver, stream: StreamId) -> Result<Self> {
        match Self::of_existing(driver, stream) {
            Err(Error::Driver(error)) if error.code == ErrorCode::InvalidHandle => Ok(Self::StreamDestroyed),
            other => other,
        }
    }

    /// As [`of`](Self::of), but returns the driver's error for a destroyed stream.
    pub(crate) fn of_existing(driver: &dyn Driver, stream: StreamId) -> Result<Self> {
        match Self::of_unblocked(driver, stream) {
            Err(Error::Driver(error)) if error.code == ErrorCode::StreamCaptureImplicit => Ok(Self::Blocked),
            other => other,
        }
    }

    /// As [`of_existing`](Self::of_existing), but returns the driver's error for a blocked stream too.
    pub(crate) fn of_unblocked(driver: &dyn Driver, stream: StreamId) -> Result<Self> {
        Ok(match driver.capture_state(stream)? {
            CaptureState::None => Self::NotCapturing,
            CaptureState::Active(capture) => Self::Capturing(capture),
            CaptureState::Invalidated => Self::Invalidated,
        })
    }

    /// The capture that the stream takes part in, if it is a valid one.
    pub(crate) fn capture(self) -> Option<CaptureId> {
        if let Self::Capturing(capture) = self { Some(capture) } else { None }
    }

    /// Whether the stream takes part in a capture, valid or invalidated.
    pub(crate) fn is_capturing(self) -> bool {
        matches!(self, Self::Capturing(_) | Self::Invalidated)
    }

    /// Whether any work enqueued in the stream would become part of a capture or invalidate one.
    pub(crate) fn refuses_work(self) -> bool {
        matches!(self, Self::Capturing(_) | Self::Invalidated | Self::Blocked)
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{CaptureMode, Captures as _, DeviceId, StreamOptions, Streams as _};

    use super::*;

    #[test]
    fn every_answer_of_the_driver_has_a_status() {
        let driver = SimDriver::new(SimConfig::default());
        let device = DeviceId(0);
        let of = |stream| CaptureStatus::of(&driver, stream).unwrap();
        let default = driver.stream_default(device).unwrap();
        let options = StreamOptions { non_blocking: false, priority: 0 };
        let [blocking, gone] = [(); 2].map(|()| driver.stream_create(device, options).unwrap());
        assert_eq!(of(blocking), CaptureStatus::NotCapturing);
        driver.capture_begin(blocking, CaptureMode::ThreadLocal).unwrap();
        let status = of(blocking);
        assert!(status.capture().is_some() && status.is_capturing() && status.refuses_work());
        assert_eq!(of(default), CaptureStatus::Blocked);
        assert!(CaptureStatus::of_unblocked(&driver, default).is_err());
        driver.stream_synchronize(blocking).unwrap_err();
        assert_eq!(of(blocking), CaptureStatus::Invalidated);
        driver.capture_end(blocking).unwrap_err();
        assert_eq!(of(blocking), CaptureStatus::NotCapturing);
        driver.stream_destroy(gone).unwrap();
        assert_eq!(of(gone), CaptureStatus::StreamDestroyed);
        assert!(CaptureStatus::of_existing(&driver, gone).is_err());
    }
}
