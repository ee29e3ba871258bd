//! A driver lent to host callbacks, which must live for ever while the driver that a check was given does not.
//! What a callback gets here it loses when the check ends.

use std::sync::{Arc, Mutex, PoisonError};

use warpool_driver::Driver;

/// The lender's end: nobody gets the driver any more once it is dropped.
pub(super) struct Lent<'a> {
    slot: Slot,
    /// Keeps the lender from outliving what it lends.
    _driver: &'a dyn Driver,
}

/// The callback's end.
#[derive(Clone)]
pub(super) struct Slot(Arc<Mutex<Option<&'static dyn Driver>>>);

impl<'a> Lent<'a> {
    pub(super) fn new(driver: &'a dyn Driver) -> Self {
        // SAFETY: the reference leaves the slot only inside `Slot::with`, which holds the lock meanwhile, and `drop`
        // empties the slot under the same lock before `'a` ends. A leaked lender would break this; the type stays in
        // this module's hands.
        let forever = unsafe { std::mem::transmute::<&'a dyn Driver, &'static dyn Driver>(driver) };
        Self { slot: Slot(Arc::new(Mutex::new(Some(forever)))), _driver: driver }
    }

    /// An end for a callback.
    pub(super) fn slot(&self) -> Slot {
        self.slot.clone()
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        *self.slot.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Slot {
    /// Uses the driver, if it is still lent.
    pub(super) fn with(&self, body: impl FnOnce(&dyn Driver)) {
        if let Some(driver) = *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            body(driver);
        }
    }
}
