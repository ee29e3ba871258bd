//! Allocation at a given address: out of a free block that contains it, never from the driver.

use warpool_driver::DevicePtr;

use crate::memory::caching::CachingAllocator;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::caching::state::DeviceState;
use crate::memory::{Allocation, Request, SizeRules, StackLevel};
use crate::{Error, Result};

impl CachingAllocator {
    /// Allocates at `ptr`, which must be a multiple of 512.
    pub(super) fn take_at(&self, request: Request, ptr: DevicePtr) -> Result<Allocation> {
        let Request { device, stream, bytes, pool } = request;
        let refuse = |why| Err(Error::ExactAddress { ptr, bytes, why });
        if bytes == 0 || !ptr.0.is_multiple_of(SizeRules::BLOCK_MULTIPLE) {
            return refuse("the size must not be 0, and the address must be a multiple of 512");
        }
        if bytes >= SizeRules::REQUEST_TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        let device = self.device(device)?;
        let pool = match pool {
            Some(pool) => pool,
            None => device.routed(stream)?,
        };
        let details = device.entry_details(StackLevel::State);
        if !device.is_capturing(stream)? {
            let pending = PendingFrees::new(device, &details);
            pending.process()?;
            pending.process_for(stream)?;
        }
        let allocate = |state: &mut DeviceState| {
            let request = state.request(pool, stream, bytes)?;
            Ok::<_, Error>(state.allocate_at(&request, ptr.0, &details))
        };
        let allocated = device.with(allocate, |state, allocated| {
            allocated.ok().flatten().into_iter().for_each(|allocation| state.abandon(&allocation, &details));
        })?;
        match allocated {
            Some(allocation) => Ok(allocation),
            None => refuse("no free block of that stream and pool contains it"),
        }
    }
}
