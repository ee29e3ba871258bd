//! A flag that ends a replay early, from another thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Stops the replays that have a clone of it: each returns [`ReplayError::Stopped`] within some thousand events.
///
/// [`ReplayError::Stopped`]: crate::replay::ReplayError::Stopped
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Ends them, those that start later too.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether [`stop`](Self::stop) was called.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
