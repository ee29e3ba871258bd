//! A capture that has begun and not yet ended.

use std::sync::Arc;
use std::thread::ThreadId;

use warpool_driver::{CaptureId, CaptureMode};

use super::buffers::Buffers;
use super::registration::Registration;
use crate::capture::CaptureRecord;
use crate::{Error, Stream, StreamLease};

pub(super) struct OpenCapture {
    pub(super) registration: Registration,
    /// The stream that it began on.
    pub(super) stream: Stream,
    pub(super) id: CaptureId,
    pub(super) mode: CaptureMode,
    /// The thread that has to end it, unless its mode is relaxed.
    pub(super) thread: ThreadId,
    pub(super) record: Arc<CaptureRecord>,
    pub(super) buffers: Buffers,
    /// The error with which it must fail, whatever the driver returns.
    pub(super) failed: Option<Error>,
    /// Streams that bodies were captured on. Leased until the end: work of other users on them would not be ordered
    /// after the bodies, and could get their memory.
    pub(super) body_streams: Vec<StreamLease>,
}

impl OpenCapture {
    /// Leaves the capture of a dropped graph to be ended later. Makes no driver call.
    pub(super) fn abandon(mut self) {
        self.registration.abandon(&self.stream, Some(self.id));
    }
}
