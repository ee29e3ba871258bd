//! Steps with private pools, scopes and trims.

use std::sync::Arc;

use warpool::memory::pools::{PoolOptions, PoolScope, Route};
use warpool::memory::{MemPool, MemPoolId};
use warpool::{Error, Result};

use super::Run;
use crate::allocators::SimMemory;
use crate::machine::device_id;

/// A pool that the program owns.
pub struct Pool {
    device: usize,
    pool: MemPool,
    is_used_on_oom: bool,
}

impl Pool {
    pub fn id(&self) -> MemPoolId {
        self.pool.id()
    }

    /// Whether requests get its memory before they run out.
    pub fn is_used_on_oom(&self) -> bool {
        self.is_used_on_oom
    }

    pub fn set_used_on_oom(&mut self, on: bool) {
        self.is_used_on_oom = on;
    }

    /// Whether it has memory of that device.
    pub fn serves(&self, device: usize) -> bool {
        self.device == device
    }
}

impl Run<'_> {
    pub fn trim(&mut self) {
        let device = self.context.rng.below(self.devices);
        let mut pools = vec![MemPoolId::DEFAULT; 2];
        pools.extend(self.pools.iter().filter(|pool| pool.serves(device)).map(Pool::id));
        let pool = self.context.rng.pick(&pools);
        self.context.step(format!("trim {pool} of device {device}"));
        let allocator = &self.subject.allocator;
        let _ = self.machine.call(self.context, || allocator.trim(device_id(device), pool));
    }

    pub fn change_pools(&mut self) {
        if !self.subject.has_pools() {
            return;
        }
        if self.pools.len() < 3 && self.context.rng.one_in(2) {
            self.create_pool();
        } else if !self.pools.is_empty() {
            let at = self.context.rng.below(self.pools.len());
            let Pool { pool, .. } = self.pools.swap_remove(at);
            let close = self.context.rng.one_in(2);
            self.context.step(format!("pool {} is released, and closed: {close}", pool.id()));
            let _ = self.machine.call(self.context, || {
                if close {
                    return pool.close();
                }
                drop(pool);
                Ok(())
            });
        }
    }

    fn create_pool(&mut self) {
        let device = self.context.rng.below(self.devices);
        let rng = &mut self.context.rng;
        let with_upstream = self.subject.caching.is_some() && rng.one_in(4);
        let upstream = with_upstream.then(|| Arc::new(SimMemory::new(&self.machine)) as _);
        // Pools of whole segments have no pages.
        let (use_on_oom, no_split) = (rng.one_in(2), rng.one_in(3) && self.capacity_of_pages == 0);
        let options = PoolOptions { upstream, use_on_oom, no_split, ..PoolOptions::default() };
        let pool = MemPool::new(&self.subject.allocator, &self.machine.device(device), options).unwrap();
        self.context.step(format!("pool {} of device {device}, with an upstream: {with_upstream}", pool.id()));
        self.context.made("pool");
        self.pools.push(Pool { device, pool, is_used_on_oom: use_on_oom });
    }

    pub fn change_scopes(&mut self) {
        if !self.scopes.is_empty() && self.context.rng.one_in(2) {
            let at = self.context.rng.below(self.scopes.len());
            self.context.step(format!("{:?} is closed", self.scopes[at]));
            drop(self.scopes.swap_remove(at));
        } else if !self.pools.is_empty() {
            let at = self.context.rng.below(self.pools.len());
            match self.open_scope(at) {
                Ok(scope) => {
                    self.context.step(format!("{scope:?} is opened"));
                    self.scopes.push(scope);
                }
                Err(Error::AlreadyRouting { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn open_scope(&mut self, at: usize) -> Result<PoolScope> {
        let Pool { device, pool, .. } = &self.pools[at];
        match self.context.rng.below(2) {
            0 => pool.enter(),
            _ => {
                let stream = self.machine.stream(*device, self.context.rng.below(self.streams));
                pool.route(Route::Stream(stream.id()))
            }
        }
    }
}
