//! How many objects of each kind there are.

/// How many objects of each kind there are. A program without leaks ends with the counts that it began with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectCounts {
    /// Streams that were created or adopted, without default streams.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Ids of physical memory.
    pub physical: usize,
    /// Reserved address ranges.
    pub reservations: usize,
    /// Mappings of physical memory into them.
    pub mappings: usize,
    /// Registered ranges ([`SimDriver::register_memory`](super::SimDriver::register_memory)).
    pub registrations: usize,
    /// Allocations, plain ones and those of pools.
    pub allocations: usize,
    /// Pools, without default pools.
    pub pools: usize,
    /// Pinned ranges of host memory.
    pub pinned: usize,
    /// Pinned host memory, in bytes.
    pub bytes_pinned: u64,
    /// Captured graphs.
    pub graphs: usize,
    /// Executable graphs.
    pub graph_execs: usize,
    /// Loaded modules.
    pub modules: usize,
    /// Library handles.
    pub handles: usize,
    /// Captures that have not ended.
    pub captures: usize,
    /// Device memory in use on all devices, without the unused memory of pools.
    pub bytes_used: u64,
}
