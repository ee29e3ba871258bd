//! Recording fences for freed blocks, at the free or in a later call.

use std::collections::VecDeque;

use warpool_driver::StreamId;

use super::owner::FenceOwner;
use super::queues::StreamFences;
use super::record::{Recorded, record};
use super::uses::{AfterFencing, StreamUses};
use crate::Result;

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
            Ok(Recorded::Fenced(_))
                if crate::defect::Defect::FenceSharesOlderEvent.is_on()
                    && owner.with_fences(|fences| fences.oldest_of(stream).is_some()) =>
            {
                fencing.done += 1;
            }
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

/// Runs `each`, usually [`fence`], for every unfenced block. `each` lists a block again if it stays unfenced, also when
/// it unwinds. Stops after `stay_max` blocks stay unfenced; the next call starts with the rest.
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
