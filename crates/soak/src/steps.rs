//! The last steps of the running program, for the report of a violation.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A ring of the last steps. Clones share it: the watchdog reads it while the program runs.
#[derive(Clone)]
pub struct Steps {
    last: Arc<Mutex<VecDeque<String>>>,
    most: usize,
}

impl Steps {
    /// Keeps the last `most` steps.
    pub fn new(most: usize) -> Self {
        Self { last: Arc::default(), most }
    }

    pub fn push(&self, step: String) {
        let mut steps = self.lock();
        if steps.len() == self.most {
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
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
