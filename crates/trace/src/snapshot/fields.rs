//! Which fields a recording has. Versions of PyTorch differ in what they write.

/// The fields that a recording has. Older versions leave fields out; the reader fills in a default, which is no
/// evidence about the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedFields {
    /// There is a history.
    pub traces: bool,
    /// Every entry of the devices' history names its pool. PyTorch 2.11 does not write it.
    pub trace_pools: bool,
    /// Every entry has a time; else the missing ones are 0.
    pub times: bool,
    /// Every segment names its pool; else the missing ones are the default pool.
    pub segment_pools: bool,
    /// Every block has its requested size; else it comes from the block's history, or is the size of the block.
    pub requested_sizes: bool,
    /// Every block has an address; else it follows the block before it.
    pub block_addresses: bool,
}

impl RecordedFields {
    pub(crate) const ALL: Self = Self {
        traces: true,
        trace_pools: true,
        times: true,
        segment_pools: true,
        requested_sizes: true,
        block_addresses: true,
    };
}
