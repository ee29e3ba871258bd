//! Typed memory whose uses are recorded: a block, the order of its uses, and its label.
//!
//! It is shared by its vector and by the graphs that captured work on it, and freed with the last of them. The block's
//! destructor makes no driver call and does not wait: the allocator knows every stream that used it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use warpool_driver::{Address, DeviceId, DevicePtr, HostPtr};

use super::order::{Span, Uses};
use crate::error::BufferError;
use crate::memory::elastic::ElasticMemory;
use crate::memory::{DeviceBlock, HostBlock};
use crate::sync::try_lock;
use crate::{Instance, Result, Stream, lock};

/// The memory of one vector, and who uses it.
pub(super) struct Tracked {
    block: Block,
    uses: Mutex<Uses>,
    label: OnceLock<Box<str>>,
    /// Whether a stream other than its own may have used it.
    shared: AtomicBool,
    /// How many graphs use it.
    pub(super) graphs: AtomicU32,
    /// Pinned memory only: whether there may be uses that the host has not seen completed.
    pub(super) busy: AtomicBool,
    /// Pinned memory only: the number of host borrows that replays of graphs must respect; -1 is an exclusive one.
    /// Counted under the lock of the uses.
    pub(super) host_borrows: AtomicI32,
    /// Pinned memory only, with a driver that tracks accesses: whether the host may have written it since a stream used
    /// it last.
    pub(super) host_wrote: AtomicBool,
}

/// The block that holds the memory.
pub(super) enum Block {
    Device(DeviceBlock),
    /// Addresses of device memory, of which parts have memory.
    Elastic(Arc<ElasticMemory>),
    /// With the instance, because an empty block does not know its own.
    Pinned(HostBlock, Instance),
}

impl Tracked {
    /// Device memory. Earlier work of its stream may still use it.
    pub(super) fn device(block: DeviceBlock) -> Arc<Self> {
        let uses = Uses::allocated_for(block.device_id(), block.stream_id(), block.bytes());
        Self::new(Block::Device(block), uses, false)
    }

    /// Elastic memory. It is shared from the start, so that every use is recorded.
    pub(super) fn elastic_memory(memory: Arc<ElasticMemory>) -> Arc<Self> {
        let uses = Uses::allocated_for(memory.device_id(), memory.stream_id(), memory.bytes());
        Self::new(Block::Elastic(memory), uses, true)
    }

    /// Pinned memory, which no stream uses yet.
    pub(super) fn pinned(block: HostBlock, instance: Instance) -> Arc<Self> {
        Self::new(Block::Pinned(block, instance), Uses::of_host(), true)
    }

    fn new(block: Block, uses: Uses, shared: bool) -> Arc<Self> {
        Arc::new(Self {
            block,
            uses: Mutex::new(uses),
            label: OnceLock::new(),
            shared: AtomicBool::new(shared),
            graphs: AtomicU32::new(0),
            busy: AtomicBool::new(false),
            host_borrows: AtomicI32::new(0),
            host_wrote: AtomicBool::new(true),
        })
    }

    pub(super) fn instance(&self) -> &Instance {
        match &self.block {
            Block::Device(block) => block.instance(),
            Block::Elastic(memory) => memory.instance(),
            Block::Pinned(_, instance) => instance,
        }
    }

    /// Whether captured graphs use it.
    pub(super) fn is_in_graphs(&self) -> bool {
        self.graphs.load(Ordering::Acquire) > 0
    }

    /// Whether uses in its own stream need no record: no other stream has used it, and no graph uses it (replays borrow
    /// nothing).
    #[inline]
    pub(super) fn is_private(&self) -> bool {
        !self.shared.load(Ordering::Relaxed) && !self.is_in_graphs()
    }

    pub(super) fn block(&self) -> &Block {
        &self.block
    }

    /// Its address, if it is device memory.
    pub(super) fn device_ptr(&self) -> Option<DevicePtr> {
        match &self.block {
            Block::Device(block) => Some(block.ptr()),
            Block::Elastic(memory) => Some(memory.ptr()),
            Block::Pinned(..) => None,
        }
    }

    /// Its device; `None` for pinned memory.
    pub(super) fn device_id(&self) -> Option<DeviceId> {
        match &self.block {
            Block::Device(block) => Some(block.device_id()),
            Block::Elastic(memory) => Some(memory.device_id()),
            Block::Pinned(..) => None,
        }
    }

    /// The address `offset` bytes from its start.
    pub(super) fn address(&self, offset: u64) -> Address {
        match &self.block {
            Block::Device(block) => block.ptr().offset(offset).into(),
            Block::Elastic(memory) => memory.ptr().offset(offset).into(),
            Block::Pinned(block, _) => block.ptr().offset(offset).into(),
        }
    }

    /// The address of pinned memory.
    pub(super) fn host_ptr(&self) -> HostPtr {
        match &self.block {
            Block::Pinned(block, _) => block.ptr(),
            Block::Device(_) | Block::Elastic(_) => unreachable!("device memory has no address of the host"),
        }
    }

    /// The elastic memory.
    pub(super) fn elastic(&self) -> &ElasticMemory {
        match &self.block {
            Block::Elastic(memory) => memory,
            Block::Device(_) | Block::Pinned(..) => unreachable!("only elastic vectors ask for it"),
        }
    }

    /// Locks its uses. Inside a host callback this fails with the driver's error instead of waiting for the thread that
    /// runs the callback.
    pub(super) fn lock_uses(&self) -> Result<MutexGuard<'_, Uses>> {
        if let Some(uses) = try_lock(&self.uses) {
            return Ok(uses);
        }
        self.instance().driver().current_device()?;
        Ok(lock(&self.uses))
    }

    /// Locks its uses, if no other thread has them locked.
    pub(super) fn uses_if_unlocked(&self) -> Option<MutexGuard<'_, Uses>> {
        try_lock(&self.uses)
    }

    /// Waits until no thread has its uses locked. The caller must hold neither frozen captures nor locks of other
    /// buffers.
    pub(super) fn wait_until_unlocked(&self) -> Result<()> {
        self.lock_uses().map(drop)
    }

    /// As [`lock_uses`](Self::lock_uses), but fails if work on it is being enqueued.
    pub(super) fn try_lock_uses(&self) -> Result<MutexGuard<'_, Uses>> {
        let being_queued = || BufferError::BeingQueued { buffer: self.name() }.into();
        try_lock(&self.uses).ok_or_else(being_queued)
    }

    /// Prepares a use in `stream` before it is enqueued: the stream waits for conflicting uses, and its use is recorded
    /// with the allocator.
    #[inline]
    pub(super) fn prepare(&self, uses: &mut Uses, stream: &Stream, span: Span) -> Result<()> {
        if uses.has_other_streams(stream.id()) {
            self.wait_for_others(uses, stream, span)?;
        }
        if uses.is_new_stream(stream.id()) {
            self.record_stream(uses, stream)?;
        }
        if let Block::Pinned(block, _) = &self.block {
            let borrows = self.host_borrows.load(Ordering::Acquire);
            if borrows < 0 || (span.write && borrows > 0) {
                return Err(BufferError::BorrowedByHost { buffer: self.name() }.into());
            }
            self.busy.store(true, Ordering::Release);
            self.report_host_writes(block)?;
        }
        Ok(())
    }

    fn wait_for_others(&self, uses: &mut Uses, stream: &Stream, span: Span) -> Result<()> {
        if !self.shared.load(Ordering::Relaxed) {
            self.share(uses)?;
        }
        uses.wait_for_others(stream, span, &|| self.name())
    }

    /// Called when a second stream is about to use it. From now on uses in its own stream are recorded too.
    ///
    /// Pairs with the fence in [`Buffer::shared_meanwhile`](super::buffer::Buffer::shared_meanwhile): an operation on
    /// another thread that has not seen this has already enqueued its work, so the event that is recorded next in its
    /// stream comes after that work. For replays, the lock in [`SoleStream`](super::sole_stream::SoleStream) ensures
    /// the same.
    #[cold]
    fn share(&self, uses: &mut Uses) -> Result<()> {
        uses.end_sole_streams(self.instance())?;
        self.shared.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Ok(())
    }

    #[cold]
    fn record_stream(&self, uses: &mut Uses, stream: &Stream) -> Result<()> {
        match &self.block {
            Block::Device(_) if crate::defect::Defect::TypedDropForgetsStreams.is_on() => {}
            Block::Device(block) => block.record_use(stream)?,
            // Decommits are ordered after all uses: only the drop has to know the streams.
            Block::Elastic(_) => {}
            Block::Pinned(block, _) => block.record_use(stream)?,
        }
        uses.add_stream(stream.id());
        Ok(())
    }

    /// A driver that tracks accesses does not see host accesses through references; they are reported before the next
    /// use.
    fn report_host_writes(&self, block: &HostBlock) -> Result<()> {
        if !self.instance().detects_hazards() || !self.host_wrote.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let mut bytes = vec![0; usize::try_from(block.bytes()).expect("it is in memory")];
        block.read(0, &mut bytes)?;
        block.write(0, &bytes)
    }

    pub(super) fn set_label(&self, label: &str) {
        if self.label.set(label.into()).is_err() {
            return;
        }
        let (ptr, bytes) = match &self.block {
            Block::Device(block) => (block.ptr(), block.bytes()),
            Block::Elastic(memory) => return memory.set_label(label),
            Block::Pinned(block, _) => (DevicePtr(block.ptr().0), block.bytes()),
        };
        self.instance().driver().label_memory(ptr, bytes, label);
    }

    pub(super) fn label(&self) -> Option<&str> {
        self.label.get().map(|label| &**label)
    }

    /// Its label, or what it is, for messages.
    pub(super) fn name(&self) -> String {
        let kind = match &self.block {
            Block::Device(_) => "device memory",
            Block::Elastic(_) => "elastic memory",
            Block::Pinned(..) => "pinned memory",
        };
        match self.label() {
            Some(label) => format!("{kind} {label:?}"),
            None => format!("{kind} without a label"),
        }
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if let Block::Elastic(memory) = &self.block {
            let uses = self.uses.get_mut().unwrap_or_else(PoisonError::into_inner);
            // It fails only for memory that does not exist.
            let _ = memory.record_uses(uses.recorded());
        }
    }
}

impl fmt::Debug for Tracked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.block {
            Block::Device(block) => write!(f, "{}: {block:?}", self.name()),
            Block::Elastic(memory) => write!(f, "{}: {memory:?}", self.name()),
            Block::Pinned(block, _) => write!(f, "{}: {block:?}", self.name()),
        }
    }
}
