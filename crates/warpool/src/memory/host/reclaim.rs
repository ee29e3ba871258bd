//! Freed blocks that streams may still use. Each waits for a fence in every such stream ([`stream_fence`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::DeviceId;

use super::Shared;
use super::block::PinnedBlock;
use super::history::Details;
use super::pin::PinnedRange;
use crate::memory::StackLevel;
use crate::memory::stream_fence::{self, FenceOwner, StreamFences, StreamUses};
use crate::{Instance, Result, lock};

/// Work that is left to later calls.
#[derive(Default)]
pub(super) struct Pending {
    pub(super) fences: StreamFences<Arc<PinnedBlock>>,
    /// Segments that are not to be kept.
    pub(super) to_unpin: Vec<u64>,
    /// Memory that was pinned and cannot be used, and that could not be unpinned at once. It counts against the caps.
    pub(super) unusable: Vec<(DeviceId, PinnedRange)>,
}

impl Pending {
    fn is_empty(&self) -> bool {
        self.fences.is_empty() && self.to_unpin.is_empty() && self.unusable.is_empty()
    }
}

/// [`Pending`] under a lock, with a flag that is read without the lock. On cache lines of its own: every free of a used
/// block writes here, and every call reads the neighbouring fields.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct PendingWork {
    pending: Mutex<Pending>,
    any: AtomicBool,
}

impl PendingWork {
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Pending) -> R) -> R {
        let mut pending = lock(&self.pending);
        let result = act(&mut pending);
        self.any.store(!pending.is_empty(), Ordering::Release);
        result
    }

    fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }
}

impl Shared {
    pub(super) fn has_pending_frees(&self) -> bool {
        self.pending.with(|pending| !pending.fences.is_empty())
    }

    /// Records fences that destructors left, reclaims blocks whose fences have passed, and unpins segments that are not
    /// to be kept.
    pub(super) fn process_pending(&self) -> Result<()> {
        let details = Details::default();
        let outcome = self.process_pending_recorded(&details);
        details.finish();
        outcome
    }

    /// As [`process_pending`](Self::process_pending), in a call with these details, which keep the panics of observers.
    pub(super) fn process_pending_recorded(&self, details: &Details) -> Result<()> {
        if self.pending.is_empty() { Ok(()) } else { self.process_all(&mut 0, details) }
    }

    /// Does this even if the flag says that nothing is pending, and adds the unpinned bytes to `unpinned`.
    pub(super) fn process_all(&self, unpinned: &mut u64, call: &Details) -> Result<()> {
        // History entries of frees have their own stack level.
        let details = self.details(StackLevel::All);
        let fenced = self.retry_unfenced(&details);
        let polled = stream_fence::poll(&Reclaimer { shared: self, details: &details });
        let outcome = fenced.and(polled).and(self.unpin_listed(unpinned, &details));
        call.take_panic(details);
        outcome
    }

    /// Waits for all fences.
    pub(super) fn wait_for_fences(&self, details: &Details) -> Result<()> {
        let fenced = self.retry_unfenced(details);
        fenced.and(stream_fence::wait_all(&Reclaimer { shared: self, details }))
    }

    /// Records fences for a freed block. Fences that fail, or that a capture forbids, are retried by later calls.
    pub(super) fn fence(&self, block: Arc<PinnedBlock>, details: &Details) -> Result<()> {
        let outcome = stream_fence::fence(&Reclaimer { shared: self, details }, block);
        self.background.wake();
        outcome
    }

    /// Leaves the fences of a freed block to the next call that may call the driver.
    pub(super) fn fence_later(&self, block: Arc<PinnedBlock>, details: &Details) {
        stream_fence::fence_later(&Reclaimer { shared: self, details }, block);
        self.background.wake();
    }

    fn retry_unfenced(&self, details: &Details) -> Result<()> {
        let owner = Reclaimer { shared: self, details };
        stream_fence::retry_unfenced(&owner, usize::MAX, |block, devices| {
            stream_fence::fence_postponed(&owner, block, devices)
        })
    }
}

struct Reclaimer<'a> {
    shared: &'a Shared,
    details: &'a Details,
}

impl FenceOwner for Reclaimer<'_> {
    type Key = Arc<PinnedBlock>;

    fn instance(&self) -> &Instance {
        &self.shared.instance
    }

    fn with_uses<R>(&self, block: &Arc<PinnedBlock>, act: impl FnOnce(&mut StreamUses) -> R) -> R {
        act(&mut lock(&block.usage).streams)
    }

    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<Arc<PinnedBlock>>) -> R) -> R {
        self.shared.pending.with(|pending| act(&mut pending.fences))
    }

    fn reclaim_if_clear(&self, block: Arc<PinnedBlock>) {
        let reclaimable = lock(&block.usage).take_reclaimable();
        if reclaimable {
            self.shared.complete_free(block, self.details);
        }
    }
}
