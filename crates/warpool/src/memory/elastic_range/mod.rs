//! Elastic memory in addresses and ids: the trait that an allocator implements, and which slots its blocks need.

mod blocks;

use std::ops::Range;
use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use crate::memory::MemPoolId;
use crate::{Error, Result};

pub(crate) use blocks::{ElasticBlocks, ElasticChange};

/// More addresses than this are refused: devices have 47 bits of them.
const BYTES_MAX: u64 = 1 << 46;

/// More blocks are refused: each takes memory of the host.
const BLOCKS_MAX: u64 = 1 << 28;

/// Where the blocks of elastic memory are: block `b` has `block_bytes` bytes in each row `r`, at
/// `(r * blocks + b) * block_bytes`.
///
/// A tensor of shape `(a, b, blocks, c, d)` has `a * b` rows, and blocks of `c * d` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElasticLayout {
    /// How many rows there are; 1 if blocks are contiguous.
    pub rows: u64,
    /// How many blocks there are.
    pub blocks: u64,
    /// The bytes of a block in one row.
    pub block_bytes: u64,
}

impl ElasticLayout {
    /// The bytes of all addresses.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.rows * self.blocks * self.block_bytes
    }

    /// The smallest number of blocks that fill whole pages of `page_bytes`. Ranges that begin and end at multiples of
    /// it share no page with other blocks, so that decommitting them returns all of their memory. `None` if there is
    /// no such number: the rows begin in the middle of pages.
    ///
    /// ```
    /// # use warpool::memory::elastic::ElasticLayout;
    /// let layout = ElasticLayout { rows: 64, blocks: 4096, block_bytes: 32 << 10 };
    /// assert_eq!(layout.blocks_per_page(2 << 20), Some(64));
    /// ```
    #[must_use]
    pub fn blocks_per_page(&self, page_bytes: u64) -> Option<u64> {
        let common = gcd(self.block_bytes, page_bytes);
        let blocks = page_bytes / common;
        (self.rows == 1 || self.blocks.is_multiple_of(blocks)).then_some(blocks)
    }

    /// The bytes of some blocks in every row, as offsets.
    pub(crate) fn pieces(&self, blocks: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { rows, blocks: per_row, block_bytes } = *self;
        let Range { start, end } = *blocks;
        (0..rows).map(move |row| (row * per_row + start) * block_bytes..(row * per_row + end) * block_bytes)
    }

    /// Fails unless it has blocks, of some bytes, in less than the address space.
    pub(crate) fn check(&self) -> Result<()> {
        let bytes = self.rows.checked_mul(self.blocks).and_then(|blocks| blocks.checked_mul(self.block_bytes));
        match bytes {
            Some(0) => Err(Error::EmptyElastic),
            Some(_) if self.blocks > BLOCKS_MAX => {
                Err(Error::ElasticBlocks { start: 0, end: self.blocks, blocks: BLOCKS_MAX })
            }
            Some(bytes) if bytes <= BYTES_MAX => Ok(()),
            _ => Err(Error::RequestTooLarge { bytes: bytes.unwrap_or(u64::MAX) }),
        }
    }

    /// Fails unless these are blocks of it.
    pub(crate) fn check_blocks(&self, blocks: &Range<u64>) -> Result<()> {
        let Range { start, end } = *blocks;
        if start <= end && end <= self.blocks {
            Ok(())
        } else {
            Err(Error::ElasticBlocks { start, end, blocks: self.blocks })
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A reserved range of elastic memory, as plain data. It owns nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElasticRange {
    /// The device.
    pub device: DeviceId,
    /// The stream that it was reserved for.
    pub stream: StreamId,
    /// Names it: statistics and snapshots show its memory as that of this pool, which serves no requests.
    pub pool: MemPoolId,
    /// Its first address.
    pub ptr: DevicePtr,
    /// Where its blocks are.
    pub layout: ElasticLayout,
    /// The largest page of its memory. None lies across a multiple of this.
    pub page_bytes: u64,
}

/// Elastic memory of an allocator, by plain data, for C interfaces.
/// [`ElasticMemory`](super::elastic::ElasticMemory) is the owning form, and documents the calls.
pub trait ElasticRanges: Send + Sync {
    /// Reserves addresses, without memory. The stream must exist until [`release`](Self::release).
    fn reserve(&self, device: DeviceId, stream: StreamId, layout: ElasticLayout) -> Result<ElasticRange>;

    /// Commits blocks.
    fn commit(&self, range: &ElasticRange, stream: StreamId, blocks: Range<u64>) -> Result<()>;

    /// Decommits blocks.
    fn decommit(&self, range: &ElasticRange, stream: StreamId, blocks: Range<u64>) -> Result<()>;

    /// How many blocks are committed; 0 if the range was released.
    fn committed(&self, range: &ElasticRange) -> u64;

    /// The blocks that are committed, in runs.
    fn committed_blocks(&self, range: &ElasticRange) -> Vec<Range<u64>>;

    /// Whether all of these blocks are committed.
    fn is_committed(&self, range: &ElasticRange, blocks: Range<u64>) -> bool;

    /// Returns the pages of decommitted blocks to the driver, once the work that used them is done: it waits for that.
    /// Returns how many bytes.
    fn vacate(&self, range: &ElasticRange) -> Result<u64>;

    /// Commits or decommits blocks although it sleeps. No user code is called, but what a trim calls.
    #[doc(hidden)]
    fn change_asleep(&self, range: &ElasticRange, stream: StreamId, blocks: Range<u64>, commit: bool) -> Result<()>;

    /// Sets the tag that it sleeps with, if any: commits and decommits fail with it from here on.
    #[doc(hidden)]
    fn set_asleep(&self, range: &ElasticRange, tag: Option<&Arc<str>>);

    /// Returns the memory and the addresses. Makes no driver call. A second call does nothing.
    fn release(&self, range: &ElasticRange);

    /// The bytes that could be committed on a device now.
    fn headroom(&self, device: DeviceId) -> Result<u64>;
}
