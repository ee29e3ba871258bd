//! Host callbacks: those that can run, and how many are running.

use std::collections::VecDeque;

use super::Running;
use crate::HostCallback;

/// The host callbacks whose turn has come, in that order.
#[derive(Debug, Default)]
pub struct Callbacks {
    ready: VecDeque<Callback>,
    running: usize,
}

/// A host callback that can run.
pub struct Callback {
    pub run: HostCallback,
    returned: ReturnedCallback,
}

/// A host callback that has run.
#[derive(Clone, Copy, Debug)]
pub struct ReturnedCallback {
    pub(super) running: Running,
    pub(super) time: u64,
}

impl Callbacks {
    pub(super) fn push(&mut self, run: HostCallback, running: Running, time: u64) {
        self.ready.push_back(Callback { run, returned: ReturnedCallback { running, time } });
    }

    /// One that can run. [`callback_returned`](super::Scheduler::callback_returned) must be called afterwards.
    pub fn take(&mut self) -> Option<Callback> {
        let callback = self.ready.pop_front()?;
        self.running += 1;
        Some(callback)
    }

    pub(super) fn count_returned(&mut self) {
        self.running -= 1;
    }

    pub fn are_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub fn are_running(&self) -> bool {
        self.running > 0
    }
}

impl Callback {
    /// The callback has run. `drop` drops it, without the simulation's lock: what it owns may call the driver then.
    pub fn end(self, drop: impl FnOnce(HostCallback)) -> ReturnedCallback {
        drop(self.run);
        self.returned
    }
}

impl std::fmt::Debug for Callback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Callback").field("running", &self.returned.running).finish_non_exhaustive()
    }
}
