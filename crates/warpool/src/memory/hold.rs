//! Holds: a block that a graph owns is freed only by the graph, even if raw calls are made with its address.

use std::ops::Deref;
use std::sync::Arc;

use super::{Allocation, DeviceAllocator, DeviceBlock, GraphKey};
use crate::Result;

/// While it exists, no call frees the block.
pub(crate) struct BlockHold {
    allocator: Arc<dyn DeviceAllocator>,
    allocation: Allocation,
}

impl BlockHold {
    pub(crate) fn new(block: &DeviceBlock) -> Result<Self> {
        let (allocator, allocation) = block.parts();
        allocator.hold(allocation, GraphKey::NEW)?;
        Ok(Self { allocator: Arc::clone(allocator), allocation })
    }
}

impl Drop for BlockHold {
    fn drop(&mut self) {
        self.allocator.end_hold(self.allocation, GraphKey::NEW);
    }
}

/// A block that a graph owns, directly or through an object that it uses.
pub(crate) struct HeldBlock {
    // Dropped before the block.
    _hold: BlockHold,
    block: DeviceBlock,
}

impl HeldBlock {
    pub(crate) fn new(block: DeviceBlock) -> Result<Self> {
        Ok(Self { _hold: BlockHold::new(&block)?, block })
    }
}

impl Deref for HeldBlock {
    type Target = DeviceBlock;

    fn deref(&self) -> &DeviceBlock {
        &self.block
    }
}
