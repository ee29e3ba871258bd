//! The address ranges of an [`Instance`] that are asleep. Calls that know the memory they are about to use (replays,
//! typed work) fail here, before the work reaches the device: it would cause an illegal address error, after which the
//! device is unusable.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use warpool_driver::{DevicePtr, Driver};

use crate::instance::{Extension, ExtensionSlot};
use crate::{Error, Instance, Result, lock};

/// Address ranges without memory, by their start.
#[derive(Default)]
pub(super) struct AsleepRanges(Mutex<BTreeMap<u64, Range>>);

struct Range {
    end: u64,
    tag: Arc<str>,
}

impl Extension for AsleepRanges {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::Asleep
    }

    fn destroy(&self, _: &dyn Driver) -> Result<()> {
        Ok(())
    }
}

impl Instance {
    fn asleep_ranges(&self) -> &AsleepRanges {
        self.extensions().get_or_init(AsleepRanges::default)
    }

    /// Adds a range that is asleep, or about to be.
    pub(super) fn add_asleep(&self, ptr: u64, bytes: u64, tag: &Arc<str>) {
        let mut ranges = lock(&self.asleep_ranges().0);
        ranges.insert(ptr, Range { end: ptr + bytes, tag: Arc::clone(tag) });
        self.ranges_asleep().store(ranges.len(), Ordering::Release);
    }

    /// Removes the range that starts there: it is awake, or gone.
    pub(super) fn remove_asleep(&self, ptr: u64) {
        let mut ranges = lock(&self.asleep_ranges().0);
        ranges.remove(&ptr);
        self.ranges_asleep().store(ranges.len(), Ordering::Release);
    }

    /// Whether any memory is asleep. One load.
    #[inline]
    pub(crate) fn has_asleep(&self) -> bool {
        self.ranges_asleep().load(Ordering::Acquire) > 0
    }

    /// Fails if the memory at `ptr` is asleep. `what` names the operation that the caller cannot do then.
    pub(crate) fn expect_awake_at(&self, ptr: DevicePtr, what: &'static str) -> Result<()> {
        let ranges = lock(&self.asleep_ranges().0);
        match ranges.range(..=ptr.0).next_back() {
            Some((_, range)) if ptr.0 < range.end => Err(Error::MemoryAsleep { tag: range.tag.to_string(), what }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn addresses_in_ranges_sleep() {
        let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
        let is_awake = |ptr| instance.expect_awake_at(DevicePtr(ptr), "replay").is_ok();
        assert!(!instance.has_asleep() && is_awake(100));
        instance.add_asleep(100, 50, &"weights".into());
        instance.add_asleep(200, 50, &"kv".into());
        assert!(instance.has_asleep());
        assert_eq!([99, 100, 149, 150, 200].map(is_awake), [true, false, false, true, false]);
        let error = instance.expect_awake_at(DevicePtr(249), "replay the graph").unwrap_err();
        assert!(error.to_string().starts_with("cannot replay the graph: ") && error.is_asleep(), "{error}");
        instance.remove_asleep(100);
        instance.remove_asleep(200);
        assert!(!instance.has_asleep() && is_awake(100));
    }
}
