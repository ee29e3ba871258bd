//! The keys of the objects in the heap. A key is never reused.

use slotmap::new_key_type;

new_key_type! {
    /// Identifies a block.
    pub(crate) struct BlockKey;
    /// Identifies a segment.
    pub(crate) struct SegmentKey;
    /// Identifies a block pool.
    pub(crate) struct BlockPoolKey;
    /// Identifies the blocks of one stream in one block pool.
    pub(crate) struct StreamBlocksKey;
}
