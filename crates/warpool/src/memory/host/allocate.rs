//! How a block is allocated, used and freed.
//!
//! The hot path is [`Shared::allocate`] if the thread's front cache has a block, and [`Shared::free_now`] if no flag of
//! the block is set: one lock each, no driver call, and no counter that threads share.

use std::sync::Arc;

use warpool_driver::{DeviceId, DriverError, ErrorCode};

use super::block::{HAS_STACK, PinnedBlock, PinnedState, USED};
use super::front_cache::Kind;
use super::graph_pool::{CapturedHostPools, GraphHostPool};
use super::history::{Details, HOST};
use super::size_class::{BYTES_MAX, Fit};
use super::{HostBlock, Shared};
use crate::capture::CaptureRecord;
use crate::error::GraphError;
use crate::memory::{Action, CaptureMemory, StackLevel};
use crate::{Error, Result, Stream, lock};

impl Shared {
    #[inline]
    pub(super) fn allocate(self: &Arc<Self>, bytes: u64, device: Option<DeviceId>) -> Result<HostBlock> {
        if bytes == 0 {
            return Ok(HostBlock::empty());
        }
        match self.allocate_cached(bytes, device) {
            Some(block) => Ok(block),
            None => self.allocate_general(bytes, device),
        }
    }

    /// A block of the thread's front cache, if no other work is due.
    #[inline]
    pub(super) fn allocate_cached(&self, bytes: u64, device: Option<DeviceId>) -> Option<HostBlock> {
        if !(1..=BYTES_MAX).contains(&bytes) || !self.history.is_off() || self.instance.is_inherited() {
            return None;
        }
        let home = self.front.of_thread();
        let fit = || Fit::of(bytes, device, self.limits.round_max());
        let block = match device {
            None => self.front.take_recent_or(home, bytes, fit)?,
            Some(_) => self.front.take(home, &fit())?,
        };
        block.set_allocated(home, bytes);
        Some(HostBlock::new(block))
    }

    /// The general path: the thread's front cache has no block, or the request is recorded in the history.
    #[cold]
    fn allocate_general(self: &Arc<Self>, bytes: u64, device: Option<DeviceId>) -> Result<HostBlock> {
        self.instance.expect_own_process("allocate")?;
        let fit = self.fit(bytes, device)?;
        let details = self.details(StackLevel::State);
        let home = self.front.of_thread();
        let found = self.find(home, &fit, &details);
        let block = found.map(|block| self.hand_out(block, home, bytes, &details));
        details.finish();
        block
    }

    /// Memory for work on `stream`, from the graph's pool if the stream is capturing.
    pub(super) fn allocate_on(self: &Arc<Self>, bytes: u64, stream: &Stream) -> Result<HostBlock> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        self.instance.expect_own_process("allocate")?;
        let capture = match self.instance.captures().find(stream) {
            Ok(capture) => capture,
            // Handled when the use is recorded.
            Err(Error::Graph(GraphError::ForeignCapture)) => None,
            Err(error) => return Err(error),
        };
        let Some(capture) = capture.filter(|_| bytes > 0) else { return self.allocate(bytes, None) };
        self.allocate_in(bytes, &self.graph_pool(&capture.record))
    }

    /// Memory from a graph's pool.
    pub(super) fn allocate_in(self: &Arc<Self>, bytes: u64, pool: &GraphHostPool) -> Result<HostBlock> {
        let fit = self.fit(bytes, None)?;
        let details = self.details(StackLevel::State);
        let home = self.front.of_thread();
        let found = match pool.take(&fit) {
            Some(block) => {
                self.front.count_allocated(home, block.size());
                Ok(block)
            }
            None => self.find(home, &fit, &details).inspect(|block| pool.adopt(block)),
        };
        let block = found.map(|block| self.hand_out(block, home, bytes, &details));
        details.finish();
        block
    }

    /// The pool of the graph that is being captured, which keeps it.
    fn graph_pool(&self, record: &CaptureRecord) -> Arc<GraphHostPool> {
        let memory = CaptureMemory::of(record);
        let pool = self.graph_pools.get((Arc::as_ptr(&memory.allocator).addr(), record.device, memory.pool));
        record.with(|pools: &mut CapturedHostPools| pools.add(&pool));
        pool
    }

    #[inline]
    fn fit(&self, bytes: u64, device: Option<DeviceId>) -> Result<Fit> {
        if bytes > BYTES_MAX {
            return Err(Error::PinnedRequestTooLarge { bytes });
        }
        Ok(Fit::of(bytes, device, self.limits.round_max()))
    }

    /// A block, counted as allocated by the front cache `home`.
    #[inline]
    fn find(self: &Arc<Self>, home: usize, fit: &Fit, details: &Details) -> Result<Arc<PinnedBlock>> {
        match self.front.take(home, fit) {
            Some(block) => Ok(block),
            None => self.find_slow(home, fit, details),
        }
    }

    /// The slow path, if the thread's cache has no block. Processes pending frees. Then searches the thread's shard of
    /// the heap, the caches of other threads, and the other shards. Repeats the search after merging the blocks of the
    /// thread's cache, then those of all caches. At last pins a segment.
    #[cold]
    fn find_slow(self: &Arc<Self>, home: usize, fit: &Fit, details: &Details) -> Result<Arc<PinnedBlock>> {
        self.background.start(self);
        self.pin_reserve(home, details);
        // An error in some stream is ignored if there is memory. If there is none, the error may be the cause: blocks
        // that wait for the stream are not free.
        let processed = self.process_pending_recorded(details);
        if let Some(block) = self.front.take(home, fit) {
            return Ok(block);
        }
        let found = self.heap.take(home, fit, self);
        let found = found.or_else(|| self.front.take_from_others(home, fit));
        let found = found.or_else(|| self.heap.take_from_others(home, fit, self));
        let found = found.or_else(|| {
            let helpful = self.helpful_to(fit);
            self.merge(&self.front.drain_one(home, helpful));
            self.heap.take(home, fit, self).or_else(|| {
                for blocks in self.front.drain(helpful) {
                    self.merge(&blocks);
                }
                self.heap.take_from_all(home, fit, self)
            })
        });
        let block = match found {
            Some(block) => block,
            None => {
                let pinned = self.pin_or_relieve(home, fit, details);
                pinned.map_err(|error| processed.err().unwrap_or(error))?
            }
        };
        self.front.count_allocated(home, block.size());
        Ok(block)
    }

    /// The kind of cached blocks whose merging may produce a free range for the request.
    fn helpful_to(&self, fit: &Fit) -> Kind {
        // Small and large requests share only the reserved segment.
        if self.heap.has_reserve() {
            Kind::All
        } else if fit.is_small() {
            Kind::Small
        } else {
            Kind::Large
        }
    }

    /// Pins a segment. If there is no memory, calls the pressure callbacks and tries once more.
    fn pin_or_relieve(self: &Arc<Self>, home: usize, fit: &Fit, details: &Details) -> Result<Arc<PinnedBlock>> {
        match self.pin_block(home, fit, details) {
            Err(error) if is_shortage(&error) && self.history.observers().run_pressure_callbacks(HOST) => {
                self.process_pending_recorded(details)?;
                self.empty_front_caches();
                if let Some(block) = self.heap.take_from_all(home, fit, self) {
                    return Ok(block);
                }
                self.pin_block(home, fit, details)
            }
            outcome => outcome,
        }
    }

    #[inline]
    fn hand_out(&self, block: Arc<PinnedBlock>, home: usize, bytes: u64, details: &Details) -> HostBlock {
        block.set_allocated(home, bytes);
        if !details.is_off() {
            if let Some(stack) = &details.stack {
                lock(&block.usage).stack = Some(Arc::clone(stack));
                block.set_flag(HAS_STACK);
            }
            self.history.record(Action::Alloc, block.ptr(), bytes, details);
        }
        HostBlock::new(block)
    }

    /// Records that `stream` uses a block.
    pub(super) fn record_use(block: &Arc<PinnedBlock>, stream: &Stream) -> Result<()> {
        let shared = block.shared();
        shared.instance.expect_same(stream.instance(), "the stream")?;
        shared.instance.expect_own_process("record_use")?;
        match shared.instance.captures().find(stream) {
            Ok(Some(capture)) => shared.graph_pool(&capture.record).add_used(block),
            // An invalidated capture makes no graph, but work that was in the stream before it may still run.
            Ok(None) | Err(Error::Driver(DriverError { code: ErrorCode::StreamCaptureInvalidated, .. })) => {
                lock(&block.usage).streams.add(stream.id());
            }
            Err(Error::Graph(GraphError::ForeignCapture)) => {
                let ptr = block.ptr();
                tracing::warn!(
                    %stream,
                    ptr = format_args!("{ptr:#x}"),
                    "pinned memory used by a capture begun without Warpool is never reused"
                );
                lock(&block.usage).in_foreign_graph = true;
            }
            Err(error) => return Err(error),
        }
        block.set_flag(USED);
        Ok(())
    }

    /// Frees a block, with driver calls if it needs any.
    pub(super) fn free(block: Arc<PinnedBlock>) -> Result<()> {
        // The state is borrowed from the block, which is passed on. Cloning the block's `Arc` is uncontended, unlike
        // the state's.
        let keep = Arc::clone(&block);
        keep.shared().free_own(block)
    }

    /// As [`free`](Self::free), for a block of this allocator.
    #[inline]
    pub(super) fn free_own(&self, block: Arc<PinnedBlock>) -> Result<()> {
        if self.instance.is_inherited() {
            return Ok(());
        }
        match self.free_now(block) {
            Err(error) if lock(&self.settings).free_catch_all => {
                tracing::warn!(%error, "ignored while pinned memory was freed, because pinned_free_catch_all is set");
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Frees a block of this allocator into its front cache, if no other work is due. Otherwise returns the block, and
    /// nothing has changed.
    #[inline]
    pub(super) fn free_cached(&self, block: Arc<PinnedBlock>) -> std::result::Result<(), Arc<PinnedBlock>> {
        if block.flags() != 0 || !self.history.is_off() || self.instance.is_inherited() || !self.keeps(&block) {
            return Err(block);
        }
        block.set_state(PinnedState::Free);
        match self.front.free(block, true) {
            Ok(()) => Ok(()),
            Err(block) => {
                self.merge_cold(block);
                Ok(())
            }
        }
    }

    /// The front cache has no room for a block that is to be kept.
    #[cold]
    fn merge_cold(&self, block: Arc<PinnedBlock>) {
        self.merge(&[block]);
    }

    #[inline]
    fn free_now(&self, block: Arc<PinnedBlock>) -> Result<()> {
        if block.flags() == 0 && self.history.is_off() {
            return if self.put_back(block) { self.unpin_listed_now() } else { Ok(()) };
        }
        self.free_unusual(block)
    }

    /// Frees a block that streams or graphs used, or that is recorded.
    #[cold]
    fn free_unusual(&self, block: Arc<PinnedBlock>) -> Result<()> {
        let details = self.details(StackLevel::All);
        let outcome = if self.begin_free(&block, &details) {
            self.fence(block, &details).and_then(|()| self.process_pending_recorded(&details))
        } else {
            self.complete_free(block, &details);
            self.unpin_listed(&mut 0, &details)
        };
        details.finish();
        outcome
    }

    #[cold]
    fn unpin_listed_now(&self) -> Result<()> {
        let details = self.details(StackLevel::All);
        let outcome = self.unpin_listed(&mut 0, &details);
        details.finish();
        outcome
    }

    /// Frees a block in a destructor. Driver calls are left to the next call.
    #[inline(never)]
    pub(super) fn free_later(block: Arc<PinnedBlock>) {
        let keep = Arc::clone(&block);
        let shared = keep.shared();
        if shared.instance.is_inherited() {
            return;
        }
        if block.flags() == 0 && shared.history.is_off() {
            shared.put_back(block);
        } else {
            shared.free_unusual_later(block);
        }
    }

    #[cold]
    fn free_unusual_later(&self, block: Arc<PinnedBlock>) {
        let details = self.details(StackLevel::All);
        if self.begin_free(&block, &details) {
            self.fence_later(block, &details);
        } else {
            self.complete_free(block, &details);
        }
        details.finish();
    }

    /// First half of a free that is not on the hot path. Returns whether the block must wait.
    fn begin_free(&self, block: &PinnedBlock, details: &Details) -> bool {
        self.history.record_free(Action::FreeRequested, block, details);
        let waits = block.flags() & USED != 0 && !crate::defect::Defect::HostReusesBeforeCopy.is_on();
        if waits {
            block.set_state(PinnedState::PendingFree);
            lock(&block.usage).streams.mark_freed();
        }
        waits
    }
}

/// Whether more memory would help.
fn is_shortage(error: &Error) -> bool {
    match error {
        Error::PinnedCap(_) => true,
        Error::Driver(error) => error.is_out_of_memory(),
        _ => false,
    }
}
