//! A hook that stops one driver call until another thread has done something.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use warpool::driver::decorate::{Arguments, Hook, Outcome};
use warpool::driver::{self, Call, Driver};

/// How long a thread is given to do what it must not do. A passing test waits this long.
pub const PATIENCE: Duration = Duration::from_millis(150);

/// Stops the first call of one kind, until another thread has done something or [`PATIENCE`] is over.
#[derive(Default)]
pub struct Pause {
    at: Mutex<Option<Call>>,
    state: Mutex<State>,
    changed: Condvar,
    calls: Mutex<Vec<Call>>,
}

#[derive(Default)]
struct State {
    reached: bool,
    released: bool,
}

impl Pause {
    /// Stops the next call of this kind.
    pub fn set(&self, call: Call) {
        *self.at.lock().unwrap() = Some(call);
    }

    pub fn wait_until_reached(&self) {
        let state = self.state.lock().unwrap();
        let waited = self.changed.wait_timeout_while(state, 100 * PATIENCE, |state| !state.reached).unwrap();
        assert!(waited.0.reached, "the call was not made");
    }

    pub fn release(&self) {
        self.state.lock().unwrap().released = true;
        self.changed.notify_all();
    }

    /// All calls so far, in the order in which they were made.
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    /// When the first call of a kind was made.
    pub fn position(&self, call: Call) -> Option<usize> {
        self.calls().iter().position(|&other| other == call)
    }
}

impl Hook for Pause {
    type CallState = ();

    fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> driver::Result<()> {
        if self.at.lock().unwrap().take_if(|at| *at == call).is_some() {
            // Calls of the preparation do not count.
            self.calls.lock().unwrap().clear();
            let mut state = self.state.lock().unwrap();
            state.reached = true;
            self.changed.notify_all();
            drop(self.changed.wait_timeout_while(state, PATIENCE, |state| !state.released).unwrap());
        }
        self.calls.lock().unwrap().push(call);
        Ok(())
    }

    fn after(&self, _: &dyn Driver, _: Call, (): (), _: Outcome<'_>) {}

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}
