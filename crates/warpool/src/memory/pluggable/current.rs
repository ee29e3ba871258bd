//! The program's one allocator: chosen before it is used, and then for good.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::memory::{CachingAllocator, DeviceAllocator, Settings};
use crate::{Error, Instance, Result, lock};

/// Where a program keeps its allocator of device memory. Whoever needs memory [gets](Self::get) it; whoever wants
/// another one [installs](Self::install) it before that.
///
/// It cannot be swapped afterwards: blocks of the one before would be freed by whoever made them, but limits and
/// statistics would be about half of the truth.
pub struct CurrentAllocator {
    instance: Instance,
    slot: Mutex<Slot>,
}

#[derive(Default)]
struct Slot {
    allocator: Option<Arc<dyn DeviceAllocator>>,
    /// Whether somebody got it.
    used: bool,
}

impl CurrentAllocator {
    /// For memory of `instance`; nothing is installed, and no driver call made.
    #[must_use]
    pub fn new(instance: &Instance) -> Self {
        Self { instance: instance.clone(), slot: Mutex::default() }
    }

    /// Makes `allocator` the program's. One that was installed before and that nobody got yet makes way.
    /// [`Error::AllocatorInUse`] if somebody got one, [`Error::ForeignInstance`] for one of another [`Instance`].
    pub fn install(&self, allocator: Arc<dyn DeviceAllocator>) -> Result<()> {
        self.instance.expect_same(allocator.instance(), "the allocator")?;
        let mut slot = lock(&self.slot);
        if !slot.used {
            // Dropped without the lock: it may own what it likes.
            let before = slot.allocator.replace(allocator);
            drop(slot);
            drop(before);
            return Ok(());
        }
        let in_use = slot.allocator.clone();
        drop(slot);
        let in_use = in_use.expect("what was used is there");
        Err(Error::AllocatorInUse { installed: in_use.name(), bytes: held(&*in_use), wanted: allocator.name() })
    }

    /// The program's allocator: the installed one, or, if there is none, a [`CachingAllocator`] with default settings.
    /// From now on it stays.
    #[must_use]
    pub fn get(&self) -> Arc<dyn DeviceAllocator> {
        let mut slot = lock(&self.slot);
        slot.used = true;
        let make =
            || -> Arc<dyn DeviceAllocator> { Arc::new(CachingAllocator::new(&self.instance, Settings::default())) };
        Arc::clone(slot.allocator.get_or_insert_with(make))
    }

    /// Whether somebody got it, so that it stays.
    #[must_use]
    pub fn is_used(&self) -> bool {
        lock(&self.slot).used
    }
}

/// What an allocator holds, on all devices; those that cannot say are left out.
fn held(allocator: &dyn DeviceAllocator) -> u64 {
    let devices = allocator.instance().devices();
    devices.filter_map(|device| allocator.stats(device.id()).ok()).map(|stats| stats.reserved_bytes.all.current).sum()
}

impl fmt::Debug for CurrentAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slot = lock(&self.slot);
        let name = slot.allocator.as_ref().map(|allocator| allocator.name());
        f.debug_struct("CurrentAllocator").field("allocator", &name).field("used", &slot.used).finish()
    }
}
