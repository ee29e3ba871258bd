//! Stream-ordered reuse: a freed block that several streams used is reclaimed once the work that those streams held at
//! the time of the free is done. One mechanism for all allocators.
//!
//! # How an allocator uses it
//! 1. Each block has [`StreamUses`]. While it is allocated, [`StreamUses::add`] records the streams that use it; at its
//!    free, [`StreamUses::mark_freed`].
//! 2. [`fence`] records an event, the *fence*, behind the work of each of these streams and queues it in the owner's
//!    [`StreamFences`]. [`fence_later`] only lists the block as *unfenced*, for callers that must not call the driver
//!    (destructors).
//! 3. Later calls run [`retry_unfenced`] and [`poll`]; [`wait_all`] waits for the fences instead of polling them.
//! 4. Passed fences go to [`FenceOwner::complete`]; blocks without any left are reclaimed there.
//!
//! The allocator implements [`FenceOwner`]: where the two structures are and under which lock. [`record`],
//! [`wait_for_stream`], [`wait_for_devices`] and [`order_after`] also serve without a block.
//!
//! # Rules
//! - The driver is called without the owner's lock. Fences have sequence numbers, so that a result that arrives after
//!   another thread completed the same fence is dropped.
//! - Only the oldest fence of each stream is queried, so a busy stream delays only the blocks that it used. A passed
//!   fence completes itself and none before it: two threads may queue fences in another order than they recorded them.
//! - An error in one stream does not stop the others; the first error is returned.
//! - No fence is recorded in a stream that takes part in a capture: the event would belong to the capture, and querying
//!   it would invalidate that. Such a block stays unfenced until the capture is over.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use warpool_driver::{ErrorCode, EventScope, StreamId};

use crate::capture::CaptureStatus;
use crate::{Device, Instance, PooledEvent, Result};

/// The streams that use a block beside its own, and how far its free is. Kept with the block, under its owner's lock.
#[derive(Debug, Default)]
pub(crate) struct StreamUses {
    /// Streams without a fence yet.
    streams: Vec<StreamId>,
    /// Fences that have not passed or are being recorded, and one for the thread that is recording them.
    outstanding: u32,
    freed: bool,
    /// Whether the block is in the list of unfenced ones.
    listed: bool,
}

impl StreamUses {
    /// Streams that used the block.
    pub(crate) fn of(streams: Vec<StreamId>) -> Self {
        Self { streams, ..Self::default() }
    }

    /// Records that `stream` uses the block. A use that is added while a fence for the same stream is being recorded is
    /// another use, with a fence of its own.
    pub(crate) fn add(&mut self, stream: StreamId) {
        if !self.streams.contains(&stream) {
            self.streams.push(stream);
        }
    }

    /// Streams without a fence yet.
    pub(crate) fn unfenced(&self) -> &[StreamId] {
        &self.streams
    }

    /// Whether no stream may still use the block.
    pub(crate) fn is_clear(&self) -> bool {
        self.streams.is_empty() && self.outstanding == 0
    }

    /// The block was freed: from here on fences may be recorded for it.
    pub(crate) fn mark_freed(&mut self) {
        self.freed = true;
    }

    /// Whether the block is freed and not reclaimed yet.
    pub(crate) fn is_freed(&self) -> bool {
        self.freed
    }

    /// Whether the block is freed and no stream may still use it. Returns `true` to one caller only, which reclaims it.
    pub(crate) fn take_reclaimable(&mut self) -> bool {
        let reclaimable = self.freed && self.is_clear();
        if reclaimable {
            self.freed = false;
        }
        reclaimable
    }

    /// A fence of the block has passed.
    pub(crate) fn fence_passed(&mut self) {
        self.outstanding -= 1;
    }

    /// The streams to record fences in, each counted as outstanding from here on. `None` if the block is not freed: it
    /// was reclaimed by another thread, and may be allocated again.
    fn begin_fencing(&mut self) -> Option<Vec<StreamId>> {
        if !self.freed {
            return None;
        }
        let streams = std::mem::take(&mut self.streams);
        self.outstanding += streams.len() as u32 + 1;
        Some(streams)
    }

    /// Fences are recorded, but for `done` streams that need none and those `left` without one. Returns whether the
    /// block is to be listed as unfenced.
    fn end_fencing(&mut self, done: u32, left: &[StreamId]) -> bool {
        self.outstanding -= 1 + done + left.len() as u32;
        left.iter().for_each(|&stream| self.add(stream));
        !self.streams.is_empty() && !std::mem::replace(&mut self.listed, true)
    }
}

/// The fences of one allocator's device, by stream, and the blocks that have none yet. `K` names a freed block.
#[derive(Debug)]
pub(crate) struct StreamFences<K> {
    /// Each in the order of sequence numbers, none empty.
    queues: BTreeMap<StreamId, VecDeque<Queued<K>>>,
    next_sequence: u64,
    unfenced: Vec<K>,
    /// After that nothing is queued any more.
    closed: bool,
}

#[derive(Debug)]
struct Queued<K> {
    sequence: u64,
    event: Arc<PooledEvent>,
    key: K,
}

/// A queued fence, to be queried without the lock. Shares the event: it stays valid when another thread completes the
/// fence meanwhile.
#[derive(Clone, Debug)]
pub(crate) struct Fence {
    stream: StreamId,
    sequence: u64,
    event: Arc<PooledEvent>,
}

impl<K> Default for StreamFences<K> {
    fn default() -> Self {
        Self { queues: BTreeMap::new(), next_sequence: 0, unfenced: Vec::new(), closed: false }
    }
}

impl<K> StreamFences<K> {
    /// Whether no block waits for a stream.
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.unfenced.is_empty()
    }

    /// Whether blocks have fences still to be recorded.
    pub(crate) fn has_unfenced(&self) -> bool {
        !self.unfenced.is_empty()
    }

    /// Takes out a fence that has passed, and returns its block; `None` if another thread did before.
    pub(crate) fn pop(&mut self, fence: &Fence) -> Option<K> {
        let queue = self.queues.get_mut(&fence.stream)?;
        let at = queue.binary_search_by_key(&fence.sequence, |queued| queued.sequence).ok()?;
        let queued = queue.remove(at)?;
        if queue.is_empty() {
            self.queues.remove(&fence.stream);
        }
        Some(queued.key)
    }

    /// Queues nothing any more. Returns what was queued, to be dropped without the lock.
    pub(crate) fn close(&mut self) -> Self {
        std::mem::replace(self, Self { closed: true, ..Self::default() })
    }

    /// Queues a fence; returns it if closed.
    fn push(&mut self, stream: StreamId, event: PooledEvent, key: K) -> Option<(PooledEvent, K)> {
        if self.closed {
            return Some((event, key));
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.queues.entry(stream).or_default().push_back(Queued { sequence, event: Arc::new(event), key });
        None
    }

    /// Lists a block as unfenced; returns it if closed.
    fn push_unfenced(&mut self, key: K) -> Option<K> {
        if self.closed {
            return Some(key);
        }
        self.unfenced.push(key);
        None
    }

    /// The oldest fence of each stream.
    fn oldest(&self) -> Vec<Fence> {
        self.queues.keys().filter_map(|&stream| self.oldest_of(stream)).collect()
    }

    fn oldest_of(&self, stream: StreamId) -> Option<Fence> {
        let queued = self.queues.get(&stream)?.front()?;
        Some(Fence { stream, sequence: queued.sequence, event: Arc::clone(&queued.event) })
    }

    /// Every fence, in the order of streams and then of age.
    fn all(&self) -> Vec<Fence> {
        let of_stream = |(&stream, queue)| {
            let queue: &VecDeque<Queued<K>> = queue;
            queue.iter().map(move |queued| Fence {
                stream,
                sequence: queued.sequence,
                event: Arc::clone(&queued.event),
            })
        };
        self.queues.iter().flat_map(of_stream).collect()
    }
}

/// An allocator's device, as far as its fences are concerned.
pub(crate) trait FenceOwner {
    /// Names a freed block.
    type Key: Clone;

    fn instance(&self) -> &Instance;

    /// Whether captures are active. They forbid waiting for a device.
    fn has_captures(&self) -> bool {
        self.instance().has_captures()
    }

    /// The capture status of a stream. An owner that is told of every capture need not ask the driver without any.
    fn capture_status(&self, stream: StreamId) -> Result<CaptureStatus> {
        CaptureStatus::of(&**self.instance().driver(), stream)
    }

    /// While the result is held, queries and waits of the calling thread invalidate no capture of another stream.
    fn capture_guard(&self) -> Result<impl Sized>;

    /// Accesses a block's uses, under their lock.
    fn with_uses<R>(&self, key: &Self::Key, act: impl FnOnce(&mut StreamUses) -> R) -> R;

    /// Accesses the fences, under their lock.
    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<Self::Key>) -> R) -> R;

    /// These fences have passed: pops them, and reclaims the blocks that have none left.
    fn complete(&self, passed: &[Fence]);

    /// Reclaims a block if it is freed and no stream may still use it.
    fn reclaim_if_clear(&self, key: Self::Key);
}

/// Result of [`record`].
pub(crate) enum Recorded {
    /// The event is recorded behind the stream's work.
    Fenced(PooledEvent),
    /// The stream's work is known to be done.
    AlreadyDone,
    /// A capture forbids recording; to be retried once it is over.
    CaptureActive,
}

/// Records an event behind the work that `stream` holds now.
pub(crate) fn record(owner: &impl FenceOwner, stream: StreamId) -> Result<Recorded> {
    match owner.capture_status(stream)? {
        CaptureStatus::NotCapturing => {}
        CaptureStatus::StreamDestroyed => return record_destroyed(owner),
        CaptureStatus::Capturing(_) | CaptureStatus::Invalidated | CaptureStatus::Blocked => {
            return Ok(Recorded::CaptureActive);
        }
    }
    let driver = owner.instance().driver();
    let device = match driver.stream_handle(stream) {
        Ok(handle) => handle.device,
        Err(error) if error.code == ErrorCode::InvalidHandle => return record_destroyed(owner),
        Err(error) => return Err(error.into()),
    };
    let mut event = Device::from_id(owner.instance(), device).event_pool().take()?;
    driver.event_record(event.id(), stream, EventScope::Plain)?;
    let status = owner.capture_status(stream);
    if status != Ok(CaptureStatus::NotCapturing) {
        // Another thread began a capture since the first check: the event may belong to it.
        event.never_reuse();
        return status.map(|_| Recorded::CaptureActive);
    }
    Ok(Recorded::Fenced(event))
}

/// The last work of a destroyed stream may still run, and only the devices can be waited for.
fn record_destroyed(owner: &impl FenceOwner) -> Result<Recorded> {
    let waited = !owner.has_captures() && wait_for_devices(owner.instance())?;
    Ok(if waited { Recorded::AlreadyDone } else { Recorded::CaptureActive })
}

/// Waits for all work of all devices. Returns `false` without waiting while a capture is active, which the wait would
/// invalidate; none can begin during the wait.
pub(crate) fn wait_for_devices(instance: &Instance) -> Result<bool> {
    let Some(_held_off) = instance.hold_off_captures() else { return Ok(false) };
    for device in instance.devices() {
        if instance.driver().context_is_active(device.id())? {
            device.synchronize()?;
        }
    }
    Ok(true)
}

/// Waits for the work that `stream` holds now. Returns `false` without waiting if a capture forbids it. Waits for an
/// event and not for the stream: another thread may begin a capture in it at any moment, which a wait for the stream
/// would invalidate.
pub(crate) fn wait_for_stream(owner: &impl FenceOwner, stream: StreamId) -> Result<bool> {
    match record(owner, stream)? {
        Recorded::Fenced(event) => {
            let _guard = owner.capture_guard()?;
            owner.instance().driver().event_synchronize(event.id())?;
            Ok(true)
        }
        Recorded::AlreadyDone => Ok(true),
        Recorded::CaptureActive => Ok(false),
    }
}

/// Makes later work of `later` wait for the work that `earlier` holds now, on the device.
pub(crate) fn order_after(instance: &Instance, earlier: StreamId, later: StreamId) -> Result<()> {
    let driver = instance.driver();
    let device = driver.stream_handle(earlier)?.device;
    let event = Device::from_id(instance, device).event_pool().take()?;
    driver.event_record(event.id(), earlier, EventScope::Plain)?;
    Ok(driver.stream_wait_event(later, event.id(), EventScope::Plain)?)
}

/// Records fences for a freed block in every stream that used it, and reclaims it if it needs none. Streams in which
/// none can be recorded now stay with the block, which is then listed as unfenced.
pub(crate) fn fence<O: FenceOwner>(owner: &O, key: O::Key) -> Result<()> {
    let Some(streams) = owner.with_uses(&key, StreamUses::begin_fencing) else { return Ok(()) };
    let (mut done, mut left) = (0, Vec::new());
    let mut outcome = Ok(());
    for stream in streams {
        match record(owner, stream) {
            Ok(Recorded::Fenced(event)) => {
                let refused = owner.with_fences(|fences| fences.push(stream, event, key.clone()));
                drop(refused);
            }
            Ok(Recorded::AlreadyDone) => done += 1,
            Ok(Recorded::CaptureActive) => left.push(stream),
            Err(error) => {
                left.push(stream);
                outcome = outcome.and(Err(error));
            }
        }
    }
    if owner.with_uses(&key, |uses| uses.end_fencing(done, &left)) {
        let refused = owner.with_fences(|fences| fences.push_unfenced(key));
        drop(refused);
    } else {
        owner.reclaim_if_clear(key);
    }
    outcome
}

/// Leaves the fences of a freed block to the next [`retry_unfenced`]. Makes no driver call.
pub(crate) fn fence_later<O: FenceOwner>(owner: &O, key: O::Key) {
    if !owner.with_uses(&key, |uses| std::mem::replace(&mut uses.listed, true)) {
        let refused = owner.with_fences(|fences| fences.push_unfenced(key));
        drop(refused);
    }
}

/// Runs `each`, usually [`fence`], once for every unfenced block; it lists again those that have to stay.
pub(crate) fn retry_unfenced<O: FenceOwner>(owner: &O, mut each: impl FnMut(O::Key) -> Result<()>) -> Result<()> {
    let mut outcome = Ok(());
    for key in owner.with_fences(|fences| std::mem::take(&mut fences.unfenced)) {
        owner.with_uses(&key, |uses| uses.listed = false);
        outcome = outcome.and(each(key));
    }
    outcome
}

/// Completes the fences that have passed.
pub(crate) fn poll(owner: &impl FenceOwner) -> Result<()> {
    let mut oldest = owner.with_fences(|fences| fences.oldest());
    if oldest.is_empty() {
        return Ok(());
    }
    let _guard = owner.capture_guard()?;
    let mut outcome = Ok(());
    while !oldest.is_empty() {
        let mut passed = Vec::new();
        for fence in oldest {
            match owner.instance().driver().event_query(fence.event.id()) {
                Ok(true) => passed.push(fence),
                Ok(false) => {}
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
        }
        owner.complete(&passed);
        oldest = owner.with_fences(|fences| passed.iter().filter_map(|fence| fences.oldest_of(fence.stream)).collect());
    }
    outcome
}

/// Waits for all fences that are queued now, and completes them.
pub(crate) fn wait_all(owner: &impl FenceOwner) -> Result<()> {
    let all = owner.with_fences(|fences| fences.all());
    let _guard = owner.capture_guard()?;
    let (mut failed, mut outcome) = (None, Ok(()));
    // Each of them: that the last one of a stream has passed says nothing about the others.
    for fence in all {
        if failed == Some(fence.stream) {
            continue;
        }
        match owner.instance().driver().event_synchronize(fence.event.id()) {
            Ok(()) => owner.complete(&[fence]),
            Err(error) => {
                failed = Some(fence.stream);
                outcome = outcome.and(Err(error.into()));
            }
        }
    }
    outcome
}
