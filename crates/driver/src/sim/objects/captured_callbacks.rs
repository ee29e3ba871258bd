//! Host callbacks in graphs.

use std::fmt;
use std::sync::Arc;

use crate::HostCallback;

/// The callbacks in captures and graphs. With this second reference, destroying the last graph of a callback does not
/// drop it under the simulation's lock: what it owns may call the driver when it is dropped.
#[derive(Default)]
pub struct CapturedCallbacks {
    all: Vec<HostCallback>,
    /// Whether a graph was destroyed since they were last looked through.
    graph_destroyed: bool,
}

impl CapturedCallbacks {
    pub fn add(&mut self, callback: HostCallback) {
        self.all.push(callback);
    }

    /// A capture or graph was destroyed.
    pub fn graph_destroyed(&mut self) {
        self.graph_destroyed = true;
    }

    /// Removes those that are in no graph any more, to be dropped without the lock.
    pub fn take_unused(&mut self) -> Vec<HostCallback> {
        if !std::mem::take(&mut self.graph_destroyed) {
            return Vec::new();
        }
        self.all.extract_if(.., |callback| Arc::strong_count(callback) == 1).collect()
    }
}

impl fmt::Debug for CapturedCallbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} callbacks", self.all.len())
    }
}
