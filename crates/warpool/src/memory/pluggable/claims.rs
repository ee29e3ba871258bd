//! Which addresses a plug has given and not got back, on all devices. What it gives is input from outside: this finds
//! what cannot be.

use std::collections::BTreeMap;
use std::sync::Mutex;

use warpool_driver::DevicePtr;

use crate::{Error, Result, lock};

/// Where each stretch starts, and how long it is. They do not overlap.
#[derive(Debug, Default)]
pub(super) struct Claims(Mutex<BTreeMap<u64, u64>>);

impl Claims {
    /// Notes what the plug gave. [`Error::ExternalOverlap`] if it overlaps something that it has not got back.
    pub(super) fn claim(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let mut claims = lock(&self.0);
        let end = ptr.0.saturating_add(bytes);
        // Of all that start before its end, only the last can reach into it.
        if let Some((&start, &length)) = claims.range(..end).next_back()
            && start.saturating_add(length) > ptr.0
        {
            return Err(Error::ExternalOverlap { ptr, bytes, live: DevicePtr(start), live_bytes: length });
        }
        claims.insert(ptr.0, bytes);
        Ok(())
    }

    /// The plug is about to get it back: from here on it may give it out again.
    pub(super) fn drop(&self, ptr: DevicePtr) {
        lock(&self.0).remove(&ptr.0);
    }

    /// What `ptr` lies in.
    pub(super) fn around(&self, ptr: DevicePtr) -> Option<(DevicePtr, u64)> {
        let claims = lock(&self.0);
        let (&start, &length) = claims.range(..=ptr.0).next_back()?;
        (ptr.0 < start.saturating_add(length)).then_some((DevicePtr(start), length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each step claims (start, length), or drops what starts there (length 0); a claim may be refused for what is at
    /// an address.
    #[test]
    fn nothing_is_claimed_twice() {
        let claims = Claims::default();
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
            (u64::MAX - 5, 100, None),
        ];
        for &(start, length, refused_for) in steps {
            if length == 0 {
                claims.drop(DevicePtr(start));
                continue;
            }
            let taken = match claims.claim(DevicePtr(start), length) {
                Ok(()) => None,
                Err(Error::ExternalOverlap { live, .. }) => Some(live.0),
                Err(other) => panic!("{other}"),
            };
            assert_eq!(taken, refused_for, "{length} bytes at {start}");
        }
        assert_eq!(claims.around(DevicePtr(1150)), Some((DevicePtr(1100), 100)));
        assert_eq!(claims.around(DevicePtr(1205)), None);
    }
}
