//! Blocks that were given back while streams may still use them: each waits for a mark in every such stream.
//!
//! Marks of one stream pass in about the order in which they are listed, so only the first is asked about, and one
//! stream that is behind holds back only the blocks that it used. About: two threads may list marks the other way round
//! than they put them, so that one has passed says nothing of those before it. The driver is asked without any lock;
//! marks have numbers, so that an answer that comes too late is recognised.
//!
//! A stream that fails stands in nobody else's way: everything else is still looked after, and the first failure is
//! reported.
//!
//! No mark is ever put into a stream that captures: it would be the capture's, and asking about it would break that.
//! Such a block stays on the list until the capture is over.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use warpool_driver::{CaptureState, ErrorCode, EventScope, StreamId};

use super::Shared;
use super::block::{BlockCell, Use};
use crate::capture::RelaxedMode;
use crate::memory::StackLevel;
use crate::memory::journal::Cause;
use crate::{Device, PooledEvent, Result, lock};

/// What waits, and what is to be done about it.
#[derive(Default)]
pub(super) struct Pending {
    queues: BTreeMap<StreamId, VecDeque<Entry>>,
    next_number: u64,
    /// Blocks that were given back and need marks that are not there yet: destructors put none, and captures forbid
    /// them.
    unmarked: Vec<Arc<BlockCell>>,
    /// Segments that should go back to the driver: what lies in them is not to be kept.
    pub(super) doomed: Vec<u64>,
    /// Once the allocator is gone nothing is looked after any more, and nothing is kept.
    closed: bool,
}

struct Entry {
    number: u64,
    event: Arc<PooledEvent>,
    cell: Arc<BlockCell>,
}

/// A mark to ask about, without the lock. It shares the event: another thread may take the mark out meanwhile, but the
/// event goes nowhere.
struct Head {
    stream: StreamId,
    number: u64,
    event: Arc<PooledEvent>,
}

/// What came of marking a stream.
enum Mark {
    /// It stands behind the stream's work.
    Behind(PooledEvent),
    /// The work is known to be done.
    NotNeeded,
    /// A capture forbids it.
    Captured,
}

impl Pending {
    /// Whether there is nothing to look after.
    pub(super) fn is_idle(&self) -> bool {
        self.queues.is_empty() && self.unmarked.is_empty() && self.doomed.is_empty()
    }

    /// Whether something waits for a stream.
    pub(super) fn waits(&self) -> bool {
        !self.queues.is_empty() || !self.unmarked.is_empty()
    }

    /// Takes a mark in; gives it back if nobody is there to look after it.
    fn push(&mut self, stream: StreamId, event: PooledEvent, cell: Arc<BlockCell>) -> Option<Entry> {
        let number = self.next_number;
        self.next_number += 1;
        let entry = Entry { number, event: Arc::new(event), cell };
        if self.closed {
            return Some(entry);
        }
        self.queues.entry(stream).or_default().push_back(entry);
        None
    }

    fn head(&self, stream: StreamId) -> Option<Head> {
        let entry = self.queues.get(&stream)?.front()?;
        Some(Head { stream, number: entry.number, event: Arc::clone(&entry.event) })
    }

    fn heads(&self) -> Vec<Head> {
        self.queues.keys().filter_map(|&stream| self.head(stream)).collect()
    }

    /// Takes out the marks of a stream up to this one, which has passed; nothing if another thread did.
    fn pop_through(&mut self, head: &Head) -> Vec<Entry> {
        let Some(queue) = self.queues.get_mut(&head.stream) else { return Vec::new() };
        // Numbers only grow, so a queue is in their order.
        let passed = queue.partition_point(|entry| entry.number <= head.number);
        let entries = queue.drain(..passed).collect();
        if queue.is_empty() {
            self.queues.remove(&head.stream);
        }
        entries
    }

    /// Takes nothing in any more. What it had, to be dropped without the lock.
    pub(super) fn close(&mut self) -> Self {
        std::mem::replace(self, Self { closed: true, ..Self::default() })
    }
}

impl Shared {
    /// Looks after what was given back: marks that destructors left, marks that have passed, segments that are not to
    /// be kept.
    pub(super) fn look_after(&self) -> Result<()> {
        if lock(&self.pending).is_idle() {
            return Ok(());
        }
        self.look_after_all(&mut 0)
    }

    /// The same, and adds up the bytes that went back to the driver.
    pub(super) fn look_after_all(&self, returned: &mut u64) -> Result<()> {
        let cause = self.cause(StackLevel::All);
        let marked = self.mark_unmarked(&cause);
        let retired = self.retire_passed(&cause);
        marked.and(retired).and(self.return_doomed(returned, &cause))
    }

    /// Completes the frees whose marks have passed.
    fn retire_passed(&self, cause: &Cause) -> Result<()> {
        let mut heads = lock(&self.pending).heads();
        if heads.is_empty() {
            return Ok(());
        }
        let _relaxed = RelaxedMode::begin(self.driver())?;
        let mut outcome = Ok(());
        while !heads.is_empty() {
            let mut passed = Vec::new();
            for head in heads {
                match self.driver().event_query(head.event.id()) {
                    Ok(true) => passed.push(head),
                    Ok(false) => {}
                    Err(error) => outcome = outcome.and(Err(error.into())),
                }
            }
            heads = self.retire(&passed, cause);
        }
        outcome
    }

    /// Waits until every mark has passed; each of them, since the last one says nothing of the others.
    pub(super) fn wait_for_marks(&self, cause: &Cause) -> Result<()> {
        let mut outcome = self.mark_unmarked(cause);
        let mut heads = lock(&self.pending).heads();
        let _relaxed = RelaxedMode::begin(self.driver())?;
        while !heads.is_empty() {
            let mut passed = Vec::new();
            for head in heads {
                match self.driver().event_synchronize(head.event.id()) {
                    Ok(()) => passed.push(head),
                    Err(error) => outcome = outcome.and(Err(error.into())),
                }
            }
            heads = self.retire(&passed, cause);
        }
        outcome
    }

    /// Marks have passed. Returns the next ones of the same streams.
    fn retire(&self, passed: &[Head], cause: &Cause) -> Vec<Head> {
        let mut entries = Vec::new();
        let next = {
            let mut pending = lock(&self.pending);
            for head in passed {
                entries.extend(pending.pop_through(head));
            }
            passed.iter().filter_map(|head| pending.head(head.stream)).collect()
        };
        for Entry { cell, event, .. } in entries {
            drop(event);
            let settled = {
                let mut notes = lock(&cell.notes);
                notes.marks -= 1;
                notes.settle()
            };
            if settled {
                self.complete(cell, cause);
            }
        }
        next
    }

    /// Puts the marks that a destructor could not put, that a capture forbade, or that failed. Each is tried once.
    fn mark_unmarked(&self, cause: &Cause) -> Result<()> {
        let unmarked = std::mem::take(&mut lock(&self.pending).unmarked);
        let mut outcome = Ok(());
        for cell in unmarked {
            lock(&cell.notes).listed = false;
            outcome = outcome.and(self.mark_uses(cell, cause));
        }
        outcome
    }

    /// Leaves the marks of a block to the next call that may make any.
    pub(super) fn mark_later(&self, cell: Arc<BlockCell>) {
        if std::mem::replace(&mut lock(&cell.notes).listed, true) {
            return;
        }
        let mut pending = lock(&self.pending);
        if !pending.closed {
            pending.unmarked.push(cell);
        }
        drop(pending);
        self.background.wake();
    }

    /// Puts a mark for a block that was given back into every stream that used it. The block is safe whatever happens:
    /// what cannot be marked now is tried again by the next call.
    ///
    /// A use is taken off before its mark is put, and counts as a mark meanwhile: so a use of the same stream that is
    /// noted in between is another one, with a mark of its own.
    pub(super) fn mark_uses(&self, cell: Arc<BlockCell>, cause: &Cause) -> Result<()> {
        let mut left = Vec::new();
        let mut outcome = Ok(());
        loop {
            // Not in the loop's head: there the lock would be held over its body.
            let used = lock(&cell.notes).take_use();
            let Some(used) = used else { break };
            match self.mark(used) {
                Ok(Mark::Behind(event)) => {
                    let refused = lock(&self.pending).push(used.stream, event, Arc::clone(&cell));
                    drop(refused);
                }
                Ok(Mark::NotNeeded) => lock(&cell.notes).marks -= 1,
                Ok(Mark::Captured) => left.push(used),
                Err(error) => {
                    left.push(used);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        if left.is_empty() {
            self.background.wake();
            // Once the last mark is there, another thread may find it passed; only one of us finds the block settled.
            let settled = lock(&cell.notes).settle();
            if settled {
                self.complete(cell, cause);
            }
        } else {
            lock(&cell.notes).put_uses_back(&left);
            self.mark_later(cell);
        }
        outcome
    }

    /// Puts a mark behind the work that is in a stream now.
    fn mark(&self, used: Use) -> Result<Mark> {
        match self.driver().capture_state(used.stream) {
            Ok(CaptureState::None) => {}
            Ok(_) => return Ok(Mark::Captured),
            // The default stream, which would wait for a blocking stream that captures, and break that.
            Err(error) if error.code == ErrorCode::StreamCaptureImplicit => return Ok(Mark::Captured),
            Err(error) if error.code == ErrorCode::InvalidHandle => return self.outwait_gone(),
            Err(error) => return Err(error.into()),
        }
        let mut event = Device::known(&self.instance, used.device).event_pool().take()?;
        self.driver().event_record(event.id(), used.stream, EventScope::Plain)?;
        if self.driver().capture_state(used.stream) != Ok(CaptureState::None) {
            // Another thread began a capture since we looked: the mark may be the capture's.
            event.never_reuse();
            return Ok(Mark::Captured);
        }
        Ok(Mark::Behind(event))
    }

    /// A stream is gone, and its last work may not be: nothing but the devices can be waited for, which would break any
    /// capture.
    fn outwait_gone(&self) -> Result<Mark> {
        let Some(_held_off) = self.instance.captures().hold_off() else { return Ok(Mark::Captured) };
        for device in self.instance.devices() {
            if self.driver().context_is_active(device.id())? {
                device.synchronize()?;
            }
        }
        Ok(Mark::NotNeeded)
    }
}
