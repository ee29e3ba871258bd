//! Deliberate defects, switched on by tests that show that the other tests would find them. Only in test builds.

use std::cell::Cell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defect {
    /// Memory falls asleep while work in streams may still use it.
    DoesNotWait,
    /// The last allocated block of a segment is not copied.
    ForgetsBlocks,
    /// Memory whose contents were discarded is not zeroed when it wakes.
    DoesNotZero,
    /// A failed wake keeps the memory that it created.
    KeepsMemoryOfFailedWake,
}

thread_local! {
    static DEFECT: Cell<Option<Defect>> = const { Cell::new(None) };
}

impl Defect {
    /// Whether it is switched on in this thread.
    pub(super) fn is_on(self) -> bool {
        DEFECT.get() == Some(self)
    }

    /// Runs `body` with it.
    pub(super) fn with<R>(self, body: impl FnOnce() -> R) -> R {
        DEFECT.set(Some(self));
        let result = body();
        DEFECT.set(None);
        result
    }
}
