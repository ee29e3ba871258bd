//! [`ElasticVec`]: device memory with an element type at addresses that never change, of which blocks come and go.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};
use std::panic::Location;
use std::sync::Arc;

use bytemuck::Pod;
use warpool_driver::DevicePtr;

use super::buffer::Buffer;
use super::device_vec::byte_count;
use super::submit::{Reach, submit};
use super::view::{Part, View, ViewMut};
use crate::error::BufferError;
use crate::memory::SharedAllocator;
use crate::memory::elastic::{ElasticLayout, ElasticMemory};
use crate::memory::sleep::Tag;
use crate::{Device, Error, Result, Stream};

/// Blocks of elements at fixed addresses: those that are committed have memory. See
/// [`memory::elastic`](crate::memory::elastic).
///
/// Views are of committed blocks alone. Commits and decommits are ordered with other uses like any work on typed
/// memory: before a block leaves, the stream of the decommit waits for what uses it in other streams.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool::driver::sim::{SimConfig, SimDriver};
/// # use warpool::prelude::*;
/// use warpool::ElasticVec;
/// use warpool::memory::PagedAllocator;
///
/// # fn main() -> warpool::Result<()> {
/// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// # let device = instance.device(0)?;
/// # let stream = device.lease_stream()?;
/// let allocator = Arc::new(PagedAllocator::new(&instance, Settings::default())?);
/// let mut cache = ElasticVec::<f32>::new(&allocator, 1000, 1 << 19, &stream)?; // 1,000 blocks of 2 MiB
/// cache.commit(0..3, &stream)?;
/// stream.fill(cache.block_mut(2)?, 1.5)?;
/// assert_eq!(stream.to_vec(cache.block(2)?.slice(..2)?)?, [1.5; 2]);
/// cache.decommit(1..3, &stream)?;
/// assert!(cache.block(2).is_err() && cache.committed() == 1);
/// # Ok(())
/// # }
/// ```
pub struct ElasticVec<T> {
    buffer: Buffer,
    block_len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> ElasticVec<T> {
    /// Addresses of `blocks` blocks with `block_len` elements each, for work that begins in `stream`, which must exist
    /// as long as this. [`Error::Unsupported`] unless the allocator is a
    /// [`PagedAllocator`](crate::memory::PagedAllocator).
    pub fn new(allocator: &impl SharedAllocator, blocks: usize, block_len: usize, stream: &Stream) -> Result<Self> {
        let memory = ElasticMemory::new(allocator, layout::<T>(blocks, block_len)?, stream)?;
        Ok(Self { buffer: Buffer::elastic(Arc::new(memory)), block_len, elements: PhantomData })
    }

    /// The same, as memory that sleeps and wakes with a tag.
    pub fn tagged(tag: &Tag, blocks: usize, block_len: usize, stream: &Stream) -> Result<Self> {
        let memory = tag.elastic(layout::<T>(blocks, block_len)?, stream)?;
        Ok(Self { buffer: Buffer::elastic(memory), block_len, elements: PhantomData })
    }

    /// Gives it a name, for errors and for hazard reports of the simulated GPU. Only the first name is used.
    #[must_use]
    pub fn with_label(self, label: &str) -> Self {
        self.buffer.set_label(label);
        self
    }

    /// Its name.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.buffer.label()
    }

    fn memory(&self) -> &ElasticMemory {
        self.buffer.tracked().elastic()
    }

    /// How many blocks it has.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "it was given as usize")]
    pub fn blocks(&self) -> usize {
        self.memory().layout().blocks as usize
    }

    /// How many elements a block has.
    #[must_use]
    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// How many elements it has, with and without memory.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks() * self.block_len
    }

    /// Whether it has no elements: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many blocks are committed.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "not more than all of them")]
    pub fn committed(&self) -> usize {
        self.memory().committed() as usize
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::from_id(self.buffer.instance(), self.memory().device_id())
    }

    /// Its first address, for kernels that find blocks by themselves. Nothing is known of what they do: order their
    /// work before a decommit of the blocks that they use.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.memory().ptr()
    }

    /// Gives memory to those of these blocks that have none, for work in `stream`. Their contents are undefined until
    /// they are written. It is complete or changes nothing.
    #[track_caller]
    pub fn commit(&mut self, blocks: Range<usize>, stream: &Stream) -> Result<()> {
        self.memory().commit(blocks.start as u64..blocks.end as u64, stream)?;
        // Later uses in other streams are after it.
        self.use_in(blocks, stream)
    }

    /// Takes the memory of those of these blocks that have some: `stream` waits for work in other streams that uses
    /// them. [`BufferError::ElasticInGraph`] if a graph has captured work on views of any block.
    #[track_caller]
    pub fn decommit(&mut self, blocks: Range<usize>, stream: &Stream) -> Result<()> {
        let tracked = self.buffer.tracked();
        if tracked.is_in_graphs() {
            return Err(BufferError::ElasticInGraph { buffer: tracked.name() }.into());
        }
        if stream.is_capturing()? {
            return Err(Error::ElasticInCapture { stream: stream.id() });
        }
        self.use_in(blocks.clone(), stream)?;
        self.memory().decommit(blocks.start as u64..blocks.end as u64, stream)
    }

    /// Makes `stream` wait for what uses the blocks in other streams, and records a use in it that later ones wait for.
    #[track_caller]
    fn use_in(&mut self, blocks: Range<usize>, stream: &Stream) -> Result<()> {
        let line = Location::caller();
        self.memory().layout().check_blocks(&(blocks.start as u64..blocks.end as u64))?;
        let (len, elements) = (self.len(), blocks.start * self.block_len..blocks.end * self.block_len);
        let part = Part::<T>::exclusive(&mut self.buffer, len).sub(elements)?;
        submit(stream, &[Some(part.access(true))], Reach::OwnDevice, line, &mut || Ok(()))
    }

    /// Whether all of these blocks are committed.
    #[must_use]
    pub fn is_committed(&self, blocks: Range<usize>) -> bool {
        self.memory().is_committed(blocks.start as u64..blocks.end as u64)
    }

    /// Shared access to a block. [`BufferError::NotCommitted`] if it has no memory.
    pub fn block(&self, block: usize) -> Result<View<'_, T>> {
        self.slice(self.elements_of(block)?)
    }

    /// Exclusive access to a block.
    pub fn block_mut(&mut self, block: usize) -> Result<ViewMut<'_, T>> {
        self.slice_mut(self.elements_of(block)?)
    }

    /// Shared access to elements of committed blocks.
    pub fn slice(&self, elements: impl RangeBounds<usize>) -> Result<View<'_, T>> {
        let elements = self.committed_elements(elements)?;
        Ok(View { part: Part::shared(&self.buffer, self.len()).sub(elements)? })
    }

    /// Exclusive access to elements of committed blocks.
    pub fn slice_mut(&mut self, elements: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>> {
        let (len, elements) = (self.len(), self.committed_elements(elements)?);
        Ok(ViewMut { part: Part::exclusive(&mut self.buffer, len).sub(elements)? })
    }

    fn elements_of(&self, block: usize) -> Result<Range<usize>> {
        self.memory().layout().check_blocks(&(block as u64..block as u64 + 1))?;
        Ok(block * self.block_len..(block + 1) * self.block_len)
    }

    /// The elements, if their blocks are committed, or if they do not lie in it, which the view refuses.
    fn committed_elements(&self, elements: impl RangeBounds<usize>) -> Result<Range<usize>> {
        let start = match elements.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match elements.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.len(),
        };
        if start < end && end <= self.len() {
            let blocks = start / self.block_len..end.div_ceil(self.block_len);
            if !self.is_committed(blocks.clone()) {
                let buffer = self.buffer.tracked().name();
                return Err(BufferError::NotCommitted { buffer, start: blocks.start, end: blocks.end }.into());
            }
        }
        Ok(start..end)
    }
}

fn layout<T: Pod>(blocks: usize, block_len: usize) -> Result<ElasticLayout> {
    let too_large = || Error::RequestTooLarge { bytes: u64::MAX };
    byte_count::<T>(blocks.checked_mul(block_len).ok_or_else(too_large)?)?;
    Ok(ElasticLayout { rows: 1, blocks: blocks as u64, block_bytes: byte_count::<T>(block_len)? })
}

impl<T: Pod> fmt::Debug for ElasticVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks of {} elements in {:?}", self.blocks(), self.block_len, self.buffer)
    }
}
