//! Memory at a wanted address: out of a free block that contains it, never from the driver.

use warpool_driver::DevicePtr;

use super::CachingAllocator;
use super::block::BlockKey;
use super::state::{State, Want};
use crate::memory::{Allocation, Request, SizeRules, StackLevel};
use crate::{Error, Result};

impl CachingAllocator {
    /// As [`allocate_raw`](crate::memory::DeviceAllocator::allocate_raw), but at `ptr`, which must be a multiple of 512
    /// and lie, with all that is asked for, in one free block of the same stream and pool.
    pub fn allocate_at(&self, request: Request, ptr: DevicePtr) -> Result<Allocation> {
        let Request { device, stream, bytes, pool } = request;
        let refuse = |why| Err(Error::ExactAddress { ptr, bytes, why });
        if bytes == 0 || !ptr.0.is_multiple_of(SizeRules::BLOCK_MULTIPLE) {
            return refuse("the size must not be 0, and the address must be a multiple of 512");
        }
        if bytes >= SizeRules::REQUEST_TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        let cell = self.cell(device)?;
        let pool = match pool {
            Some(pool) => pool,
            None => self.routed(cell, stream)?,
        };
        let cause = self.cause(cell, StackLevel::State);
        if !self.is_capturing(cell, stream)? {
            self.process_pending(cell, &cause)?;
        }
        let found = self.try_with(cell, |state| {
            let want = state.want(pool, stream, bytes)?;
            let Some(found) = state.free_around(&want, ptr.0) else { return Ok(None) };
            state.take_free(found);
            let before = ptr.0 - state.blocks[found].ptr;
            if before > 0 {
                state.split_off_front(found, before);
            }
            Ok(Some(state.hand_out(found, &want, &cause)))
        })?;
        match found {
            Some(allocation) => Ok(self.handed_out(allocation)),
            None => refuse("no free block of that stream and pool contains it"),
        }
    }
}

impl State {
    /// The free block that contains the wanted bytes at `ptr`.
    fn free_around(&self, want: &Want, ptr: u64) -> Option<BlockKey> {
        let lane = self.bins[want.bin].lane(want.stream)?;
        self.lanes[lane].free.at_least(want.size).map(|(_, block)| block).find(|&block| {
            let block = &self.blocks[block];
            block.ptr <= ptr && ptr.saturating_add(want.size) <= block.end()
        })
    }

    /// Cuts a front off a block in no set and makes it free; the rest counts as a free part of its segment until it is
    /// handed out.
    pub(super) fn split_off_front(&mut self, block: BlockKey, bytes: u64) {
        let was_split = self.blocks[block].is_split();
        let (growing, whole) = (self.blocks[block].growing, self.blocks[block].size);
        let kind = self.blocks[block].kind;
        let front = self.cut_front(block, bytes);
        self.put_free(front);
        if !growing {
            self.stats.inactive_split.increase(kind, if was_split { 1 } else { 2 });
            if !was_split {
                self.stats.inactive_split_bytes.increase(kind, whole);
            }
        }
    }
}
