//! What the model gives back to the driver, and when.

use warpool::memory::MemPoolId;

use super::super::script::Script;
use super::{Model, Segment, Standing, Want};

impl Model {
    pub(super) fn collect_garbage(&mut self, script: &mut Script) {
        let Some(limit) = self.rules.limit.filter(|_| self.collects()) else { return };
        let most = (limit as f64 * self.rules.garbage) as u64;
        let excess = self.reserved().saturating_sub(most);
        let mut gone = 0;
        while gone < excess {
            let searches = self.searches_of(MemPoolId::DEFAULT, false);
            let old: Vec<(u64, u64, u64)> = self
                .segments
                .iter()
                .filter(|segment| segment.pool.is_default() && !segment.small && segment.is_idle())
                .map(|segment| (searches - segment.pieces[0].born, segment.pieces[0].at, segment.pieces[0].size))
                .collect();
            let ages: u64 = old.iter().map(|&(age, ..)| age).sum();
            let Some(average) = (!old.is_empty()).then(|| ages as f64 / old.len() as f64) else { return };
            let before = gone;
            for (_, base, size) in old.into_iter().filter(|&(age, ..)| age as f64 >= average) {
                gone += size;
                self.release(base, script);
            }
            if gone == before {
                return;
            }
        }
    }

    pub(super) fn release(&mut self, base: u64, script: &mut Script) {
        script.free(base);
        self.segments.retain(|segment| segment.pieces[0].at != base);
    }

    pub(super) fn release_oversize(&mut self, want: &Want, script: &mut Script) -> bool {
        // The memory of a private pool stays with it for as long as the pool is used.
        let Some(most) = self.rules.max_split.filter(|_| want.pool.is_default()) else { return false };
        let needed = want.size.max(most);
        let mut oversize: Vec<(u64, u64, u64)> = self
            .segments
            .iter()
            .filter(|segment| {
                (segment.pool, segment.small, segment.stream) == (want.pool, want.small, want.stream)
                    && segment.is_idle()
                    && segment.pieces[0].size >= most
            })
            .map(|segment| {
                let age = if self.rules.by_address { 0 } else { segment.age };
                (segment.pieces[0].size, age, segment.pieces[0].at)
            })
            .collect();
        oversize.sort_unstable();
        if let Some(&(_, _, base)) = oversize.iter().find(|&&(size, ..)| size >= needed) {
            self.release(base, script);
            return true;
        }
        let mut gone = 0;
        while gone < needed {
            let Some((size, _, base)) = oversize.pop() else { return false };
            gone += size;
            self.release(base, script);
        }
        true
    }

    pub(super) fn release_all(&mut self, script: &mut Script) {
        let pools: Vec<MemPoolId> =
            self.pools.iter().filter(|(id, pool)| id.is_default() || pool.uses == 0).map(|(&id, _)| id).collect();
        for pool in pools {
            self.release_pool_memory(pool, script);
        }
    }

    pub(super) fn release_pool_memory(&mut self, pool: MemPoolId, script: &mut Script) {
        let idle = self.segments.iter().filter(|segment| segment.pool == pool && segment.is_idle());
        for base in idle.map(|segment| segment.pieces[0].at).collect::<Vec<_>>() {
            self.release(base, script);
        }
        for segment in 0..self.segments.len() {
            // Nobody can wait for a stream that captures.
            let busy = self.capturing == Some(self.segments[segment].stream);
            if self.segments[segment].pool == pool && self.segments[segment].chunk.is_some() && !busy {
                self.unmap(segment, script);
            }
        }
        let empty = |segment: &Segment| {
            segment.pool == pool && matches!(&segment.pieces[..], [only] if only.standing == Standing::Unmapped)
        };
        for segment in self.segments.iter().filter(|segment| empty(segment)) {
            script.free_range(segment.pieces[0].at, segment.pieces[0].size);
        }
        self.segments.retain(|segment| !empty(segment));
        self.forget(pool);
    }

    pub fn trim(&mut self, pool: MemPoolId, script: &mut Script) {
        if pool.is_default() {
            self.wait_for_all();
            self.release_all(script);
        } else if self.pools.get(&pool).is_some_and(|pool| pool.uses == 0) {
            self.wait_for_all();
            self.release_pool_memory(pool, script);
        }
    }
}
