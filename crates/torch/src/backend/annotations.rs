//! Regions that the program names while the history is recorded (`global_record_annotations`), newest kept.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use warpool::memory::report::Annotation;

/// The starts and ends of named regions.
#[derive(Debug, Default)]
pub(crate) struct Annotations(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    entries: VecDeque<Annotation>,
    /// How many are kept; 0 while no history is recorded.
    limit: usize,
}

impl Annotations {
    /// Keeps the newest `limit` from here on; 0 drops all.
    pub(crate) fn set_limit(&self, limit: usize) {
        let mut state = self.lock();
        state.limit = limit;
        let surplus = state.entries.len().saturating_sub(limit);
        state.entries.drain(..surplus);
    }

    pub(crate) fn add(&self, annotation: Annotation) {
        let mut state = self.lock();
        if state.limit == 0 {
            return;
        }
        if state.entries.len() >= state.limit {
            state.entries.pop_front();
        }
        state.entries.push_back(annotation);
    }

    pub(crate) fn all(&self) -> Vec<Annotation> {
        self.lock().entries.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
