//! The only stream that uses the device memory of a graph's typed work. Replays in it need no order between streams:
//! they take one lock, however many buffers there are.
//!
//! A replay borrows nothing, so another thread may begin to use one of the buffers in a second stream at any moment.
//! That thread calls [`SoleStream::end`] before it records the event that it waits for. Replays that were not launched
//! by then lock and record their buffers one by one, like all other operations.

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

    /// Keeps other threads from ending it, if `stream` is the sole stream. Never waits.
    #[inline]
    pub(super) fn hold(&self, stream: StreamId) -> Option<MutexGuard<'_, Option<StreamId>>> {
        try_lock(&self.0).filter(|held| **held == Some(stream))
    }

    /// Ends it, because there is a second stream. Waits for a replay that is being launched; fails with the driver's
    /// error inside a host callback.
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
