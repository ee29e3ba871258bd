//! Blocks that were given back while other streams may still use them: each waits for a mark in every such stream.
//!
//! Marks are asked about in the order of their stream, so one stream that is behind holds back only the blocks that it
//! used. The driver is asked without the lock; marks have numbers, so that an answer that comes too late is recognised.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use warpool_driver::{ErrorCode, EventScope, StreamId};

use super::block::{BlockKey, Standing};
use super::state::State;
use super::{CachingAllocator, Cell};
use crate::memory::journal::Cause;
use crate::{Device, PooledEvent, Result};

/// The marks of one device's blocks, by stream.
#[derive(Default)]
pub(super) struct Pending {
    queues: BTreeMap<StreamId, VecDeque<Entry>>,
    next_number: u64,
}

struct Entry {
    number: u64,
    event: Arc<PooledEvent>,
    block: BlockKey,
}

/// A mark to ask about, without the lock. It shares the event: another thread may take the mark out meanwhile, but the
/// event goes nowhere.
#[derive(Clone)]
struct Head {
    stream: StreamId,
    number: u64,
    event: Arc<PooledEvent>,
}

/// What came of marking a stream.
pub(super) enum Mark {
    /// It stands behind the stream's work.
    Behind(PooledEvent),
    /// The work is known to be done.
    NotNeeded,
    /// The stream captures by now, or is gone while another captures: there is nothing to be done until that ends.
    Captured,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    fn push(&mut self, stream: StreamId, event: PooledEvent, block: BlockKey) {
        let number = self.next_number;
        self.next_number += 1;
        self.queues.entry(stream).or_default().push_back(Entry { number, event: Arc::new(event), block });
    }

    fn head(&self, stream: StreamId) -> Option<Head> {
        let mark = self.queues.get(&stream)?.front()?;
        Some(Head { stream, number: mark.number, event: Arc::clone(&mark.event) })
    }

    fn heads(&self) -> Vec<Head> {
        self.queues.keys().filter_map(|&stream| self.head(stream)).collect()
    }

    /// Every mark, in the order of streams and then of age.
    fn all(&self) -> Vec<Head> {
        self.queues
            .iter()
            .flat_map(|(&stream, queue)| {
                queue.iter().map(move |mark| Head { stream, number: mark.number, event: Arc::clone(&mark.event) })
            })
            .collect()
    }

    /// Takes a mark out, if nobody did before; its block has one mark less.
    fn pop(&mut self, head: &Head) -> Option<BlockKey> {
        let queue = self.queues.get_mut(&head.stream)?;
        // Numbers only grow, so a queue is in their order.
        let at = queue.binary_search_by_key(&head.number, |mark| mark.number).ok()?;
        let mark = queue.remove(at)?;
        if queue.is_empty() {
            self.queues.remove(&head.stream);
        }
        Some(mark.block)
    }
}

impl State {
    /// Whether anything should be looked after before the next search.
    pub(super) fn has_chores(&self) -> bool {
        !self.pending.is_empty() || !self.unmarked.is_empty() || !self.deferred.is_empty()
    }

    /// The streams that a block which was given back must wait for.
    pub(super) fn uses_of(&self, block: BlockKey) -> Vec<StreamId> {
        self.blocks[block].extra.as_ref().map(|extra| extra.uses.clone()).unwrap_or_default()
    }

    /// Completes the free of a block that waits for nothing any more.
    fn settle(&mut self, block: BlockKey, cause: &Cause) {
        let entry = &self.blocks[block];
        if entry.standing == Standing::Waiting && entry.marks == 0 && !entry.has_uses() {
            self.complete_free(block, cause);
        }
    }

    /// Marks have passed. Returns the next ones of the same streams.
    fn retire(&mut self, passed: &[Head], cause: &Cause) -> Vec<Head> {
        for head in passed {
            if let Some(block) = self.pending.pop(head) {
                self.blocks[block].marks -= 1;
                self.settle(block, cause);
            }
        }
        passed.iter().filter_map(|head| self.pending.head(head.stream)).collect()
    }
}

impl CachingAllocator {
    /// Looks after what was given back: marks for what destructors left, what captures deferred, and marks that have
    /// passed. Not while the stream that is asked for captures.
    pub(super) fn reap(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        let (left_over, mut heads) =
            self.with(cell, |state| (!state.unmarked.is_empty() || !state.deferred.is_empty(), state.pending.heads()));
        if left_over {
            self.mark_unmarked(cell, cause)?;
            self.settle_deferred(cell, cause)?;
            heads = self.with(cell, |state| state.pending.heads());
        }
        if heads.is_empty() {
            return Ok(());
        }
        let _relaxed = self.relaxed(cell)?;
        while !heads.is_empty() {
            let mut passed = Vec::new();
            let mut outcome = Ok(());
            for head in heads {
                match self.driver().event_query(head.event.id()) {
                    Ok(true) => passed.push(head),
                    Ok(false) => {}
                    Err(error) => outcome = Err(error),
                }
            }
            heads = self.with(cell, |state| state.retire(&passed, cause));
            outcome?;
        }
        Ok(())
    }

    /// Waits until every block that was given back is free.
    pub(super) fn wait_for_pending(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        self.with(cell, |state| state.stats.num_sync_all_streams += 1);
        self.mark_unmarked(cell, cause)?;
        self.settle_deferred(cell, cause)?;
        let marks = self.with(cell, |state| state.pending.all());
        let _relaxed = self.relaxed(cell)?;
        for mark in marks {
            self.driver().event_synchronize(mark.event.id())?;
            self.with(cell, |state| state.retire(&[mark], cause));
        }
        Ok(())
    }

    /// Puts a mark for a block into every stream that used it. The block is safe whatever happens: what cannot be
    /// marked now is tried again by the next call.
    pub(super) fn mark_uses(&self, cell: &Cell, block: BlockKey, cause: &Cause) -> Result<()> {
        let uses = self.with(cell, |state| {
            let uses = state.uses_of(block);
            if uses.is_empty() {
                state.settle(block, cause);
            }
            uses
        });
        for stream in uses {
            let event = match self.mark(cell, stream) {
                Ok(Mark::Behind(event)) => Some(event),
                Ok(Mark::NotNeeded) => None,
                Ok(Mark::Captured) => {
                    self.with(cell, |state| state.unmarked.push(block));
                    return Ok(());
                }
                Err(error) => {
                    self.with(cell, |state| state.unmarked.push(block));
                    return Err(error);
                }
            };
            // Once the last mark is there, another thread may find it passed: from then on the block is no longer ours.
            self.with(cell, |state| {
                let entry = &mut state.blocks[block];
                entry.extra().uses.retain(|&other| other != stream);
                if let Some(event) = event {
                    entry.marks += 1;
                    state.pending.push(stream, event, block);
                }
                state.settle(block, cause);
            });
        }
        Ok(())
    }

    /// Puts a mark behind the work that is in `stream` now.
    pub(super) fn mark(&self, cell: &Cell, stream: StreamId) -> Result<Mark> {
        let device = match self.driver().stream_handle(stream) {
            Ok(handle) => handle.device,
            Err(error) if error.code == ErrorCode::InvalidHandle => {
                // The stream is gone, and its last work may not be: nothing but the devices can be waited for, which
                // would break any capture.
                if self.has_captures(cell) {
                    return Ok(Mark::Captured);
                }
                let Some(_held_off) = self.instance.captures().hold_off() else { return Ok(Mark::Captured) };
                for device in self.instance.devices() {
                    if self.driver().context_is_active(device.id())? {
                        device.synchronize()?;
                    }
                }
                return Ok(Mark::NotNeeded);
            }
            Err(error) => return Err(error.into()),
        };
        let mut event = Device::known(&self.instance, device).event_pool().take()?;
        self.driver().event_record(event.id(), stream, EventScope::Plain)?;
        if self.is_capturing(cell, stream)? {
            // Another thread began a capture since we looked: the mark may be the capture's, and asking about it would
            // break that.
            event.never_reuse();
            return Ok(Mark::Captured);
        }
        Ok(Mark::Behind(event))
    }

    /// Puts the marks that a destructor could not put, or that failed. Each is tried once: some cannot be put before a
    /// capture is over.
    pub(super) fn mark_unmarked(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        let mut unmarked = self.with(cell, |state| std::mem::take(&mut state.unmarked)).into_iter().rev();
        while let Some(block) = unmarked.next() {
            let outcome = self.finish_free(cell, block, cause);
            if outcome.is_err() {
                self.with(cell, |state| state.unmarked.extend(unmarked.rev()));
                return outcome;
            }
        }
        Ok(())
    }
}
