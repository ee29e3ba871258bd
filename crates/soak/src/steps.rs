//! The last steps of the running program, for the report of a violation.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const KEPT: usize = 60;

/// A ring of the last steps. Clones share it: the watchdog reads it while the program runs.
#[derive(Clone, Default)]
pub struct Steps(Arc<Mutex<VecDeque<String>>>);

impl Steps {
    pub fn push(&self, step: String) {
        let mut steps = self.lock();
        if steps.len() == KEPT {
            steps.pop_front();
        }
        steps.push_back(step);
    }

    pub fn clear(&self) {
        self.lock().clear();
    }

    pub fn to_vec(&self) -> Vec<String> {
        self.lock().iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
