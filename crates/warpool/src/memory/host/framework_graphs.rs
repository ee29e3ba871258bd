//! Pinned memory of graphs that a framework captures itself. Warpool does not know those graphs: the framework reports
//! which requests and uses belong to a capture, and when the graphs are gone.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::{DeviceId, HostPtr};

use super::graph_pool::GraphHostPool;
use super::{HostAllocator, HostBlock};
use crate::Result;
use crate::memory::MemPoolId;

/// The pinned memory of graphs that a framework captures. Blocks that their captures used stay in the pool; blocks that
/// were allocated for a capture and freed unused serve the next one. Clones refer to the same pool.
///
/// Dropping the last clone frees the memory. The graphs must be gone by then, and their replays done.
#[derive(Clone)]
pub struct HostGraphPool {
    pool: Arc<GraphHostPool>,
}

impl HostAllocator {
    /// A pool for graphs that a framework captures.
    #[must_use]
    pub fn new_graph_pool(&self) -> HostGraphPool {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // No device allocator is at address 0, so this key belongs to no graph of Warpool.
        let id = MemPoolId { graph: number as u32, user: (number >> 32) as u32 };
        HostGraphPool { pool: self.shared().graph_pools.get((0, DeviceId(0), id)) }
    }

    /// Pinned memory for a capture. A block that the capture uses stays in the pool; one that is freed unused serves
    /// the pool's next request. The use itself has to be [recorded](Self::record_graph_use_within).
    pub fn allocate_in(&self, bytes: u64, pool: &HostGraphPool) -> Result<HostBlock> {
        self.instance().expect_own_process("allocate")?;
        if bytes == 0 {
            return Ok(HostBlock::empty());
        }
        self.shared().allocate_in(bytes, &pool.pool)
    }

    /// Records that a capture uses the block that contains `ptr`: it is not reused before the pool is gone. Returns
    /// `false` if no allocated block contains it.
    pub fn record_graph_use_within(&self, ptr: HostPtr, pool: &HostGraphPool) -> Result<bool> {
        self.instance().expect_own_process("record_use")?;
        let found = self.shared().allocated_with(ptr);
        Ok(found.inspect(|block| pool.pool.add_used(block)).is_some())
    }
}

impl fmt::Debug for HostGraphPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pool.fmt(f)
    }
}
