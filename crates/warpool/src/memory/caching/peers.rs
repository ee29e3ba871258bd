//! Peer access: another device may use this one's memory, what is there and what will come.

use warpool_driver::{Access, DeviceAccess, DeviceId, ErrorCode};

use super::CachingAllocator;
use super::state::Source;
use crate::{Result, lock};

impl CachingAllocator {
    /// Lets kernels on `device` use what this allocator has on `owner`, now and later. A second time changes nothing.
    pub fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        self.cell(device)?;
        let cell = self.cell(owner)?;
        if device == owner || cell.peers().contains(&device) {
            return Ok(());
        }
        match self.driver().peer_enable(device, owner) {
            Err(error) if error.code != ErrorCode::PeerAccessAlreadyEnabled => return Err(error.into()),
            _ => {}
        }
        // Plain memory follows the switch above; mapped memory has rights of its own.
        let _slow = self.slow(cell);
        if cell.peers().contains(&device) {
            // Another thread did it meanwhile.
            return Ok(());
        }
        let ranges = self.with(cell, |state| {
            let growing = state.segments.values().filter_map(|segment| match &segment.source {
                Source::Growing(growing) => Some(growing.mapped_ranges()),
                Source::Plain | Source::Upstream(_) => None,
            });
            growing.flatten().collect::<Vec<_>>()
        });
        for (ptr, bytes) in ranges {
            let access = [DeviceAccess { device, access: Access::ReadWrite }];
            self.driver().vm_set_access(ptr, bytes, &access)?;
        }
        lock(&cell.peers).push(device);
        Ok(())
    }
}
