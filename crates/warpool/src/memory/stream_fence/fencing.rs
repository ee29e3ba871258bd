//! Recording fences for freed blocks, at the free or in a later call.
//!
//! Until the call that frees a block returns, the streams that used it exist. Later their owners may destroy them, so a
//! later call names only streams that live as long as the instance. For others it records events after all work of the
//! devices, once for all blocks of a pass.

use std::collections::VecDeque;
use std::sync::Arc;

use warpool_driver::StreamId;

use super::owner::FenceOwner;
use super::queues::{Fenced, StreamFences};
use super::record::{Recorded, record, record_devices};
use super::uses::{AfterFencing, StreamUses};
use crate::{PooledEvent, Result};

/// Records fences for a freed block in every stream that used it, and reclaims it if it needs none. Streams in which
/// none can be recorded now stay with the block, which is then listed as unfenced. For the call that frees the block.
pub(crate) fn fence<O: FenceOwner>(owner: &O, key: O::Key) -> Result<()> {
    fence_in(owner, key, None)
}

/// As [`fence`], for a block that an earlier call freed.
pub(crate) fn fence_postponed<O: FenceOwner>(owner: &O, key: O::Key, devices: &mut DeviceEvents) -> Result<()> {
    fence_in(owner, key, Some(devices))
}

/// Events after all work of the devices, recorded when a pass over blocks that earlier calls freed needs them first.
/// They are after all uses of these blocks.
#[derive(Default)]
pub(crate) struct DeviceEvents(Option<Vec<Arc<PooledEvent>>>);

impl DeviceEvents {
    /// `None` if a capture forbids them.
    pub(crate) fn record(&mut self, owner: &impl FenceOwner) -> Result<Option<&[Arc<PooledEvent>]>> {
        if self.0.is_none() {
            self.0 = record_devices(owner)?;
        }
        Ok(self.0.as_deref())
    }
}

fn fence_in<O: FenceOwner>(owner: &O, key: O::Key, mut postponed: Option<&mut DeviceEvents>) -> Result<()> {
    let Some(streams) = owner.with_uses(&key, StreamUses::begin_fencing) else { return Ok(()) };
    let block_stream = owner.stream_of(&key);
    let mut fencing = Fencing { owner, key, streams: streams.into_iter(), done: 0, left: Vec::new() };
    let mut outcome = Ok(());
    let mut waits_for_devices = false;
    while let Some(&stream) = fencing.streams.as_slice().first() {
        if let Some(devices) = &mut postponed
            && !owner.instance().may_name(stream)
            && !crate::defect::Defect::PostponedFenceNamesStream.is_on()
        {
            let events = if waits_for_devices { Ok(Some(&[][..])) } else { devices.record(owner) };
            fencing.streams.next();
            match events {
                Ok(Some(events)) => {
                    fencing.queue_for_devices(events);
                    waits_for_devices = true;
                }
                Ok(None) => fencing.left.push(stream),
                Err(error) => {
                    fencing.left.push(stream);
                    outcome = outcome.and(Err(error));
                }
            }
            continue;
        }
        let recorded = record(owner, stream);
        fencing.streams.next();
        match recorded {
            Ok(Recorded::Fenced(_))
                if crate::defect::Defect::FenceSharesOlderEvent.is_on()
                    && owner.with_fences(|fences| fences.oldest_of(Fenced::Stream(stream)).is_some()) =>
            {
                fencing.done += 1;
            }
            Ok(Recorded::Fenced(event)) => {
                let key = fencing.key.clone();
                let refused =
                    owner.with_fences(|fences| fences.push(Fenced::Stream(stream), event.into(), block_stream, key));
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

/// A block in whose streams fences are being recorded. Dropping it, also by a panic, ends the recording: streams
/// without a fence stay with the block.
struct Fencing<'a, O: FenceOwner> {
    owner: &'a O,
    key: O::Key,
    streams: smallvec::IntoIter<[StreamId; 2]>,
    done: u32,
    left: Vec<StreamId>,
}

impl<O: FenceOwner> Fencing<'_, O> {
    /// These events take the place of a fence in one stream.
    fn queue_for_devices(&mut self, events: &[Arc<PooledEvent>]) {
        self.done += 1;
        self.owner.with_uses(&self.key, |uses| uses.add_outstanding(events.len() as u32));
        let block_stream = self.owner.stream_of(&self.key);
        for event in events {
            let (fenced, key) = (Fenced::Device(event.device_id()), self.key.clone());
            let refused = self.owner.with_fences(|fences| fences.push(fenced, Arc::clone(event), block_stream, key));
            drop(refused);
        }
    }
}

impl<O: FenceOwner> Drop for Fencing<'_, O> {
    fn drop(&mut self) {
        self.left.extend(&mut self.streams);
        match self.owner.with_uses(&self.key, |uses| uses.end_fencing(self.done, &self.left)) {
            AfterFencing::List => {
                let refused = self.owner.with_fences(|fences| fences.push_unfenced(self.key.clone()));
                drop(refused);
            }
            AfterFencing::Reclaim => self.owner.reclaim_if_clear(self.key.clone()),
            AfterFencing::Wait => {}
        }
    }
}

/// Leaves the fences of a freed block to the next [`retry_unfenced`]. Makes no driver call.
pub(crate) fn fence_later<O: FenceOwner>(owner: &O, key: O::Key) {
    if owner.with_uses(&key, StreamUses::list) {
        let refused = owner.with_fences(|fences| fences.push_unfenced(key));
        drop(refused);
    }
}

/// Runs `each`, usually [`fence_postponed`], for every unfenced block. `each` lists a block again if it stays unfenced,
/// also when it unwinds. Stops after `stay_max` blocks stay unfenced; the next call starts with the rest.
pub(crate) fn retry_unfenced<O: FenceOwner>(
    owner: &O,
    stay_max: usize,
    mut each: impl FnMut(O::Key, &mut DeviceEvents) -> Result<()>,
) -> Result<()> {
    let taken = owner.with_fences(StreamFences::take_unfenced);
    let mut devices = DeviceEvents::default();
    let mut left = Unfenced { owner, keys: taken.into() };
    let mut outcome = Ok(());
    while owner.with_fences(|fences| fences.unfenced().len()) < stay_max
        && let Some(key) = left.keys.pop_front()
    {
        owner.with_uses(&key, StreamUses::unlist);
        outcome = outcome.and(each(key, &mut devices));
    }
    outcome
}

/// Unfenced blocks that a call has not processed yet. Dropping it lists them again.
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
        let refused = self.owner.with_fences(|fences| fences.return_unfenced(keys));
        drop(refused);
    }
}
