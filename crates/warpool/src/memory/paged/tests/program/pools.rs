//! Steps with private pools and the scopes that route to them.

use std::sync::Arc;

use super::super::machine::DEVICE;
use super::{Run, STREAMS};
use crate::Error;
use crate::memory::{DeviceAllocator, MemPool, MemPoolId, PoolOptions, PoolScope, PrivatePools as _, Route};

#[derive(Default)]
pub struct Pools {
    pub ids: Vec<MemPoolId>,
    pub scopes: Vec<PoolScope>,
    created: u64,
}

impl Pools {
    pub fn were_used(&self) -> bool {
        self.created > 0
    }
}

impl Run<'_> {
    pub fn change_pools(&mut self) {
        if self.pools.ids.len() < 3 && self.rng.one_in(2) {
            let options = PoolOptions { upstream: None, use_on_oom: self.rng.one_in(2), no_split: false };
            let pool = self.machine.paged.create_pool(DEVICE, options).unwrap();
            self.failing.push(format!("pool {pool}"));
            self.pools.ids.push(pool);
            self.pools.created += 1;
            self.tally.pools += 1;
        } else if !self.pools.ids.is_empty() {
            let at = self.rng.below(self.pools.ids.len());
            match self.rng.below(4) {
                0 => {
                    let (pool, on) = (self.pools.ids[at], self.rng.one_in(2));
                    self.failing.push(format!("pool {pool} is used before memory runs out: {on}"));
                    self.machine.paged.set_use_on_oom(DEVICE, pool, on).unwrap();
                }
                1 => {
                    let pool = self.pools.ids[at];
                    self.failing.push(format!("trim pool {pool}"));
                    self.call(|machine| machine.paged.trim(DEVICE, pool));
                }
                _ => {
                    let pool = self.pools.ids.swap_remove(at);
                    self.release_pool(pool);
                }
            }
        }
    }

    pub fn release_pool(&mut self, pool: MemPoolId) {
        self.failing.push(format!("pool {pool} is released"));
        self.machine.paged.release_pool(DEVICE, pool).unwrap();
    }

    pub fn change_scopes(&mut self) {
        if !self.pools.scopes.is_empty() && self.rng.one_in(2) {
            let at = self.rng.below(self.pools.scopes.len());
            self.failing.push("a scope ends".to_owned());
            drop(self.pools.scopes.swap_remove(at));
        } else if !self.pools.ids.is_empty() {
            let pool = self.rng.pick(&self.pools.ids);
            let route = match self.rng.below(2) {
                0 => Route::Thread(std::thread::current().id()),
                _ => Route::Stream(self.machine.streams[self.rng.below(STREAMS)].id()),
            };
            self.failing.push(format!("{route:?} to pool {pool}"));
            let allocator: Arc<dyn DeviceAllocator> = self.machine.paged.clone();
            let handle = MemPool::from_id(&allocator, &self.machine.device, pool).unwrap();
            match handle.route(route) {
                Ok(scope) => self.pools.scopes.push(scope),
                Err(Error::AlreadyRouting { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}
