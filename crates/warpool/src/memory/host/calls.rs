//! The life of a block: how it is found, given out, given back, and put away. What callers see of it is in `mod.rs` and
//! `block.rs`.
//!
//! The hot path is [`Shared::allocate`] when the thread's cache has a block, and [`Shared::free_now`] when nothing is
//! out of the ordinary: one lock each, no driver call, and no number that threads share.

use std::sync::Arc;

use warpool_driver::DeviceId;

use super::block::{BlockCell, POOLED, STACKED, Standing, USED};
use super::shard::{Cache, thread_number};
use super::size::{BYTES_MAX, Fit};
use super::{HostBlock, Shared};
use crate::memory::journal::Cause;
use crate::memory::{Action, StackLevel};
use crate::{Error, Result, lock};

impl Shared {
    /// Memory, from wherever there is some.
    #[inline]
    pub(super) fn allocate(self: &Arc<Self>, bytes: u64, device: Option<DeviceId>) -> Result<HostBlock> {
        if bytes == 0 {
            return Ok(HostBlock::empty());
        }
        let fit = self.fit(bytes)?;
        let cause = self.cause(StackLevel::State);
        let home = self.home();
        let cell = self.find(home, bytes, &fit, device, &cause)?;
        Ok(self.hand_out(cell, home, bytes, &cause))
    }

    /// What a request becomes.
    #[inline]
    pub(super) fn fit(&self, bytes: u64) -> Result<Fit> {
        if bytes > BYTES_MAX {
            return Err(Error::PinnedRequestTooLarge { bytes });
        }
        Ok(Fit::of(bytes, self.limits.round_max()))
    }

    /// The calling thread's cache.
    #[inline]
    pub(super) fn home(&self) -> usize {
        thread_number() as usize & (self.shards.len() - 1)
    }

    /// A block, counted as given out by `home`.
    #[inline]
    pub(super) fn find(
        self: &Arc<Self>,
        home: usize,
        bytes: u64,
        fit: &Fit,
        device: Option<DeviceId>,
        cause: &Cause,
    ) -> Result<Arc<BlockCell>> {
        let cached = lock(&self.shards[home].0).take(fit, device);
        match cached {
            Some(cell) => Ok(cell),
            None => self.find_slowly(home, bytes, fit, device, cause),
        }
    }

    /// The thread's cache has none. What waited may be done by now; then the heap is searched, then once more with what
    /// all caches had; at last more is pinned.
    #[cold]
    fn find_slowly(
        self: &Arc<Self>,
        home: usize,
        bytes: u64,
        fit: &Fit,
        device: Option<DeviceId>,
        cause: &Cause,
    ) -> Result<Arc<BlockCell>> {
        self.background.start(self);
        self.make_reserve(cause);
        // A stream whose work failed is no reason to refuse memory that there is.
        let looked_after = self.look_after();
        if let Some(cell) = lock(&self.shards[home].0).take(fit, device) {
            return Ok(cell);
        }
        let mut found = lock(&self.heap).take(fit, device, self);
        if found.is_none() {
            self.empty_shards();
            found = lock(&self.heap).take(fit, device, self);
        }
        let cell = match found {
            Some(cell) => cell,
            // Nor one to refuse memory that can be had. If none can, that stream may be why: what waits for it is not
            // free.
            None => self.grow(bytes, fit, device, cause).map_err(|error| looked_after.err().unwrap_or(error))?,
        };
        lock(&self.shards[home].0).count(cell.size);
        Ok(cell)
    }

    /// Gives a block to its owner.
    #[inline]
    pub(super) fn hand_out(&self, cell: Arc<BlockCell>, home: usize, bytes: u64, cause: &Cause) -> HostBlock {
        cell.taken(home as u32, bytes);
        if !cause.is_silent() {
            if let Some(stack) = &cause.stack {
                lock(&cell.notes).stack = Some(Arc::clone(stack));
                cell.set_trait(STACKED);
            }
            self.record(Action::Alloc, cell.ptr, bytes, cause);
        }
        HostBlock::new(cell)
    }

    /// The owner gives a block back, and the driver may be called.
    pub(super) fn free(cell: Arc<BlockCell>) -> Result<()> {
        // The books are reached through the block, which moves on. Its own count is nobody else's business, unlike that
        // of the books.
        let keep = Arc::clone(&cell);
        let shared = &keep.shared;
        let outcome = shared.free_now(cell);
        match outcome {
            Err(error) if lock(&shared.settings).free_catch_all => {
                tracing::warn!(%error, "swallowed while pinned memory was freed, as pinned_free_catch_all wants it");
                Ok(())
            }
            outcome => outcome,
        }
    }

    #[inline]
    fn free_now(&self, cell: Arc<BlockCell>) -> Result<()> {
        let cause = self.cause(StackLevel::All);
        if cell.traits() != 0 || !cause.is_silent() {
            return if self.request_free(&cell, &cause) {
                self.mark_uses(cell, &cause)?;
                self.look_after()
            } else {
                self.complete(cell, &cause);
                self.return_doomed(&mut 0, &cause)
            };
        }
        if self.put_back(cell) { self.return_doomed(&mut 0, &cause) } else { Ok(()) }
    }

    /// The same in a destructor: what needs the driver is left to the next call.
    #[inline]
    pub(super) fn free_later(cell: Arc<BlockCell>) {
        let keep = Arc::clone(&cell);
        let shared = &keep.shared;
        let cause = shared.cause(StackLevel::All);
        if cell.traits() == 0 && cause.is_silent() {
            shared.put_back(cell);
        } else if shared.request_free(&cell, &cause) {
            shared.mark_later(cell);
        } else {
            shared.complete(cell, &cause);
        }
    }

    /// The first half of a free that is out of the ordinary. Says whether the block must wait.
    fn request_free(&self, cell: &BlockCell, cause: &Cause) -> bool {
        self.record(Action::FreeRequested, cell.ptr, cell.requested(), cause);
        let waits = cell.traits() & USED != 0;
        if waits {
            cell.stand(Standing::Waiting);
            lock(&cell.notes).given_back = true;
        }
        waits
    }

    /// The second half: nothing uses the block any more.
    pub(super) fn complete(&self, cell: Arc<BlockCell>, cause: &Cause) {
        self.record(Action::FreeCompleted, cell.ptr, cell.requested(), cause);
        lock(&cell.notes).stack = None;
        cell.clear_trait(USED | STACKED);
        if cell.traits() & POOLED == 0 {
            self.put_back(cell);
            return;
        }
        cell.stand(Standing::Idle);
        lock(&self.shards[cell.home() as usize].0).uncount(cell.size);
        self.put_into_pool(cell);
    }

    /// Uncounts a block and puts it into the cache that it came from. Says whether something is left for a call to the
    /// driver.
    #[inline]
    fn put_back(&self, cell: Arc<BlockCell>) -> bool {
        cell.stand(Standing::Idle);
        let mut cache = lock(&self.shards[cell.home() as usize].0);
        cache.uncount(cell.size);
        let refused = self.put(&mut cache, cell);
        drop(cache);
        match refused {
            Ok(()) => false,
            Err(cell) => self.give_to_heap(vec![cell]),
        }
    }

    /// Puts away a block that was uncounted before. No driver call: what is not to be kept is left to the next call.
    pub(super) fn put_away(&self, cell: Arc<BlockCell>) {
        let refused = self.put(&mut lock(&self.shards[cell.home() as usize].0), cell);
        if let Err(cell) = refused {
            self.give_to_heap(vec![cell]);
        }
    }

    /// Puts a block into a cache; out it comes if there is no room, or if its size is not to be kept.
    #[inline]
    fn put(&self, cache: &mut Cache, cell: Arc<BlockCell>) -> std::result::Result<(), Arc<BlockCell>> {
        if cell.size > self.limits.cached_max() { Err(cell) } else { cache.put(cell) }
    }

    /// Joins blocks with what is free around them. Says whether segments are left that are not to be kept.
    fn give_to_heap(&self, cells: Vec<Arc<BlockCell>>) -> bool {
        let most = self.limits.cached_max();
        let mut doomed = Vec::new();
        let mut pieces = Vec::with_capacity(cells.len());
        {
            let mut heap = lock(&self.heap);
            for cell in &cells {
                let (whole, piece) = heap.give(cell);
                cell.stand(Standing::Gone);
                pieces.push(piece);
                doomed.extend(whole.filter(|_| cell.size > most));
            }
        }
        // Without the lock: with the last block of an allocator that is gone, its books go too.
        drop(pieces);
        let any = !doomed.is_empty();
        if any {
            lock(&self.pending).doomed.append(&mut doomed);
        }
        any
    }

    /// Gives blocks to the heap that were kept back for graphs of which nothing is known. At the very end: nobody is to
    /// use them any more.
    pub(super) fn give_up_lost(&self) {
        let is_lost = |cell: &BlockCell| cell.standing() == Standing::Waiting && lock(&cell.notes).is_only_lost();
        let lost: Vec<_> = lock(&self.heap).blocks().filter(|cell| is_lost(cell)).cloned().collect();
        self.give_to_heap(lost);
    }

    /// Gives what all caches have to the heap.
    pub(super) fn empty_shards(&self) {
        for shard in &self.shards {
            let cells = lock(&shard.0).empty();
            if !cells.is_empty() {
                self.give_to_heap(cells);
            }
        }
    }
}
