//! Panics of a program, as text with their place, and panics that a program causes on purpose.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Once;

thread_local! {
    /// How many calls of [`caught`] are on this thread's stack.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The payload of a panic on purpose.
struct Injected;

/// Panics on purpose, without the panic hook: nothing is printed.
pub fn inject_panic() -> ! {
    resume_unwind(Box::new(Injected))
}

/// A panic that was caught.
pub enum Caught {
    /// By [`inject_panic`].
    Injected,
    /// Any other: the message and where it happened.
    Failed(String),
}

/// Runs `act`. A panic in it is returned instead of being printed.
pub fn caught<T>(act: impl FnOnce() -> T) -> Result<T, Caught> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if DEPTH.get() == 0 {
                previous(info);
            } else {
                LAST.replace(info.to_string());
            }
        }));
    });
    DEPTH.set(DEPTH.get() + 1);
    let outcome = catch_unwind(AssertUnwindSafe(act));
    DEPTH.set(DEPTH.get() - 1);
    outcome.map_err(|payload| classify(&*payload))
}

fn classify(payload: &(dyn Any + Send)) -> Caught {
    if payload.is::<Injected>() {
        return Caught::Injected;
    }
    let last = LAST.take();
    if !last.is_empty() {
        return Caught::Failed(last);
    }
    // Resumed from another thread: the hook did not see it here.
    let text =
        payload.downcast_ref::<String>().cloned().or_else(|| payload.downcast_ref::<&str>().map(|&text| text.into()));
    Caught::Failed(text.unwrap_or_else(|| "a panic without a message".to_owned()))
}
