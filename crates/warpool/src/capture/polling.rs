//! Guards for threads that query events while other threads capture. See `pollers.rs` for the protocol.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;

use super::relaxed::RelaxedMode;
use crate::instance::InstanceKey;
use crate::{Event, Instance, Result};

thread_local! {
    // How many guards this thread holds, per Instance. Usually empty or one entry.
    static HELD: RefCell<Vec<(InstanceKey, u32)>> = const { RefCell::new(Vec::new()) };
}

/// A guard for querying events while other threads capture. No capture begins while it is held, so hold it for one
/// round of queries, not permanently. Dropping it makes no driver call.
///
/// It stays on its thread:
/// ```compile_fail,E0277
/// # fn on_another_thread(instance: &warpool::Instance) {
/// let polling = instance.polling();
/// std::thread::spawn(move || drop(polling));
/// # }
/// ```
pub struct Polling {
    instance: Instance,
    _not_send: PhantomData<Rc<()>>,
}

impl Instance {
    /// A guard for querying events. Waits while a capture is about to begin, unless this thread holds a guard already,
    /// or runs the closure of a typed call.
    #[must_use = "dropping the guard ends the polling"]
    pub fn polling(&self) -> Polling {
        // A capture that was about to begin at a fork never begins in the child, so the child does not wait for it.
        if !self.is_inherited() {
            // A capture that waits for a typed call of this thread would never begin.
            let nested = guards_of_thread(self) > 0 || self.capture_gate().is_thread_inside();
            self.captures().pollers.enter(nested);
        }
        change_held(self, |held| held + 1);
        Polling { instance: self.clone(), _not_send: PhantomData }
    }
}

impl Polling {
    /// Whether the work before `event` is done. As [`Event::query`], but invalidates no capture, unless the event
    /// itself was recorded in one.
    pub fn query(&self, event: &Event) -> Result<bool> {
        self.run(|| event.query())
    }

    /// Runs `act`, which may query the driver in other ways, without invalidating a capture.
    pub fn run<R>(&self, act: impl FnOnce() -> Result<R>) -> Result<R> {
        // If no capture is active now, none begins until the guard is dropped: a begin is counted first and then waits
        // for this guard.
        if self.instance.has_captures() { RelaxedMode::run(&**self.instance.driver(), act) } else { act() }
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        change_held(&self.instance, |held| held.saturating_sub(1));
        if !self.instance.is_inherited() {
            self.instance.captures().pollers.leave();
        }
    }
}

impl fmt::Debug for Polling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Polling").field("instance", &self.instance).finish()
    }
}

/// How many guards of `instance` the calling thread holds; 0 once its thread-local variables are destroyed.
pub(crate) fn guards_of_thread(instance: &Instance) -> u32 {
    let find = |held: &RefCell<Vec<(InstanceKey, u32)>>| {
        held.borrow().iter().find(|(key, _)| *key == instance.key()).map(|&(_, count)| count)
    };
    HELD.try_with(find).ok().flatten().unwrap_or(0)
}

fn change_held(instance: &Instance, change: impl Fn(u32) -> u32) {
    let _ = HELD.try_with(|held| {
        let mut held = held.borrow_mut();
        match held.iter_mut().find(|(key, _)| *key == instance.key()) {
            Some((_, count)) => *count = change(*count),
            None => held.push((instance.key(), change(0))),
        }
        held.retain(|&(_, count)| count > 0);
    });
}
