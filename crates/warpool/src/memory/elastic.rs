//! Elastic memory: addresses that never change, and memory behind the parts that are in use.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::memory::elastic::{ElasticLayout, ElasticMemory, headroom};
//! use warpool::memory::{Allocate, PagedAllocator, Settings};
//!
//! # fn main() -> warpool::Result<()> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! let allocator = Arc::new(PagedAllocator::new(&instance, Settings::default())?);
//! let (device, stream) = (instance.device(0)?, instance.device(0)?.pool_stream()?);
//!
//! // 1,000 blocks of 2 MiB: addresses, no memory.
//! let layout = ElasticLayout { rows: 1, blocks: 1000, block_bytes: 2 << 20 };
//! let cache = ElasticMemory::new(&allocator, layout, &stream)?.with_label("kv");
//! assert_eq!(cache.committed(), 0);
//!
//! cache.commit(0..16, &stream)?; // work in this stream may use these blocks from now on
//! cache.decommit(8..16, &stream)?; // and these no longer
//! let activations = allocator.allocate(16 << 20, &stream)?; // they get the pages of the blocks that left
//! assert_eq!((cache.committed(), cache.committed_bytes()), (8, 16 << 20));
//! let more: u64 = headroom(&allocator, &device)?; // what could be committed now
//! # let _ = more;
//! # Ok(())
//! # }
//! ```
//!
//! A range is divided into *blocks*, the unit of commits. [`ElasticLayout`] says where a block is: once, or once in
//! each of several rows, as in a tensor of which one dimension counts the blocks. Its memory is made of pages of the
//! device's stock, as all memory of a [`PagedAllocator`](super::PagedAllocator): what is decommitted serves whoever
//! asks next, and what others have freed serves the next commit. Pages of blocks that were decommitted stay mapped
//! until somebody needs them, so that committing those blocks again makes no driver call.
//!
//! # Rules
//! - A commit is complete or changes nothing. [`Error::OutOfMemory`](crate::Error::OutOfMemory) has the report.
//! - Order is stream order: memory is there for work that is queued in the stream of the commit afterwards, and must
//!   not be used by work that is not ordered before the decommit. The contents of a block that was just committed are
//!   undefined.
//! - A page belongs to the range as long as a committed block touches it. Blocks that begin and end with pages share
//!   none ([`ElasticLayout::blocks_per_page`]).
//! - Addresses stay valid, in views, pointers and captured graphs. The use of a block that is not committed is an error
//!   that nobody sees on a GPU: it reads or writes memory of others, or ends the program with an illegal address. The
//!   simulated GPU reports it as a hazard.
//! - Neither call is allowed while its stream, or the stream of the reservation, is capturing.
//! - A commit calls no [pressure callbacks](super::report::Observers): it may be one that decommits.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{DeviceAllocator, MemPoolId, SharedAllocator};
use crate::{Device, Instance, Result, Stream};

pub use super::elastic_range::{ElasticLayout, ElasticRange, ElasticRanges};

/// Memory at fixed addresses that is committed and decommitted in blocks. See the [module](self).
///
/// Dropping it returns its memory without a driver call; the addresses serve others once all work in its stream, and in
/// those whose use was [recorded](Self::record_use), is done. If its stream is another library's, which may be
/// destroyed by then, that is after the next wait for all work of the device: [`close`](Self::close) spares that wait.
pub struct ElasticMemory {
    allocator: Arc<dyn DeviceAllocator>,
    range: ElasticRange,
    label: OnceLock<Box<str>>,
    is_asleep: AtomicBool,
}

impl ElasticMemory {
    /// Reserves addresses for work in `stream`, and for work in other streams that is ordered after a commit there.
    /// The stream must exist as long as this. [`Error::Unsupported`](crate::Error::Unsupported) if the allocator has no
    /// elastic memory: [`PagedAllocator`](super::PagedAllocator) has.
    pub fn new(allocator: &impl SharedAllocator, layout: ElasticLayout, stream: &Stream) -> Result<Self> {
        let allocator = allocator.to_dyn();
        allocator.instance().expect_same(stream.instance(), "the stream")?;
        let range = allocator.elastic()?.reserve(stream.device_id(), stream.id(), layout)?;
        Ok(Self { allocator, range, label: OnceLock::new(), is_asleep: AtomicBool::new(false) })
    }

    /// Gives it a name, for hazard reports of the simulated GPU. Only the first name is used.
    #[must_use]
    pub fn with_label(self, label: &str) -> Self {
        self.set_label(label);
        self
    }

    pub(crate) fn set_label(&self, label: &str) {
        if self.label.set(label.into()).is_ok() {
            self.report_label();
        }
    }

    /// Memory loses its name when an allocator gives it out again.
    fn report_label(&self) {
        if let Some(label) = self.label.get() {
            self.instance().driver().label_memory(self.ptr(), self.bytes(), label);
        }
    }

    /// Gives memory to those of these blocks that have none, for work that is queued in `stream` from now on.
    pub fn commit(&self, blocks: Range<u64>, stream: &Stream) -> Result<()> {
        self.instance().expect_same(stream.instance(), "the stream")?;
        self.elastic().commit(&self.range, stream.id(), blocks)?;
        self.report_label();
        Ok(())
    }

    /// Takes the memory of those of these blocks that have some, once the work that `stream` holds now is done. Work in
    /// other streams that uses them must be ordered before that.
    pub fn decommit(&self, blocks: Range<u64>, stream: &Stream) -> Result<()> {
        self.instance().expect_same(stream.instance(), "the stream")?;
        self.elastic().decommit(&self.range, stream.id(), blocks)
    }

    /// Decommits all, and drops it: as a drop, but its pages serve others without a wait for all work of the device.
    /// It is dropped even if that fails.
    pub fn close(self) -> Result<()> {
        let home = Stream::from_id(&Device::from_id(self.instance(), self.device_id()), self.stream_id());
        self.decommit(0..self.layout().blocks, &home)
    }

    /// Commits blocks or decommits them, although it sleeps.
    pub(super) fn change_asleep(&self, blocks: Range<u64>, stream: &Stream, commit: bool) -> Result<()> {
        self.elastic().change_asleep(&self.range, stream.id(), blocks, commit)?;
        self.report_label();
        Ok(())
    }

    /// Sets the tag that it sleeps with; `None` is awake.
    pub(super) fn set_asleep(&self, tag: Option<&Arc<str>>) {
        self.elastic().set_asleep(&self.range, tag);
        match (self.is_asleep.swap(tag.is_some(), Ordering::Relaxed), tag) {
            (false, Some(tag)) => self.instance().add_asleep(self.ptr().0, self.bytes(), tag),
            (true, None) => self.instance().remove_asleep(self.ptr().0),
            _ => {}
        }
    }

    /// Returns the pages of decommitted blocks to the driver. Returns how many bytes.
    pub(super) fn vacate(&self) -> Result<u64> {
        self.elastic().vacate(&self.range)
    }

    /// Returns cached memory of the allocator to the driver.
    pub(super) fn trim(&self) {
        if let Err(error) = self.allocator.trim(self.range.device, MemPoolId::DEFAULT) {
            tracing::warn!(%error, "cached memory could not be returned");
        }
    }

    /// The blocks that are committed, in runs.
    #[must_use]
    pub fn committed_blocks(&self) -> Vec<Range<u64>> {
        self.elastic().committed_blocks(&self.range)
    }

    /// Address and size of some blocks in every row.
    pub(super) fn pieces(&self, blocks: &Range<u64>) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (start, pieces) = (self.ptr().0, self.layout().pieces(blocks));
        pieces.map(move |piece| (start + piece.start, piece.end - piece.start))
    }

    /// Records that work in `stream` uses its memory without being ordered by commits and decommits there. The pages of
    /// decommitted blocks, and all when it is dropped, then serve others only after that stream's work, too.
    pub fn record_use(&self, stream: &Stream) -> Result<()> {
        self.instance().expect_same(stream.instance(), "the stream")?;
        self.record_uses(&[stream.id()])
    }

    pub(crate) fn record_uses(&self, streams: &[StreamId]) -> Result<()> {
        self.allocator.pools()?.record_pool_uses(self.range.device, self.range.pool, streams)
    }

    /// How many blocks are committed.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.elastic().committed(&self.range)
    }

    /// Whether all of these blocks are committed.
    #[must_use]
    pub fn is_committed(&self, blocks: Range<u64>) -> bool {
        self.elastic().is_committed(&self.range, blocks)
    }

    /// The bytes of the committed blocks. The pages that they touch may be more.
    #[must_use]
    pub fn committed_bytes(&self) -> u64 {
        self.committed() * self.layout().rows * self.layout().block_bytes
    }

    /// Its first address.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.range.ptr
    }

    /// The bytes of its addresses.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.range.layout.bytes()
    }

    /// Where its blocks are.
    #[must_use]
    pub fn layout(&self) -> ElasticLayout {
        self.range.layout
    }

    /// The largest page of its memory: [`ElasticLayout::blocks_per_page`] takes it. Blocks that are committed one by
    /// one get smaller pages, of 2 MiB at least; no page lies across a multiple of this.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.range.page_bytes
    }

    /// Its device.
    #[must_use]
    pub fn device_id(&self) -> DeviceId {
        self.range.device
    }

    /// The stream that it was reserved for.
    #[must_use]
    pub fn stream_id(&self) -> StreamId {
        self.range.stream
    }

    pub(crate) fn instance(&self) -> &Instance {
        self.allocator.instance()
    }

    fn elastic(&self) -> &dyn ElasticRanges {
        self.allocator.elastic().expect("it has reserved this range")
    }
}

impl Drop for ElasticMemory {
    fn drop(&mut self) {
        self.set_asleep(None);
        self.elastic().release(&self.range);
    }
}

impl fmt::Debug for ElasticMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ElasticLayout { blocks, .. } = self.layout();
        write!(f, "elastic memory of {blocks} blocks at {}, {} committed", self.ptr(), self.committed())
    }
}

/// The bytes that could be committed or allocated on a device now, in whole pages: what the driver has left within the
/// limits, and free pages of all heaps. Other programs and threads may take them before the next call does.
pub fn headroom(allocator: &impl SharedAllocator, device: &Device) -> Result<u64> {
    let allocator = allocator.to_dyn();
    allocator.instance().expect_same(device.instance(), "the device")?;
    allocator.elastic()?.headroom(device.id())
}
