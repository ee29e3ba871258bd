//! What only programs over the paged allocator on small devices do: sizes around those of pages, so that blocks and
//! pages overlap in all ways and heaps take pages from each other, trims to a target, and the check that memory runs
//! out only if it is short.

use std::time::Duration;

use warpool::driver::DeviceId;
use warpool::memory::raw::Request;
use warpool::memory::{DeviceAllocator as _, MemPoolId, PagedAllocator, Settings};

use super::Run;
use super::pools::Pool;
use crate::machine::{Outcome, device_id};
use crate::rng::Rng;

const MIB: u64 = 1 << 20;
/// The smallest page.
const SLOT: u64 = 2 * MIB;

/// The sizes that a program requests.
pub enum Sizes {
    /// Those of the caching allocator's classes.
    Classes,
    /// Around those of pages, on a device of this size.
    Any(u64),
    /// Mostly the same few, as real programs do: pages go back and forth.
    Few(u64, Vec<u64>),
}

impl Sizes {
    pub fn draw(rng: &mut Rng, capacity: u64) -> Self {
        if rng.one_in(2) {
            return Self::Any(capacity);
        }
        Self::Few(capacity, (0..3 + rng.below(4)).map(|_| draw_bytes(rng, capacity / 2)).collect())
    }

    pub fn next(&self, rng: &mut Rng) -> u64 {
        match self {
            Self::Classes => rng.request_bytes(),
            Self::Few(_, sizes) if !rng.one_in(8) => rng.pick(sizes),
            Self::Any(capacity) | Self::Few(capacity, _) => draw_bytes(rng, *capacity),
        }
    }
}

fn draw_bytes(rng: &mut Rng, capacity: u64) -> u64 {
    match rng.below(24) {
        0..4 => rng.u64_in(1..=64 << 10),
        4..8 => rng.u64_in(1..=MIB),
        8..14 => rng.u64_in(MIB + 1..=6 * MIB),
        14..18 => 2 * MIB * rng.u64_in(1..=6),
        18..23 => rng.u64_in(6 * MIB..=capacity / 3),
        _ => rng.u64_in(capacity / 3..=capacity),
    }
}

impl Run<'_> {
    pub fn page_step(&mut self) {
        self.decay();
        match self.context.rng.below(64) {
            0..22 => self.allocate(),
            22..24 => self.check_tag(),
            24..29 => self.use_elsewhere(),
            29..46 => self.free(),
            46 => self.trim(),
            47 => self.trim_to(),
            48..51 => self.change_pools(),
            51 => self.change_scopes(),
            52 => self.change_page_limit(),
            53..55 => self.capture(),
            55..59 => self.replay(),
            59 => self.drop_graph(),
            60 if self.context.rng.one_in(2) => self.read_state(),
            60 => self.invalid_calls(),
            // So that frees are pending when memory runs out.
            61 | 62 => self.delay_work(),
            63 if self.context.rng.one_in(2) => self.change_use_on_oom(),
            _ => self.synchronize(),
        }
    }

    /// In some programs pages decay. Memory is idle after a millisecond of virtual time.
    pub fn begin_decay(&mut self) {
        let Some(paged) = self.subject.paged.clone().filter(|_| self.decays) else { return };
        self.context.step("pages decay");
        let settings = paged.settings().as_ref().clone();
        paged.set_settings(Settings { idle_decay_ms: Some(1), ..settings }).unwrap();
    }

    fn decay(&mut self) {
        let Some(paged) = self.subject.paged.clone().filter(|_| self.decays) else { return };
        let micros = self.context.rng.pick(&[50, 200, 2000]);
        self.machine.sim.pass_time(Duration::from_micros(micros));
        if self.context.rng.one_in(2) {
            self.context.step(format!("after {micros} us idle pages are released"));
            let released = self.machine.call(self.context, || paged.release_idle(device_id(0)));
            if matches!(released, Outcome::Done(1..)) {
                self.context.made("decay");
            }
        }
    }

    fn trim_to(&mut self) {
        let Some(paged) = self.subject.paged.clone() else { return };
        let target = self.context.rng.u64_below(self.limit_of_pages);
        self.context.step(format!("trim to {target}"));
        let _ = self.machine.call(self.context, || paged.trim_to(device_id(0), target));
    }

    fn change_page_limit(&mut self) {
        let Some(paged) = &self.subject.paged else { return };
        self.limit_of_pages = self.capacity_of_pages / 4 * self.context.rng.u64_in(2..=4);
        self.context.step(format!("at most {} bytes", self.limit_of_pages));
        paged.set_memory_cap(device_id(0), Some(self.limit_of_pages)).unwrap();
    }

    fn change_use_on_oom(&mut self) {
        if self.pools.is_empty() {
            return;
        }
        let (at, on) = (self.context.rng.below(self.pools.len()), self.context.rng.one_in(2));
        let pool = self.pools[at].id();
        self.context.step(format!("pool {pool} is used before memory runs out: {on}"));
        self.subject.allocator.pools().unwrap().set_use_on_oom(device_id(0), pool, on).unwrap();
        self.pools[at].set_used_on_oom(on);
    }

    /// A request ran out of memory, without a fault, while free pages of the default pool and of pools that are used
    /// before memory runs out were its own to take. So nothing of them is left, and the pages that remain are in use or
    /// of other pools: with the request in slots of their own they are more than the limit. Captures keep pages, and a
    /// stream that captures gets none of other heaps.
    pub fn expect_shortage(&mut self, request: Request) {
        let Some(paged) = self.subject.paged.clone() else { return };
        if !self.is_of_pages() || !self.capturing.is_empty() {
            return;
        }
        if self.context.rng.one_in(2) {
            let pools = self.pools.iter().filter(|pool| pool.is_used_on_oom()).map(Pool::id);
            for pool in [MemPoolId::DEFAULT].into_iter().chain(pools) {
                paged.trim(device_id(0), pool).unwrap();
            }
            let left = paged.page_stats(device_id(0)).unwrap().reserved_bytes;
            let (needed, limit) = (request.bytes.next_multiple_of(SLOT), self.limit_of_pages);
            assert!(left + needed > limit, "{left} bytes are left, {needed} were needed, and {limit} may be reserved");
            let again = paged.allocate_raw(request);
            assert!(again.is_err(), "after all free pages were returned there was memory: {again:?}");
            self.table.out_of_memory(0);
            self.context.made("shortage");
        }
        for _ in 0..self.context.rng.below(4) {
            self.free();
        }
    }
}

/// Every byte of a page is active, free, or spare.
pub fn check_pages(paged: &PagedAllocator, device: DeviceId) {
    let (stats, pages) = (paged.stats(device).unwrap(), paged.page_stats(device).unwrap());
    assert_eq!(pages.active_bytes, stats.active_bytes.all.current, "active on {device}");
    let sum = pages.active_bytes + pages.free_mapped_bytes + pages.spare_bytes;
    assert_eq!((sum, pages.reserved_bytes), (pages.reserved_bytes, stats.reserved_bytes.all.current), "{pages:?}");
}
