//! Completing fences that have passed, by polling or by waiting for all of them.

use warpool_driver::StreamId;

use super::owner::FenceOwner;
use super::queues::{Fence, PENDING_PER_CALL};
use crate::Result;

/// Completes the fences that have passed.
pub(crate) fn poll(owner: &impl FenceOwner) -> Result<()> {
    let oldest = owner.with_fences(|fences| fences.oldest_after(None, usize::MAX));
    poll_streams(owner, oldest).1
}

/// As [`poll`], but stops after [`PENDING_PER_CALL`] streams whose oldest fence has not passed; the next call continues
/// with the other streams.
pub(crate) fn poll_some(owner: &impl FenceOwner) -> Result<()> {
    let (mut unseen, mut last) = owner.with_fences(|fences| fences.poll_position());
    let (mut budget, mut outcome) = (PENDING_PER_CALL, Ok(()));
    while unseen > 0 && budget > 0 {
        let oldest = owner.with_fences(|fences| fences.oldest_after(last, budget.min(unseen)));
        let Some(newest) = oldest.last() else { break };
        (last, unseen) = (Some(newest.fenced), unseen - oldest.len());
        let (pending, polled) = poll_streams(owner, oldest);
        outcome = outcome.and(polled);
        budget -= pending.min(budget);
    }
    owner.with_fences(|fences| fences.set_last_polled(last));
    outcome
}

/// Completes the fences that have passed and that blocks of `stream` wait for, and others in the same streams.
pub(crate) fn poll_of(owner: &impl FenceOwner, stream: StreamId) -> Result<()> {
    let oldest = owner.with_fences(|fences| fences.oldest_for(stream));
    poll_streams(owner, oldest).1
}

/// Queries the oldest fence of each of these streams, and the next ones while they have passed. Returns in how many
/// streams the oldest has not passed.
fn poll_streams(owner: &impl FenceOwner, oldest: Vec<Fence>) -> (usize, Result<()>) {
    if oldest.is_empty() {
        return (0, Ok(()));
    }
    let _guard = match owner.capture_guard() {
        Ok(guard) => guard,
        Err(error) => return (oldest.len(), Err(error)),
    };
    let (mut pending, mut outcome) = (0, Ok(()));
    for oldest in oldest {
        let mut next = Some(oldest);
        while let Some(fence) = next.take() {
            match owner.instance().driver().event_query(fence.event.id()) {
                Ok(false) if crate::defect::Defect::PollForgetsToAsk.is_on() => owner.complete(&fence),
                Ok(true) => {
                    owner.complete(&fence);
                    next = owner.with_fences(|fences| fences.oldest_of(fence.fenced));
                }
                Ok(false) => pending += 1,
                Err(error) => {
                    pending += 1;
                    outcome = outcome.and(Err(error.into()));
                }
            }
        }
    }
    (pending, outcome)
}

/// Waits for all fences that are queued now, and completes them.
pub(crate) fn wait_all(owner: &impl FenceOwner) -> Result<()> {
    let all = owner.with_fences(|fences| fences.all());
    let _guard = owner.capture_guard()?;
    let (mut failed, mut outcome) = (None, Ok(()));
    // Waits for each fence: that the last one of a stream has passed says nothing about the others.
    for fence in all {
        if failed == Some(fence.fenced) {
            continue;
        }
        match owner.instance().driver().event_synchronize(fence.event.id()) {
            Ok(()) => owner.complete(&fence),
            Err(error) => {
                failed = Some(fence.fenced);
                outcome = outcome.and(Err(error.into()));
            }
        }
    }
    outcome
}
