//! The fences of one device by stream, and the unfenced blocks. No driver calls here.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use warpool_driver::{DeviceId, StreamId};

use super::uses::StreamUses;
use crate::PooledEvent;

/// How many blocks or streams that are not ready an ordinary call may examine. PyTorch has 32 streams per priority:
/// with that few, every fence is polled at every request, as in PyTorch.
pub(crate) const PENDING_PER_CALL: usize = 64;

/// Whose work a fence is after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fenced {
    Stream(StreamId),
    /// That of all streams of a device, among them some that may not be named.
    Device(DeviceId),
}

/// The fences of one device of an allocator by stream, and the unfenced blocks. `K` names a freed block.
#[derive(Debug)]
pub(crate) struct StreamFences<K> {
    /// Each queue is ordered by sequence number; no queue is empty.
    queues: BTreeMap<Fenced, VecDeque<Queued<K>>>,
    next_sequence: u64,
    /// How many fences of each stream (second) the blocks of a stream (first) wait for.
    by_owner: BTreeMap<(StreamId, Fenced), u32>,
    /// The stream that was polled last, if a call polls only some of them.
    last_polled: Option<Fenced>,
    unfenced: Vec<K>,
    /// If true, nothing is queued any more.
    closed: bool,
}

#[derive(Debug)]
struct Queued<K> {
    sequence: u64,
    event: Arc<PooledEvent>,
    /// The stream that the block belongs to.
    owner: Option<StreamId>,
    key: K,
}

/// A queued fence, to be queried without the lock. It shares the event, which stays valid if another thread completes
/// the fence meanwhile.
#[derive(Clone, Debug)]
pub(crate) struct Fence {
    pub(super) fenced: Fenced,
    sequence: u64,
    pub(super) event: Arc<PooledEvent>,
}

impl<K> Default for StreamFences<K> {
    fn default() -> Self {
        Self {
            queues: BTreeMap::new(),
            next_sequence: 0,
            by_owner: BTreeMap::new(),
            last_polled: None,
            unfenced: Vec::new(),
            closed: false,
        }
    }
}

impl<K> StreamFences<K> {
    /// Whether no block waits for a stream.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.unfenced.is_empty()
    }

    /// Whether there are unfenced blocks.
    pub(crate) fn has_unfenced(&self) -> bool {
        !self.unfenced.is_empty()
    }

    /// Removes a fence that has passed and returns its block; `None` if another thread has already done so.
    pub(crate) fn pop(&mut self, fence: &Fence) -> Option<K> {
        let queue = self.queues.get_mut(&fence.fenced)?;
        let at = queue.binary_search_by_key(&fence.sequence, |queued| queued.sequence).ok()?;
        let queued = queue.remove(at)?;
        if queue.is_empty() {
            self.queues.remove(&fence.fenced);
        }
        if let Some(owner) = queued.owner {
            let of_owner = (owner, fence.fenced);
            let count = self.by_owner.get_mut(&of_owner).expect("a queued fence is counted");
            *count -= 1;
            if *count == 0 {
                self.by_owner.remove(&of_owner);
            }
        }
        Some(queued.key)
    }

    /// Whether [`poll_some`](super::poll_some) polls only some of the streams.
    pub(crate) fn has_many_streams(&self) -> bool {
        self.queues.len() > PENDING_PER_CALL
    }

    /// Lists a pending free as unfenced, unless it is listed already.
    pub(crate) fn list_unfenced(&mut self, uses: &mut StreamUses, key: K) {
        if !self.closed && uses.list() {
            self.unfenced.push(key);
        }
    }

    /// Closes the queues: nothing is queued any more. Returns what was queued, for the caller to drop without the lock.
    pub(crate) fn close(&mut self) -> Self {
        std::mem::replace(self, Self { closed: true, ..Self::default() })
    }

    /// Queues a fence; returns it if the queues are closed.
    pub(super) fn push(
        &mut self,
        fenced: Fenced,
        event: Arc<PooledEvent>,
        owner: Option<StreamId>,
        key: K,
    ) -> Option<(Arc<PooledEvent>, K)> {
        if self.closed {
            return Some((event, key));
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.queues.entry(fenced).or_default().push_back(Queued { sequence, event, owner, key });
        if let Some(owner) = owner {
            *self.by_owner.entry((owner, fenced)).or_default() += 1;
        }
        None
    }

    /// Lists a block as unfenced; returns it if the queues are closed.
    pub(super) fn push_unfenced(&mut self, key: K) -> Option<K> {
        if self.closed {
            return Some(key);
        }
        self.unfenced.push(key);
        None
    }

    pub(super) fn unfenced(&self) -> &[K] {
        &self.unfenced
    }

    pub(super) fn take_unfenced(&mut self) -> Vec<K> {
        std::mem::take(&mut self.unfenced)
    }

    /// Lists blocks as unfenced again, before those that were listed meanwhile; returns them if the queues are closed.
    pub(super) fn return_unfenced(&mut self, keys: Vec<K>) -> Vec<K> {
        if self.closed {
            return keys;
        }
        let stay = std::mem::replace(&mut self.unfenced, keys);
        self.unfenced.extend(stay);
        Vec::new()
    }

    /// How many streams have fences, and which was polled last if a call polls only some of them.
    pub(super) fn poll_position(&self) -> (usize, Option<Fenced>) {
        (self.queues.len(), self.last_polled.filter(|_| self.has_many_streams()))
    }

    pub(super) fn set_last_polled(&mut self, last: Option<Fenced>) {
        self.last_polled = last;
    }

    /// The oldest fences of up to `count` streams: those after `last`, then from the first.
    pub(super) fn oldest_after(&self, last: Option<Fenced>, count: usize) -> Vec<Fence> {
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        let wrapped = last.map(|last| self.queues.range(..=last)).into_iter().flatten();
        let streams = self.queues.range((after, Bound::Unbounded)).chain(wrapped);
        streams.take(count).filter_map(|(&fenced, _)| self.oldest_of(fenced)).collect()
    }

    /// The oldest fence of each stream that blocks of `owner` wait for.
    pub(super) fn oldest_for(&self, owner: StreamId) -> Vec<Fence> {
        let of_owner =
            self.by_owner.range((owner, Fenced::Stream(StreamId(0)))..).take_while(|((other, _), _)| *other == owner);
        of_owner.filter_map(|(&(_, fenced), _)| self.oldest_of(fenced)).collect()
    }

    pub(super) fn oldest_of(&self, fenced: Fenced) -> Option<Fence> {
        let queued = self.queues.get(&fenced)?.front()?;
        Some(Fence { fenced, sequence: queued.sequence, event: Arc::clone(&queued.event) })
    }

    /// Every fence, in the order of streams and then of age.
    pub(super) fn all(&self) -> Vec<Fence> {
        let of_stream = |(&fenced, queue)| {
            let queue: &VecDeque<Queued<K>> = queue;
            queue.iter().map(move |queued| Fence {
                fenced,
                sequence: queued.sequence,
                event: Arc::clone(&queued.event),
            })
        };
        self.queues.iter().flat_map(of_stream).collect()
    }
}
