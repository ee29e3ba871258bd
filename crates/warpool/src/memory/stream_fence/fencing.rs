//! Recording fences for freed blocks, at the free or in a later call.

use std::collections::VecDeque;

use warpool_driver::StreamId;

use super::owner::FenceOwner;
use super::queues::StreamFences;
use super::record::{Recorded, record, wait_for_devices};
use super::uses::{AfterFencing, StreamUses};
use crate::Result;

/// Records fences for a freed block in every stream that used it, and reclaims it if it needs none. Streams in which
/// none can be recorded now stay with the block, which is then listed as unfenced. For the call that frees the block:
/// until it returns, the streams exist.
pub(crate) fn fence<O: FenceOwner>(owner: &O, key: O::Key) -> Result<()> {
    fence_in(owner, key, |owner, stream| record(owner, stream).map(Some))
}

/// As [`fence`], for a block that was freed by an earlier call. Streams that their owners may have destroyed since then
/// are not named: [`wait_for_unnamed`] waits for their work.
pub(crate) fn fence_postponed<O: FenceOwner>(owner: &O, key: O::Key) -> Result<()> {
    fence_in(owner, key, |owner, stream| {
        let may_name =
            owner.instance().is_known_to_keep(stream) || crate::defect::Defect::PostponedFenceNamesStream.is_on();
        if may_name { record(owner, stream).map(Some) } else { Ok(None) }
    })
}

/// `record` returns `None` for a stream that must not be named.
fn fence_in<O: FenceOwner>(
    owner: &O,
    key: O::Key,
    record: impl Fn(&O, StreamId) -> Result<Option<Recorded>>,
) -> Result<()> {
    let Some(streams) = owner.with_uses(&key, StreamUses::begin_fencing) else { return Ok(()) };
    let block_stream = owner.stream_of(&key);
    let mut fencing = Fencing { owner, key, streams: streams.into_iter(), done: 0, left: Vec::new() };
    let mut outcome = Ok(());
    while let Some(&stream) = fencing.streams.as_slice().first() {
        let recorded = record(owner, stream);
        fencing.streams.next();
        match recorded {
            Ok(Some(Recorded::Fenced(_)))
                if crate::defect::Defect::FenceSharesOlderEvent.is_on()
                    && owner.with_fences(|fences| fences.oldest_of(stream).is_some()) =>
            {
                fencing.done += 1;
            }
            Ok(Some(Recorded::Fenced(event))) => {
                let key = fencing.key.clone();
                let refused = owner.with_fences(|fences| fences.push(stream, event, block_stream, key));
                drop(refused);
            }
            Ok(Some(Recorded::AlreadyDone)) => fencing.done += 1,
            Ok(Some(Recorded::CaptureActive)) => fencing.left.push(stream),
            Ok(None) => {
                let key = fencing.key.clone();
                let refused = owner.with_fences(|fences| fences.push_unnamed(key));
                drop(refused);
            }
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
    mut each: impl FnMut(O::Key) -> Result<()>,
) -> Result<()> {
    let taken = owner.with_fences(StreamFences::take_unfenced);
    let mut left = Unfenced { owner, keys: taken.into() };
    let mut outcome = Ok(());
    while owner.with_fences(|fences| fences.unfenced().len()) < stay_max
        && let Some(key) = left.keys.pop_front()
    {
        owner.with_uses(&key, StreamUses::unlist);
        outcome = outcome.and(each(key));
    }
    outcome
}

/// If blocks wait for streams that may be destroyed, waits for all work of all devices, and reclaims them. Returns
/// whether it did. A capture forbids it.
pub(crate) fn wait_for_unnamed(owner: &impl FenceOwner) -> Result<bool> {
    let taken = owner.with_fences(StreamFences::take_unnamed);
    if taken.is_empty() {
        return Ok(false);
    }
    let mut left = Unnamed { owner, keys: taken };
    if owner.has_captures() || !wait_for_devices(owner.instance())? {
        return Ok(false);
    }
    while let Some(key) = left.keys.pop() {
        owner.with_uses(&key, StreamUses::fence_passed);
        owner.reclaim_if_clear(key);
    }
    Ok(true)
}

/// Blocks that wait for streams that may be destroyed, taken out of the fences. Dropping it puts the rest back.
struct Unnamed<'a, O: FenceOwner> {
    owner: &'a O,
    keys: Vec<O::Key>,
}

impl<O: FenceOwner> Drop for Unnamed<'_, O> {
    fn drop(&mut self) {
        for key in std::mem::take(&mut self.keys) {
            let refused = self.owner.with_fences(|fences| fences.push_unnamed(key));
            drop(refused);
        }
    }
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
