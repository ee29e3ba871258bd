//! Plain device memory, and the book of what was allocated where: freeing takes an address only, but needs the device's
//! context.

use warpool_driver::{Call, DeviceId, DevicePtr, ErrorCode, Memory, MemoryInfo, Result};

use crate::CudaDriver;
use crate::context::Context;

/// What is known about an address that was given out.
#[derive(Clone, Copy)]
pub(crate) struct Allocation {
    /// The context that it is freed with.
    pub(crate) context: Context,
    /// Who decides whether it is live.
    pub(crate) life: Life,
}

/// Who decides whether an allocation is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// It is until it is freed through this driver.
    Counted,
    /// A captured graph: every launch may give the address out again, so only CUDA knows.
    Graph,
}

impl Memory for CudaDriver {
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        let site = self.enter(Call::MemAlloc)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let mut address = 0;
        // SAFETY: `address` takes the number.
        site.check(unsafe { (self.api.mem_alloc)(&raw mut address, bytes as usize) })?;
        self.allocations.insert(address, bytes, Allocation { context, life: Life::Counted });
        Ok(DevicePtr(address))
    }

    fn mem_free(&self, ptr: DevicePtr) -> Result<()> {
        let site = self.enter(Call::MemFree)?;
        if ptr.is_null() {
            return Ok(());
        }
        let known = self.allocations.get(ptr.0).ok_or_else(|| site.error(ErrorCode::InvalidValue))?;
        let _current = self.make_current(site, known.what.context)?;
        // Out of the book first: once CUDA has it back, another thread may be given the same address.
        let taken = self.allocations.remove_if(ptr.0, |what| what.life == Life::Counted);
        if taken.is_none() && known.what.life == Life::Counted {
            return Err(site.error(ErrorCode::InvalidValue));
        }
        // SAFETY: only addresses that this driver gave out get here; CUDA knows whether one is live.
        let freed = site.check(unsafe { (self.api.mem_free)(ptr.0) });
        if let (Err(_), Some(range)) = (&freed, taken) {
            self.allocations.insert(ptr.0, range.bytes, range.what);
        }
        freed
    }

    fn mem_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        let site = self.enter(Call::MemInfo)?;
        let _current = self.on_device(site, device)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: `free` and `total` take one number each.
        site.check(unsafe { (self.api.mem_get_info)(&raw mut free, &raw mut total) })?;
        Ok(MemoryInfo { bytes_free: free as u64, bytes_total: total as u64 })
    }
}
