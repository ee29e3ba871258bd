//! Where a block is mapped, for sharing it with other processes.

use warpool_driver::DevicePtr;

use crate::Result;
use crate::memory::MappedPart;
use crate::memory::caching::CachingAllocator;

impl CachingAllocator {
    /// The chunks of an expandable segment that the block at `ptr` is in, by address. Empty if its segment is not
    /// expandable.
    pub(super) fn mapped_chunks(&self, ptr: DevicePtr) -> Result<Vec<MappedPart>> {
        self.shared.instance.expect_own_process("mapped_parts")?;
        let (device, block) = self.locate(ptr)?;
        Ok(device.read(|state| state.heap.mapped_parts(block)))
    }
}
