//! Events.

use super::stream::StreamPoint;
use crate::{CaptureId, DeviceId, EventOptions};

/// What an event last recorded.
#[derive(Clone, Debug)]
pub enum EventState {
    NeverRecorded,
    /// A point of a stream, and the virtual time at which it was reached.
    Recorded {
        point: StreamPoint,
        done_at: Option<u64>,
    },
    /// The nodes that a stream's next node in a capture depended on.
    Captured {
        capture: CaptureId,
        dependencies: Vec<u32>,
    },
}

#[derive(Debug)]
pub struct Event {
    pub device: DeviceId,
    pub options: EventOptions,
    pub state: EventState,
}
