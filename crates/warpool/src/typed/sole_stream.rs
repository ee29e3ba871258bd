//! The stream that alone uses all device memory of a graph's typed work. Replays in it need no order between streams:
//! they take one lock, however many buffers there are.
//!
//! A replay borrows nothing, so another thread may begin at any moment to use one of the buffers in a second stream. It
//! calls [`SoleStream::end`] before it records the event that it waits for: replays that were not launched by then
//! lock and record their buffers one by one, as all others do.

use std::sync::{Mutex, MutexGuard};

use warpool_driver::StreamId;

use crate::sync::try_lock;
use crate::{Instance, Result, lock};

#[derive(Debug)]
pub(super) struct SoleStream(Mutex<Option<StreamId>>);

impl SoleStream {
    pub(super) fn new(stream: StreamId) -> Self {
        Self(Mutex::new(Some(stream)))
    }

    /// Keeps others from ending it, if `stream` is the one. Never waits.
    #[inline]
    pub(super) fn hold(&self, stream: StreamId) -> Option<MutexGuard<'_, Option<StreamId>>> {
        try_lock(&self.0).filter(|held| **held == Some(stream))
    }

    /// There is a second stream. Waits for a replay that is being launched; inside a host callback that is the driver's
    /// error.
    pub(super) fn end(&self, instance: &Instance) -> Result<()> {
        let mut held = match try_lock(&self.0) {
            Some(held) => held,
            None => {
                instance.driver().current_device()?;
                lock(&self.0)
            }
        };
        *held = None;
        Ok(())
    }
}
