//! The address ranges that an external allocator has returned and not freed, on all devices. Its results are untrusted
//! input: an overlap is an error.

use std::collections::BTreeMap;
use std::sync::Mutex;

use warpool_driver::DevicePtr;

use crate::{Error, Result, lock};

/// Start and length of each range. They do not overlap.
#[derive(Debug, Default)]
pub(in crate::memory) struct AddressRanges(Mutex<BTreeMap<u64, u64>>);

impl AddressRanges {
    /// Adds a range. [`Error::ExternalAddress`] if no memory can be there, [`Error::ExternalOverlap`] if it overlaps
    /// one that was not freed.
    pub(in crate::memory) fn insert(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let mut ranges = lock(&self.0);
        let end = ptr.0.checked_add(bytes).filter(|_| !ptr.is_null()).ok_or(Error::ExternalAddress { ptr, bytes })?;
        // Among the ranges that start before its end, only the last can overlap it.
        if let Some((&start, &length)) = ranges.range(..end).next_back()
            && start + length > ptr.0
        {
            return Err(Error::ExternalOverlap { ptr, bytes, live: DevicePtr(start), live_bytes: length });
        }
        ranges.insert(ptr.0, bytes);
        Ok(())
    }

    /// Removes a range. Call it before the external allocator frees the memory: after that it may return the address
    /// again.
    pub(in crate::memory) fn remove(&self, ptr: DevicePtr) {
        lock(&self.0).remove(&ptr.0);
    }

    /// The range that contains `ptr`.
    pub(in crate::memory) fn containing(&self, ptr: DevicePtr) -> Option<(DevicePtr, u64)> {
        let ranges = lock(&self.0);
        let (&start, &length) = ranges.range(..=ptr.0).next_back()?;
        (ptr.0 < start + length).then_some((DevicePtr(start), length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each step inserts (start, length), or removes what starts there (length 0); an insert may fail because of the
    /// range at an address.
    #[test]
    fn overlapping_ranges_are_refused() {
        let ranges = AddressRanges::default();
        let steps: &[(u64, u64, Option<u64>)] = &[
            (1000, 100, None),
            (1100, 100, None),
            (900, 100, None),
            (1000, 100, Some(1000)),
            (1050, 1, Some(1000)),
            (999, 1, Some(900)),
            (500, 10_000, Some(1100)),
            (1199, 5, Some(1100)),
            (1200, 5, None),
            (1000, 0, None),
            (1000, 100, None),
            (u64::MAX - 105, 105, None),
        ];
        for &(start, length, refused_for) in steps {
            if length == 0 {
                ranges.remove(DevicePtr(start));
                continue;
            }
            let overlapped = match ranges.insert(DevicePtr(start), length) {
                Ok(()) => None,
                Err(Error::ExternalOverlap { live, .. }) => Some(live.0),
                Err(other) => panic!("{other}"),
            };
            assert_eq!(overlapped, refused_for, "{length} bytes at {start}");
        }
        for (ptr, bytes) in [(u64::MAX - 5, 100), (u64::MAX - 5, 6), (u64::MAX, 1), (0, 5)] {
            let ptr = DevicePtr(ptr);
            assert_eq!(ranges.insert(ptr, bytes), Err(Error::ExternalAddress { ptr, bytes }), "not memory");
        }
        assert_eq!(ranges.containing(DevicePtr(1150)), Some((DevicePtr(1100), 100)));
        assert_eq!(ranges.containing(DevicePtr(1205)), None);
    }
}
