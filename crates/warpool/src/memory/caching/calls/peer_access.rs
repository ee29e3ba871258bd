//! Peer access: another device may access this one's memory, present and future.

use warpool_driver::{Access, DeviceAccess, DeviceId, ErrorCode};

use crate::Result;
use crate::memory::caching::CachingAllocator;
use crate::memory::pool_owner::PoolOwner;

impl CachingAllocator {
    /// Lets kernels on `device` access the memory of this allocator on `owner`.
    pub(super) fn let_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        self.device(device)?;
        let owner_device = self.device(owner)?;
        if device == owner || owner_device.peers().contains(&device) {
            return Ok(());
        }
        match self.driver().peer_enable(device, owner) {
            Err(error) if error.code != ErrorCode::PeerAccessAlreadyEnabled => return Err(error.into()),
            _ => {}
        }
        // That covers driver allocations; mapped memory has access rights of its own.
        self.share_pools(owner, device)?;
        let slow = owner_device.lock_slow();
        if slow.peers().contains(&device) {
            // Another thread has enabled it meanwhile.
            return Ok(());
        }
        for (ptr, bytes) in slow.read(|state| state.heap.mapped_ranges()) {
            let access = [DeviceAccess { device, access: Access::ReadWrite }];
            self.driver().vm_set_access(ptr, bytes, &access)?;
        }
        slow.add_peer(device);
        drop(slow);
        // Pools that were created meanwhile.
        self.share_pools(owner, device)
    }
}
