//! How a device's memory is used, by pool and stream: what can be read often, beside a running program.

use super::{PageStats, Stats};
use crate::memory::MemPoolId;

/// How a device's memory is used now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The statistics, except `inactive_split` and `inactive_split_bytes`, which are 0: the paged allocator changes
    /// their peaks when they are read.
    pub stats: Stats,
    /// Those of pages, if the allocator is the paged one.
    pub pages: Option<PageStats>,
    /// Bytes that may be reserved, if that is limited.
    pub bytes_limit: Option<u64>,
    /// Memory by pool and stream, in no particular order; a pair may come more than once. Empty if the allocator does
    /// not know.
    pub parts: Vec<UsagePart>,
}

/// Memory of one stream in one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UsagePart {
    /// The pool.
    pub pool: MemPoolId,
    /// The stream, by the driver's handle.
    pub stream: u64,
    /// Bytes of blocks, also of free ones. Those of memory that is asleep, too.
    pub bytes_reserved: u64,
    /// Bytes of allocated blocks.
    pub bytes_allocated: u64,
    /// Bytes of allocated blocks and of pending frees.
    pub bytes_active: u64,
    /// Bytes of committed elastic memory.
    pub bytes_elastic: u64,
}
