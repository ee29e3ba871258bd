//! Pools that a call puts to sleep or wakes. Nothing is allocated from them meanwhile, and all of them are in the same
//! state afterwards, even after an error or a panic.

use std::sync::Arc;

use super::shared::{Shared, TagPool};
use crate::error::SleepCall;
use crate::memory::mapped_segments::{Contents, Phase, Sleeping};
use crate::memory::{Asleep, HostBlock};

/// Pools between two states. If it is dropped before the call is [complete](Self::complete), also by a panic, the pools
/// return to their previous state; but they are asleep if any memory or contents are missing, or if copies may still
/// use them.
pub(super) struct Changing<'a> {
    shared: &'a Shared,
    pub(super) pools: Vec<ChangingPool<'a>>,
    call: SleepCall,
    is_complete: bool,
}

pub(super) struct ChangingPool<'a> {
    pub(super) pool: &'a TagPool,
    /// The state of the pool if it is asleep when the call ends.
    pub(super) sleeping: Sleeping,
}

impl<'a> Changing<'a> {
    /// Begins `call`. `keeps_contents` applies to pools that are awake.
    pub(super) fn begin(shared: &'a Shared, pools: &[&'a TagPool], call: SleepCall, keeps_contents: bool) -> Self {
        let since_us = shared.now_us();
        let begin = |pool: &&'a TagPool| {
            let sleeping = match pool.segments.phase() {
                Phase::Asleep(sleeping) => sleeping,
                Phase::Awake | Phase::Changing => Sleeping { keeps_contents, since_us, saved: Vec::new() },
            };
            pool.segments.set_phase(Phase::Changing);
            ChangingPool { pool, sleeping }
        };
        let changing = Self { shared, pools: pools.iter().map(begin).collect(), call, is_complete: false };
        for ChangingPool { pool, .. } in &changing.pools {
            changing.set_asleep(pool, Some(pool.segments.asleep()));
        }
        changing
    }

    fn set_asleep(&self, pool: &TagPool, asleep: Option<Asleep>) {
        // This fails only for a device that does not exist.
        let _ = self.shared.pool_sleep().set_asleep(pool.device(), pool.id, asleep);
    }

    /// Keeps host memory with contents of a pool.
    pub(super) fn keep(&mut self, at: usize, pieces: &[Arc<HostBlock>]) {
        self.pools[at].sleeping.saved.extend(pieces.iter().cloned());
    }

    /// Ends a call that succeeded.
    pub(super) fn complete(mut self) {
        self.is_complete = true;
    }

    /// Whether all segments have their memory, mapped, with their contents, and no copy uses it.
    fn is_all_there(&self) -> bool {
        let is_there = |pool: &ChangingPool<'_>| {
            let segments = pool.pool.segments.segments();
            let is_used = pool.pool.segments.is_used_by_copies();
            !is_used
                && segments.iter().all(|segment| {
                    segment.physical.is_some() && segment.has_access && segment.contents == Contents::Present
                })
        };
        self.pools.iter().all(is_there)
    }
}

impl Drop for Changing<'_> {
    /// Makes no driver call.
    fn drop(&mut self) {
        let awake = match self.call {
            SleepCall::Sleep => !self.is_complete && self.is_all_there(),
            SleepCall::Wake => self.is_complete,
        };
        for at in 0..self.pools.len() {
            let ChangingPool { pool, sleeping } = &self.pools[at];
            if awake {
                pool.segments.set_phase(Phase::Awake);
                self.set_asleep(pool, None);
            } else {
                pool.segments.set_phase(Phase::Asleep(sleeping.clone()));
                self.set_asleep(pool, Some(pool.segments.asleep()));
            }
        }
    }
}
