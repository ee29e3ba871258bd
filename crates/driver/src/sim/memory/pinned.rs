//! Pinned host memory: real memory of this process, at its own address.

use super::Memory;
use super::address_space::Region;
use super::bytes::{Bytes, HostBytes};
use super::quarantine::Removal;
use crate::{DeviceId, HostPtr};

#[derive(Clone, Copy, Debug)]
pub struct PinnedRange {
    /// The device that it was pinned with.
    pub device: DeviceId,
    /// Whether the caller registered memory of its own.
    pub registered: bool,
}

impl Memory {
    /// Whether these host addresses are unused in the address space of the devices.
    pub fn can_pin(&self, start: u64, bytes: u64) -> bool {
        self.space.is_free(start, bytes)
    }

    /// Pins host memory, by call number `at`.
    pub fn pin(&mut self, bytes: u64, contents: HostBytes, range: PinnedRange, at: u64) -> HostPtr {
        let PinnedRange { device, registered } = range;
        let start = contents.start();
        let backing = self.backings.add_host(bytes, Bytes::Host(contents), at);
        self.space.insert(start, bytes, Region::Pinned { backing, device, registered });
        HostPtr(start)
    }

    /// The pinned range that contains `ptr`, with its start.
    pub fn pinned_range(&self, ptr: HostPtr) -> Option<(HostPtr, PinnedRange)> {
        match self.space.region_at(ptr.0) {
            Some((start, _, Region::Pinned { device, registered, .. })) => {
                Some((HostPtr(start), PinnedRange { device: *device, registered: *registered }))
            }
            _ => None,
        }
    }

    /// Whether a range is pinned host memory.
    pub fn is_pinned(&self, ptr: HostPtr, bytes: u64) -> bool {
        match self.space.region_at(ptr.0) {
            Some((start, size, Region::Pinned { .. })) => {
                ptr.0.checked_add(bytes).is_some_and(|end| end <= start + size)
            }
            _ => false,
        }
    }

    /// Unpins the range that starts at `ptr`, by call number `at`. Returns its size; `None` if none starts there.
    pub fn unpin(&mut self, ptr: HostPtr, at: u64) -> Option<u64> {
        let Some((bytes, Region::Pinned { backing, .. })) = self.space.get(ptr.0) else { return None };
        let backing = *backing;
        let pinned_by = self.backings.get(backing).pinned_by;
        self.space.remove(ptr.0, Removal::Freed, at, pinned_by);
        self.backings.remove(backing);
        Some(bytes)
    }
}
