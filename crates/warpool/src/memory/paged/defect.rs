//! Deliberate defects, switched on by tests that show that the other tests would find them. Only in test builds.

use std::cell::Cell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defect {
    /// A stream that takes pages of another stream's heap does not wait for that stream.
    NoEventBetweenHeaps,
    /// Streams that use memory although nobody said so are not waited for.
    ForgetsBystanders,
    /// An old mapping is undone while its stream may still use it.
    UnmapsTooEarly,
}

thread_local! {
    static DEFECT: Cell<Option<Defect>> = const { Cell::new(None) };
}

impl Defect {
    /// Whether it is switched on in this thread.
    pub(super) fn is_on(self) -> bool {
        DEFECT.get() == Some(self)
    }

    /// Whether any is.
    pub(super) fn any_is_on() -> bool {
        DEFECT.get().is_some()
    }

    /// Runs `body` with it.
    pub(super) fn with<R>(self, body: impl FnOnce() -> R) -> R {
        DEFECT.set(Some(self));
        let result = body();
        DEFECT.set(None);
        result
    }
}
