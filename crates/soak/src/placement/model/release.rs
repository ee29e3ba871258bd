//! What the model returns to the driver, and when.

use warpool::memory::MemPoolId;

use super::{BlockRequest, Model, Segment, State};
use crate::placement::driver_calls::DriverCalls;

impl Model {
    pub(super) fn collect_garbage(&mut self, calls: &mut DriverCalls) {
        let Some(limit) = self.rules.limit.filter(|_| self.collects()) else { return };
        let most = (limit as f64 * self.rules.garbage) as u64;
        let excess = self.reserved().saturating_sub(most);
        let mut released = 0;
        while released < excess {
            let searches = self.searches_of(MemPoolId::DEFAULT, false);
            let old: Vec<(u64, u64, u64)> = self
                .segments
                .iter()
                .filter(|segment| segment.pool.is_default() && !segment.small && segment.is_free_segment())
                .map(|segment| {
                    (searches - segment.blocks[0].freed_at_search, segment.blocks[0].at, segment.blocks[0].size)
                })
                .collect();
            let ages: u64 = old.iter().map(|&(age, ..)| age).sum();
            let Some(average) = (!old.is_empty()).then(|| ages as f64 / old.len() as f64) else { return };
            let before = released;
            for (_, base, size) in old.into_iter().filter(|&(age, ..)| age as f64 >= average) {
                released += size;
                self.release(base, calls);
            }
            if released == before {
                return;
            }
        }
    }

    pub(super) fn release(&mut self, base: u64, calls: &mut DriverCalls) {
        calls.free(base);
        self.segments.retain(|segment| segment.blocks[0].at != base);
    }

    pub(super) fn release_oversize(&mut self, request: &BlockRequest, calls: &mut DriverCalls) -> bool {
        // A private pool keeps its memory while it is in use.
        let Some(most) = self.rules.max_split.filter(|_| request.pool.is_default()) else { return false };
        let needed = request.size.max(most);
        let mut oversize: Vec<(u64, u64, u64)> = self
            .segments
            .iter()
            .filter(|segment| {
                (segment.pool, segment.small, segment.stream) == (request.pool, request.small, request.stream)
                    && segment.is_free_segment()
                    && segment.blocks[0].size >= most
            })
            .map(|segment| {
                let age = if self.rules.by_address { 0 } else { segment.age };
                (segment.blocks[0].size, age, segment.blocks[0].at)
            })
            .collect();
        oversize.sort_unstable();
        if let Some(&(_, _, base)) = oversize.iter().find(|&&(size, ..)| size >= needed) {
            self.release(base, calls);
            return true;
        }
        let mut released = 0;
        while released < needed {
            let Some((size, _, base)) = oversize.pop() else { return false };
            released += size;
            self.release(base, calls);
        }
        true
    }

    pub(super) fn release_all(&mut self, calls: &mut DriverCalls) {
        let pools: Vec<MemPoolId> =
            self.pools.iter().filter(|(id, pool)| id.is_default() || pool.uses == 0).map(|(&id, _)| id).collect();
        for pool in pools {
            self.release_pool_memory(pool, calls);
        }
    }

    pub(super) fn release_pool_memory(&mut self, pool: MemPoolId, calls: &mut DriverCalls) {
        let idle = self.segments.iter().filter(|segment| segment.pool == pool && segment.is_free_segment());
        for base in idle.map(|segment| segment.blocks[0].at).collect::<Vec<_>>() {
            self.release(base, calls);
        }
        for segment in 0..self.segments.len() {
            // A wait for a capturing stream is not possible.
            let busy = self.capturing == Some(self.segments[segment].stream);
            if self.segments[segment].pool == pool && self.segments[segment].chunk.is_some() && !busy {
                self.unmap(segment, calls);
            }
        }
        let empty = |segment: &Segment| {
            segment.pool == pool && matches!(&segment.blocks[..], [only] if only.state == State::Unmapped)
        };
        for segment in self.segments.iter().filter(|segment| empty(segment)) {
            calls.free_range(segment.blocks[0].at, segment.blocks[0].size);
        }
        self.segments.retain(|segment| !empty(segment));
        self.remove_if_unused(pool);
    }

    pub fn trim(&mut self, pool: MemPoolId, calls: &mut DriverCalls) {
        if pool.is_default() {
            self.wait_for_all();
            self.release_all(calls);
        } else if self.pools.get(&pool).is_some_and(|pool| pool.uses == 0) {
            self.wait_for_all();
            self.release_pool_memory(pool, calls);
        }
    }
}
