//! State that modules above this one keep per device or per [`Instance`](super::Instance), such as loaded kernels.
//!
//! `instance` imports none of those modules. Each module stores one value of its own type in a slot; the order of slots
//! is the order of destruction. Reading a slot takes no lock.

use std::any::Any;
use std::sync::OnceLock;

use warpool_driver::Driver;

use crate::Result;

/// A value that lives as long as its device or [`Instance`](super::Instance).
pub(crate) trait Extension: Any + Send + Sync {
    /// Its slot. Each slot has one type.
    fn slot() -> ExtensionSlot
    where
        Self: Sized;

    /// Destroys its driver objects, when the [`Instance`](super::Instance) is closed. After a failure it continues, and
    /// returns the first error.
    fn destroy(&self, driver: &dyn Driver) -> Result<()>;
}

/// The slots, in the order of destruction: graphs launch kernels, so they go before the kernels' modules.
#[derive(Clone, Copy)]
pub(crate) enum ExtensionSlot {
    Captures,
    Asleep,
    Graphs,
    DefaultGenerator,
    Kernels,
    Handles,
    Segments,
    Addresses,
}

impl ExtensionSlot {
    const COUNT: usize = Self::Addresses as usize + 1;
}

/// One value per [`ExtensionSlot`], each set once.
#[derive(Default)]
pub(crate) struct Extensions {
    slots: [OnceLock<Box<dyn Extension>>; ExtensionSlot::COUNT],
}

impl Extensions {
    /// The value of `T`'s slot, if it was set.
    #[inline]
    pub(crate) fn get<T: Extension>(&self) -> Option<&T> {
        self.slots[T::slot() as usize].get().map(|extension| downcast(&**extension))
    }

    /// The value of `T`'s slot, created by `make` if it was not set.
    #[inline]
    pub(crate) fn get_or_init<T: Extension>(&self, make: impl FnOnce() -> T) -> &T {
        downcast(&**self.slots[T::slot() as usize].get_or_init(|| Box::new(make())))
    }

    /// Destroys the driver objects of all values. After a failure it continues, and returns the first error.
    pub(super) fn destroy_all(&self, driver: &dyn Driver) -> Result<()> {
        let extensions = self.slots.iter().filter_map(OnceLock::get);
        let mut outcome = Ok(());
        for extension in extensions {
            outcome = outcome.and(extension.destroy(driver));
        }
        outcome
    }
}

#[inline]
fn downcast<T: Extension>(extension: &dyn Extension) -> &T {
    (extension as &dyn Any).downcast_ref().expect("each slot has one type")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{DriverError, ErrorCode};

    use super::*;
    use crate::lock;

    static DESTROYED: Mutex<Vec<&str>> = Mutex::new(Vec::new());

    struct Graphs(u32);
    struct Kernels;

    impl Extension for Graphs {
        fn slot() -> ExtensionSlot {
            ExtensionSlot::Graphs
        }

        fn destroy(&self, _: &dyn Driver) -> Result<()> {
            lock(&DESTROYED).push("graphs");
            Err(DriverError::new("graph_destroy", ErrorCode::IllegalState).into())
        }
    }

    impl Extension for Kernels {
        fn slot() -> ExtensionSlot {
            ExtensionSlot::Kernels
        }

        fn destroy(&self, _: &dyn Driver) -> Result<()> {
            lock(&DESTROYED).push("kernels");
            Ok(())
        }
    }

    #[test]
    fn values_are_set_once_and_destroyed_in_slot_order() {
        let extensions = Extensions::default();
        assert!(extensions.get::<Graphs>().is_none());
        extensions.get_or_init(|| Kernels);
        assert_eq!(extensions.get_or_init(|| Graphs(1)).0, 1);
        assert_eq!(extensions.get_or_init(|| Graphs(2)).0, 1);
        let driver = SimDriver::new(SimConfig::default());
        assert!(extensions.destroy_all(&driver).is_err());
        assert_eq!(*lock(&DESTROYED), ["graphs", "kernels"]);
    }
}
