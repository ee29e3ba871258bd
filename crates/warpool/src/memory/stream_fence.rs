//! Stream-ordered reuse: a freed block that several streams used is reclaimed once the work that those streams held at
//! the time of the free is done. One mechanism for all allocators. A *fence* here is an event that a freed block waits
//! for, not a memory fence; it has *passed* when the event has completed.
//!
//! # How an allocator uses it
//! 1. Each block has [`StreamUses`]. While it is allocated, [`StreamUses::add`] records the streams that use it; at its
//!    free, [`StreamUses::mark_freed`].
//! 2. [`fence`] records an event, the *fence*, behind the work of each of these streams and queues it in the owner's
//!    [`StreamFences`]. [`fence_later`] only lists the block as *unfenced*, for callers that must not call the driver
//!    (destructors).
//! 3. Later calls run [`retry_unfenced`] and [`poll`] or [`poll_some`]; [`wait_all`] waits for the fences instead.
//! 4. Passed fences go to [`FenceOwner::complete`]; blocks without any left are reclaimed there.
//!
//! The allocator implements [`FenceOwner`]: where the two structures are and under which lock. [`record`],
//! [`wait_for_stream`], [`wait_for_devices`] and [`order_after`] can be used without a block.
//!
//! # Rules
//! - The driver is called without the owner's lock. Fences have sequence numbers, so that a result that arrives after
//!   another thread completed the same fence is dropped.
//! - Only the oldest fence of each stream is queried, so a busy stream delays only the blocks that it used. A passed
//!   fence completes itself and none before it: two threads may queue fences in another order than they recorded them.
//! - An error in one stream does not stop the others; the first error is returned.
//! - What a call costs that merely passes by is bounded ([`PENDING_PER_CALL`]), however many streams have fences: it
//!   polls some of those that have not passed, in turn. [`poll_of`] polls all that one stream's blocks wait for.
//! - A driver call may unwind (a driver may be anybody's): no block is lost by that.
//! - No fence is recorded in a stream that takes part in a capture: the event would belong to the capture, and querying
//!   it would invalidate that. Such a block stays unfenced until the capture is over.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use rustc_hash::FxHashSet;
use warpool_driver::{ErrorCode, EventScope, StreamId};

use crate::capture::CaptureStatus;
use crate::{Device, Instance, PooledEvent, Result};

/// How many blocks or streams that have to wait longer a call looks at which only passes by. PyTorch has 32 streams per
/// priority: a program with so few sees every fence polled at every request, as PyTorch does.
pub(crate) const PENDING_PER_CALL: usize = 64;

/// The streams that use a block beside its own, and the progress of its free. Kept with the block, under its owner's
/// lock.
#[derive(Debug, Default)]
pub(crate) struct StreamUses {
    /// Streams without a fence yet.
    streams: Vec<StreamId>,
    /// Incomplete fences, plus one while a thread is recording fences, so that the block is not reclaimed meanwhile.
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

    /// Records that these streams use the block, which are distinct and may be many.
    pub(crate) fn add_all(&mut self, streams: impl IntoIterator<Item = StreamId>) {
        let known: FxHashSet<StreamId> = self.streams.iter().copied().collect();
        self.streams.extend(streams.into_iter().filter(|stream| !known.contains(stream)));
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

    /// Ends recording: `done` streams needed no fence, and in those `left` none can be recorded now. Returns whether
    /// the block is to be listed as unfenced.
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
    /// How many fences of each stream (second) the blocks of a stream (first) wait for.
    by_owner: BTreeMap<(StreamId, StreamId), u32>,
    /// The stream that was polled last, if not all are polled at once.
    last_polled: Option<StreamId>,
    unfenced: Vec<K>,
    /// If true, nothing is queued.
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
        if let Some(owner) = queued.owner {
            let of_owner = (owner, fence.stream);
            let count = self.by_owner.get_mut(&of_owner).expect("a queued fence is counted");
            *count -= 1;
            if *count == 0 {
                self.by_owner.remove(&of_owner);
            }
        }
        Some(queued.key)
    }

    /// Whether [`poll_some`] polls only some of the streams.
    pub(crate) fn has_many_streams(&self) -> bool {
        self.queues.len() > PENDING_PER_CALL
    }

    /// Lists a pending free as unfenced, unless it is.
    pub(crate) fn list_unfenced(&mut self, uses: &mut StreamUses, key: K) {
        if !self.closed && !std::mem::replace(&mut uses.listed, true) {
            self.unfenced.push(key);
        }
    }

    /// Queues nothing any more. Returns what was queued, to be dropped without the lock.
    pub(crate) fn close(&mut self) -> Self {
        std::mem::replace(self, Self { closed: true, ..Self::default() })
    }

    /// Queues a fence; returns it if closed.
    fn push(
        &mut self,
        stream: StreamId,
        event: PooledEvent,
        owner: Option<StreamId>,
        key: K,
    ) -> Option<(PooledEvent, K)> {
        if self.closed {
            return Some((event, key));
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.queues.entry(stream).or_default().push_back(Queued { sequence, event: Arc::new(event), owner, key });
        if let Some(owner) = owner {
            *self.by_owner.entry((owner, stream)).or_default() += 1;
        }
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

    /// The oldest fences of up to `count` streams: those after `last`, and then from the first on.
    fn oldest_after(&self, last: Option<StreamId>, count: usize) -> Vec<Fence> {
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        let wrapped = last.map(|last| self.queues.range(..=last)).into_iter().flatten();
        let streams = self.queues.range((after, Bound::Unbounded)).chain(wrapped);
        streams.take(count).filter_map(|(&stream, _)| self.oldest_of(stream)).collect()
    }

    /// The oldest fence of each stream that blocks of `owner` wait for.
    fn oldest_for(&self, owner: StreamId) -> Vec<Fence> {
        let of_owner = self.by_owner.range((owner, StreamId(0))..).take_while(|((other, _), _)| *other == owner);
        of_owner.filter_map(|(&(_, stream), _)| self.oldest_of(stream)).collect()
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

    /// The capture status of a stream. An owner to which every capture is reported can skip the driver call
    /// while there is none.
    fn capture_status(&self, stream: StreamId) -> Result<CaptureStatus> {
        CaptureStatus::of(&**self.instance().driver(), stream)
    }

    /// While the result is held, queries and waits of the calling thread invalidate no capture of another stream.
    fn capture_guard(&self) -> Result<impl Sized>;

    /// The stream that a block belongs to, if [`poll_of`] is to find it.
    fn stream_of(&self, key: &Self::Key) -> Option<StreamId> {
        let _ = key;
        None
    }

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
    let block_stream = owner.stream_of(&key);
    let mut fencing = Fencing { owner, key, streams: streams.into_iter(), done: 0, left: Vec::new() };
    let mut outcome = Ok(());
    while let Some(&stream) = fencing.streams.as_slice().first() {
        let recorded = record(owner, stream);
        fencing.streams.next();
        match recorded {
            Ok(Recorded::Fenced(event)) => {
                let key = fencing.key.clone();
                let refused = owner.with_fences(|fences| fences.push(stream, event, block_stream, key));
                drop(refused);
            }
            Ok(Recorded::AlreadyDone) => fencing.done += 1,
            Ok(Recorded::CaptureActive) => fencing.left.push(stream),
            Err(error) => {
                fencing.left.push(stream);
                outcome = outcome.and(Err(error));
            }
        }
    }
    outcome
}

/// A block in whose streams fences are being recorded. Dropped, also by a panic, recording ends: streams without a
/// fence stay with the block.
struct Fencing<'a, O: FenceOwner> {
    owner: &'a O,
    key: O::Key,
    streams: std::vec::IntoIter<StreamId>,
    done: u32,
    left: Vec<StreamId>,
}

impl<O: FenceOwner> Drop for Fencing<'_, O> {
    fn drop(&mut self) {
        self.left.extend(&mut self.streams);
        if self.owner.with_uses(&self.key, |uses| uses.end_fencing(self.done, &self.left)) {
            let refused = self.owner.with_fences(|fences| fences.push_unfenced(self.key.clone()));
            drop(refused);
        } else {
            self.owner.reclaim_if_clear(self.key.clone());
        }
    }
}

/// Leaves the fences of a freed block to the next [`retry_unfenced`]. Makes no driver call.
pub(crate) fn fence_later<O: FenceOwner>(owner: &O, key: O::Key) {
    if !owner.with_uses(&key, |uses| std::mem::replace(&mut uses.listed, true)) {
        let refused = owner.with_fences(|fences| fences.push_unfenced(key));
        drop(refused);
    }
}

/// Runs `each`, usually [`fence`], for every unfenced block; it lists again those that have to stay, also if it
/// unwinds. Stops after so many that stay: the others are the first of the next call.
pub(crate) fn retry_unfenced<O: FenceOwner>(
    owner: &O,
    stay_max: usize,
    mut each: impl FnMut(O::Key) -> Result<()>,
) -> Result<()> {
    let taken = owner.with_fences(|fences| std::mem::take(&mut fences.unfenced));
    let mut left = Unfenced { owner, keys: taken.into() };
    let mut outcome = Ok(());
    while owner.with_fences(|fences| fences.unfenced.len()) < stay_max
        && let Some(key) = left.keys.pop_front()
    {
        owner.with_uses(&key, |uses| uses.listed = false);
        outcome = outcome.and(each(key));
    }
    outcome
}

/// Unfenced blocks that a call has not looked at yet. Dropped, they are listed again.
struct Unfenced<'a, O: FenceOwner> {
    owner: &'a O,
    keys: VecDeque<O::Key>,
}

impl<O: FenceOwner> Drop for Unfenced<'_, O> {
    fn drop(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        let keys = Vec::from(std::mem::take(&mut self.keys));
        let refused = self.owner.with_fences(|fences| {
            if fences.closed {
                return keys;
            }
            let stay = std::mem::replace(&mut fences.unfenced, keys);
            fences.unfenced.extend(stay);
            Vec::new()
        });
        drop(refused);
    }
}

/// Completes the fences that have passed.
pub(crate) fn poll(owner: &impl FenceOwner) -> Result<()> {
    let oldest = owner.with_fences(|fences| fences.oldest_after(None, usize::MAX));
    poll_streams(owner, oldest).1
}

/// The same, but looks at no more than [`PENDING_PER_CALL`] streams whose oldest fence has not passed; the next call
/// goes on with the others.
pub(crate) fn poll_some(owner: &impl FenceOwner) -> Result<()> {
    let (streams, mut last) = owner.with_fences(|fences| {
        let many = fences.has_many_streams();
        (fences.queues.len(), fences.last_polled.filter(|_| many))
    });
    let (mut unseen, mut budget, mut outcome) = (streams, PENDING_PER_CALL, Ok(()));
    while unseen > 0 && budget > 0 {
        let oldest = owner.with_fences(|fences| fences.oldest_after(last, budget.min(unseen)));
        let Some(newest) = oldest.last() else { break };
        (last, unseen) = (Some(newest.stream), unseen - oldest.len());
        let (pending, polled) = poll_streams(owner, oldest);
        outcome = outcome.and(polled);
        budget -= pending.min(budget);
    }
    owner.with_fences(|fences| fences.last_polled = last);
    outcome
}

/// Completes the fences that have passed and that blocks of `stream` wait for, and others in the same streams.
pub(crate) fn poll_of(owner: &impl FenceOwner, stream: StreamId) -> Result<()> {
    let oldest = owner.with_fences(|fences| fences.oldest_for(stream));
    poll_streams(owner, oldest).1
}

/// Queries the oldest fences of some streams, and those behind each that has passed. Returns in how many streams the
/// oldest has not passed.
fn poll_streams(owner: &impl FenceOwner, mut oldest: Vec<Fence>) -> (usize, Result<()>) {
    if oldest.is_empty() {
        return (0, Ok(()));
    }
    let _guard = match owner.capture_guard() {
        Ok(guard) => guard,
        Err(error) => return (oldest.len(), Err(error)),
    };
    let (mut pending, mut outcome) = (0, Ok(()));
    while !oldest.is_empty() {
        let mut passed = Vec::new();
        for fence in oldest {
            match owner.instance().driver().event_query(fence.event.id()) {
                Ok(true) => passed.push(fence),
                Ok(false) => pending += 1,
                Err(error) => {
                    pending += 1;
                    outcome = outcome.and(Err(error.into()));
                }
            }
        }
        owner.complete(&passed);
        oldest = owner.with_fences(|fences| passed.iter().filter_map(|fence| fences.oldest_of(fence.stream)).collect());
    }
    (pending, outcome)
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use warpool_driver::decorate::{FaultPlan, Faulty};
    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{Call, CaptureMode, Captures as _, DeviceId, Pattern};
    use warpool_driver::{Copies as _, Memory as _, StreamOptions, Streams as _};

    use super::*;
    use crate::capture::RelaxedMode;

    /// Blocks by number, and the order in which they were reclaimed.
    struct Owner {
        sim: Arc<SimDriver>,
        faulty: Arc<Faulty>,
        instance: Instance,
        uses: RefCell<Vec<StreamUses>>,
        fences: RefCell<StreamFences<usize>>,
        reclaimed: RefCell<Vec<usize>>,
    }

    impl FenceOwner for Owner {
        type Key = usize;

        fn instance(&self) -> &Instance {
            &self.instance
        }

        fn capture_guard(&self) -> Result<impl Sized> {
            RelaxedMode::begin(&**self.instance.driver())
        }

        fn with_uses<R>(&self, key: &usize, act: impl FnOnce(&mut StreamUses) -> R) -> R {
            act(&mut self.uses.borrow_mut()[*key])
        }

        fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<usize>) -> R) -> R {
            act(&mut self.fences.borrow_mut())
        }

        fn complete(&self, passed: &[Fence]) {
            for fence in passed {
                let key = self.fences.borrow_mut().pop(fence);
                if let Some(key) = key {
                    self.uses.borrow_mut()[key].fence_passed();
                    self.reclaim_if_clear(key);
                }
            }
        }

        fn reclaim_if_clear(&self, key: usize) {
            if self.uses.borrow_mut()[key].take_reclaimable() {
                self.reclaimed.borrow_mut().push(key);
            }
        }
    }

    impl Owner {
        /// With paused streams that hold work, so that no fence passes by itself.
        fn new(streams: usize) -> (Self, Vec<StreamId>) {
            let sim = Arc::new(SimDriver::new(SimConfig::default()));
            let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
            let instance = Instance::new(faulty.clone()).unwrap();
            let ptr = sim.mem_alloc(DeviceId(0), 512).unwrap();
            let options = StreamOptions { non_blocking: true, priority: 0 };
            let streams: Vec<StreamId> =
                (0..streams).map(|_| sim.stream_create(DeviceId(0), options).unwrap()).collect();
            for &stream in &streams {
                sim.pause_stream(stream).unwrap();
                sim.fill(ptr, Pattern::U8(0), 1, stream).unwrap();
            }
            let (uses, fences, reclaimed) = Default::default();
            (Self { sim, faulty, instance, uses, fences, reclaimed }, streams)
        }

        /// A freed block that these streams used.
        fn freed(&self, streams: &[StreamId]) -> usize {
            let mut uses = StreamUses::of(streams.to_vec());
            uses.mark_freed();
            self.uses.borrow_mut().push(uses);
            self.uses.borrow().len() - 1
        }

        fn run(&self, stream: StreamId) {
            self.sim.run_paused(stream, u64::MAX).unwrap();
        }

        /// The blocks that [`poll`] reclaims.
        fn poll(&self) -> Vec<usize> {
            poll(self).unwrap();
            self.reclaimed.take()
        }
    }

    #[test]
    fn a_block_waits_for_all_streams_and_a_busy_stream_delays_only_its_own() {
        let (owner, streams) = Owner::new(2);
        let [both, second, none] = [owner.freed(&streams), owner.freed(&streams[1..]), owner.freed(&[])];
        [both, second, none].into_iter().for_each(|key| fence(&owner, key).unwrap());
        assert_eq!(owner.poll(), [none]);
        owner.run(streams[1]);
        assert_eq!(owner.poll(), [second]);
        owner.run(streams[0]);
        assert_eq!(owner.poll(), [both]);
        assert!(owner.fences.borrow().is_empty());
    }

    #[test]
    fn a_result_that_arrives_after_another_thread_completed_the_fence_is_dropped() {
        let (owner, streams) = Owner::new(1);
        let keys = [(); 3].map(|()| owner.freed(&streams));
        keys.into_iter().for_each(|key| fence(&owner, key).unwrap());
        let all = owner.fences.borrow().all();
        owner.complete(&all[1..2]);
        owner.complete(&all);
        assert_eq!(owner.reclaimed.take(), [1, 0, 2]);
    }

    #[test]
    fn unfenced_blocks_are_retried_after_the_capture() {
        let (owner, streams) = Owner::new(1);
        owner.run(streams[0]);
        owner.sim.resume_stream(streams[0]).unwrap();
        owner.sim.capture_begin(streams[0], CaptureMode::ThreadLocal).unwrap();
        let (now, later) = (owner.freed(&streams), owner.freed(&streams));
        fence(&owner, now).unwrap();
        fence_later(&owner, later);
        fence_later(&owner, later);
        retry_unfenced(&owner, usize::MAX, |key| fence(&owner, key)).unwrap();
        assert_eq!(owner.fences.borrow().unfenced, [now, later]);
        assert_eq!(owner.poll(), []);
        let graph = owner.sim.capture_end(streams[0]).unwrap();
        warpool_driver::Graphs::graph_destroy(&*owner.sim, graph).unwrap();
        retry_unfenced(&owner, usize::MAX, |key| fence(&owner, key)).unwrap();
        wait_all(&owner).unwrap();
        assert_eq!(owner.reclaimed.take(), [now, later]);
    }

    #[test]
    fn a_use_that_is_added_while_fences_are_recorded_is_another_use() {
        let (owner, streams) = Owner::new(1);
        let key = owner.freed(&streams);
        let recording = owner.with_uses(&key, StreamUses::begin_fencing).unwrap();
        owner.with_uses(&key, |uses| uses.add(streams[0]));
        assert!(owner.with_uses(&key, |uses| uses.end_fencing(recording.len() as u32, &[])), "to be listed");
        owner.with_fences(|fences| assert!(fences.push_unfenced(key).is_none()));
        owner.reclaim_if_clear(key);
        retry_unfenced(&owner, usize::MAX, |key| fence(&owner, key)).unwrap();
        assert_eq!(owner.poll(), []);
        owner.run(streams[0]);
        assert_eq!(owner.poll(), [key]);
        fence(&owner, key).unwrap();
        assert_eq!(owner.reclaimed.take(), [], "a reclaimed block is not fenced again");
    }

    #[test]
    fn an_error_in_one_stream_does_not_stop_the_others() {
        let (owner, streams) = Owner::new(3);
        let keys: Vec<usize> = streams.iter().map(|stream| owner.freed(std::slice::from_ref(stream))).collect();
        keys.iter().for_each(|&key| fence(&owner, key).unwrap());
        streams.iter().for_each(|&stream| owner.run(stream));
        let fail = |call| owner.faulty.set_plan(FaultPlan::new().fail_nth(call, 1, ErrorCode::LaunchFailed));
        fail(Call::EventQuery);
        assert!(poll(&owner).is_err());
        assert_eq!(owner.reclaimed.take(), [1, 2]);
        fail(Call::EventSynchronize);
        assert!(wait_all(&owner).is_err());
        assert_eq!(owner.reclaimed.take(), []);
        fail(Call::EventRecord);
        let unrecorded = owner.freed(&streams);
        assert!(fence(&owner, unrecorded).is_err());
        assert_eq!(owner.uses.borrow()[unrecorded].unfenced(), &streams[..1]);
        owner.faulty.set_plan(FaultPlan::new());
        retry_unfenced(&owner, usize::MAX, |key| fence(&owner, key)).unwrap();
        wait_all(&owner).unwrap();
        assert_eq!(owner.reclaimed.take(), [0, unrecorded]);
    }

    #[test]
    fn for_a_destroyed_stream_the_devices_are_waited_for() {
        let (owner, streams) = Owner::new(1);
        owner.sim.resume_stream(streams[0]).unwrap();
        let key = owner.freed(&streams);
        owner.sim.stream_destroy(streams[0]).unwrap();
        fence(&owner, key).unwrap();
        assert_eq!(owner.reclaimed.take(), [key]);
    }

    #[test]
    fn closed_fences_queue_nothing() {
        let (owner, streams) = Owner::new(1);
        drop(owner.fences.borrow_mut().close());
        let key = owner.freed(&streams);
        fence(&owner, key).unwrap();
        fence_later(&owner, key);
        owner.run(streams[0]);
        assert_eq!((owner.poll(), owner.fences.borrow().is_empty()), (vec![], true));
    }
}
