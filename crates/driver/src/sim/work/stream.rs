//! A stream: a queue of work, and what its next operation is ordered after.

use std::collections::VecDeque;
use std::sync::Arc;

use super::item::Work;
use crate::DeviceId;
use crate::sim::order::{Epoch, TimelineId, VectorClock};

/// Which streams a stream is ordered with, besides what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// The legacy default stream of a device: ordered after the blocking streams, and they after it.
    Legacy,
    Blocking,
    NonBlocking,
}

/// A point in a stream: its last operation before, and what that is ordered after on other timelines.
#[derive(Clone, Debug)]
pub struct StreamPoint {
    pub epoch: Epoch,
    pub clock: Arc<VectorClock>,
}

/// An operation in a stream's queue.
#[derive(Debug)]
pub struct QueuedWork {
    pub seq: u64,
    /// The number of the call that queued it.
    pub queued_at: u64,
    /// What it is ordered after on other timelines.
    pub clock: Arc<VectorClock>,
    /// The operations among them that may not be done yet.
    pub waits: Vec<Epoch>,
    pub nanos: u64,
    pub work: Work,
}

#[derive(Debug)]
pub struct Stream {
    pub device: DeviceId,
    pub kind: StreamKind,
    pub priority: i32,
    pub raw: u64,
    /// Created outside this driver and not inspected yet: while it captures, its attributes cannot be read.
    pub attributes_hidden: bool,
    /// Destroyed; exists until its queue is empty.
    pub destroyed: bool,
    pub(super) timeline: TimelineId,
    /// The number of the timeline's last operation before this stream's first.
    pub(super) before_first: u64,
    pub(super) queue: VecDeque<QueuedWork>,
    /// Whether the first of the queue has started.
    pub(super) running: bool,
    /// The number of its last operation.
    pub(super) last: u64,
    /// What its next operation is ordered after on other timelines.
    pub(super) clock: Arc<VectorClock>,
    /// Whether `clock` has changed since the last operation was queued.
    pub(super) clock_changed: bool,
    /// The version of the host's clock that is joined into `clock`.
    pub(super) host_version: u64,
    /// How often `last` and `clock` have changed, apart from what the host has observed.
    pub(super) changes: u64,
    /// Whether it is among the changed ones of its device.
    pub(super) is_listed_changed: bool,
    /// While it is paused: the number of the last operation that may start.
    pub(super) paused_after: Option<u64>,
}

impl Stream {
    /// Its last operation.
    pub fn last(&self) -> StreamPoint {
        let epoch = Epoch { timeline: self.timeline, seq: self.last };
        StreamPoint { epoch, clock: Arc::clone(&self.clock) }
    }

    /// The epoch of the operation that would be queued next.
    pub fn next_epoch(&self) -> Epoch {
        Epoch { timeline: self.timeline, seq: self.last + 1 }
    }

    /// The number of an operation among those of this stream, from 1.
    pub fn number_of(&self, epoch: Epoch) -> u64 {
        epoch.seq - self.before_first
    }

    /// The clock, to be changed.
    fn clock_mut(&mut self) -> &mut VectorClock {
        self.clock_changed = true;
        Arc::make_mut(&mut self.clock)
    }

    /// Orders its next operation after `point`. Returns whether it was not ordered so before.
    pub(super) fn order_after(&mut self, point: &StreamPoint) -> bool {
        let is_new = !self.clock.covers(point.epoch) || !self.clock.covers_all(&point.clock);
        if is_new {
            self.join(&point.clock);
            self.clock_mut().add(point.epoch);
        }
        is_new
    }

    /// Orders its next operation after all that `clock` covers.
    pub(super) fn order_after_all(&mut self, clock: &VectorClock) {
        if !self.clock.covers_all(clock) {
            self.join(clock);
        }
    }

    fn join(&mut self, clock: &VectorClock) {
        // A clock that covers an operation covers all that the operation is ordered after. That is usually this
        // stream's whole clock, so the two clocks need not be compared.
        let has_work = self.last > self.before_first;
        let covers_mine = has_work && !self.clock_changed && clock.covers(self.last().epoch);
        let mine = self.clock_mut();
        if covers_mine {
            *mine = clock.clone();
        } else {
            mine.join(clock);
        }
    }

    /// The operation that must end before the queue is shorter than `depth`, if it is not.
    pub fn operation_before_room(&self, depth: usize) -> Option<Epoch> {
        let index = self.queue.len().checked_sub(depth)?;
        Some(Epoch { timeline: self.timeline, seq: self.queue[index].seq })
    }

    /// Whether nothing is queued or runs in it, and it is not paused.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && !self.running && !self.is_paused()
    }

    pub fn is_paused(&self) -> bool {
        self.paused_after.is_some()
    }

    /// The operations numbered from `after + 1` up to `last`, in the queue.
    pub(super) fn queued_between(&self, after: u64, last: u64) -> impl Iterator<Item = &QueuedWork> {
        let first = self.queue.partition_point(|queued| queued.seq <= after);
        self.queue.range(first..).take_while(move |queued| queued.seq <= last)
    }

    /// The same, to be changed.
    pub(super) fn queued_between_mut(&mut self, after: u64, last: u64) -> impl Iterator<Item = &mut QueuedWork> {
        let first = self.queue.partition_point(|queued| queued.seq <= after);
        self.queue.range_mut(first..).take_while(move |queued| queued.seq <= last)
    }
}
