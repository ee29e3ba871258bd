//! Checkpoints of private pools, and their restoration.

use warpool::driver::DevicePtr;
use warpool::memory::pools::{Checkpoints as _, PoolCheckpoint, PoolOptions};
use warpool::memory::raw::Allocation;
use warpool::memory::{DeviceAllocator as _, MemPool, MemPoolId};
use warpool::{Error, Stream};

use super::Run;
use super::blocks::{Held, Owned};
use crate::allocators::into_block;
use crate::machine::{Outcome, device_id};

impl Run<'_> {
    /// A pool of its own: blocks, a checkpoint, other blocks, the restoration, and again.
    pub fn checkpoint(&mut self) {
        // The decorator would not see what a restoration frees.
        let Some(caching) = self.subject.caching.as_ref().filter(|_| self.subject.limited.is_none()) else { return };
        if self.context.skips("checkpoints") {
            return;
        }
        caching.set_caching(true).unwrap();
        let device = self.context.rng.below(self.devices);
        let Some(stream) = self.idle_stream(device) else { return };
        // With `use_on_oom` the pool may also have blocks of others, which a restoration does not touch.
        let use_on_oom = self.context.rng.one_in(2);
        let options = PoolOptions { use_on_oom, ..PoolOptions::default() };
        let pool = MemPool::new(&self.subject.allocator, &self.machine.device(device), options).unwrap();
        self.context.step(format!("checkpoints of pool {}, use_on_oom {use_on_oom}", pool.id()));
        let mut blocks: Vec<Held> = Vec::new();
        self.churn(&mut blocks, &stream, pool.id());
        let mut saved: Option<PoolCheckpoint> = None;
        for _ in 0..2 + self.context.rng.below(3) {
            if let Some(checkpoint) = self.save(device, pool.id()) {
                saved = Some(checkpoint);
            }
            self.churn(&mut blocks, &stream, pool.id());
            if let Some(checkpoint) = &saved {
                self.restore(checkpoint, &mut blocks, &stream);
                self.check();
            }
            self.churn(&mut blocks, &stream, pool.id());
        }
        for held in blocks {
            self.free_held(held);
        }
        drop(pool);
    }

    /// Allocates, uses and frees in a pool.
    fn churn(&mut self, blocks: &mut Vec<Held>, stream: &Stream, pool: MemPoolId) {
        for _ in 0..self.context.rng.below(6) {
            match self.context.rng.below(5) {
                4 => {
                    let held = self.allocate_on(stream, None);
                    self.held.extend(held);
                }
                0 | 1 => blocks.extend(self.allocate_on(stream, Some(pool))),
                2 if !blocks.is_empty() => {
                    let held = blocks.swap_remove(self.context.rng.below(blocks.len()));
                    self.free_held(held);
                }
                3 if !blocks.is_empty() => {
                    let held = blocks.swap_remove(self.context.rng.below(blocks.len()));
                    let other = self.idle_stream(stream.device_id().0 as usize);
                    let other = other.filter(|other| other != stream);
                    let used = match other {
                        Some(other) => self.use_on(held, &other),
                        None => held,
                    };
                    blocks.push(used);
                }
                _ => {}
            }
        }
    }

    /// A checkpoint, unless blocks of the pool are still pending free.
    fn save(&mut self, device: usize, pool: MemPoolId) -> Option<PoolCheckpoint> {
        if self.context.rng.one_in(2) {
            self.machine.synchronize();
        }
        let caching = self.subject.caching.as_ref()?;
        self.context.step("checkpoint");
        let armed = self.machine.arm(self.context);
        let outcome = crate::caught::caught(|| caching.checkpoint(device_id(device), pool));
        let refused = matches!(outcome, Ok(Err(Error::Checkpoint { .. })));
        self.machine.settle(self.context, armed, outcome, refused).done()
    }

    fn restore(&mut self, checkpoint: &PoolCheckpoint, blocks: &mut Vec<Held>, stream: &Stream) {
        let Some(caching) = self.subject.caching.clone() else { return };
        self.context.step("restore");
        let armed = self.machine.arm(self.context);
        let outcome = crate::caught::caught(|| caching.restore(checkpoint));
        let refused = matches!(outcome, Ok(Err(Error::Checkpoint { .. })));
        let restored = match self.machine.settle(self.context, armed, outcome, refused) {
            Outcome::Done(restored) => restored,
            Outcome::Panicked => {
                // If the restoration was done, nobody has the restored blocks, so they are freed. The other blocks are
                // stale.
                if !self.table.has_current(&*self.subject.allocator) {
                    for held in std::mem::take(blocks) {
                        self.table.remove(held.ptr());
                    }
                }
                self.table.panicked(&*self.subject.allocator, usize::MAX);
                return;
            }
            _ => return,
        };
        let mut freed: Vec<DevicePtr> = restored.freed.clone();
        freed.sort_unstable();
        let mut gone: Vec<DevicePtr> = blocks.iter().map(Held::ptr).collect();
        gone.sort_unstable();
        assert_eq!(freed, gone, "the blocks that the restoration freed, and those that the pool had");
        freed.iter().for_each(|&ptr| self.table.remove(ptr));
        for held in std::mem::take(blocks) {
            // Its memory belongs to others now; a stale owner may still be dropped.
            match held.owned {
                Owned::Block(block) if self.context.rng.one_in(2) => drop(block.into_raw()),
                Owned::Block(block) => drop(block),
                Owned::Raw(_) => {}
            }
        }
        for allocation in restored.allocated {
            self.restored(allocation, blocks, stream);
        }
        // Blocks between them that are still used are counted as allocated, and freed at once.
        self.table.undone(&*self.subject.allocator, freed.len() + 1);
    }

    /// A block of the checkpoint is the program's again, without contents. Its stream waits for others that use the
    /// memory.
    fn restored(&mut self, allocation: Allocation, blocks: &mut Vec<Held>, stream: &Stream) {
        self.table.insert(&allocation, true);
        let tag = self.tag();
        self.context.step(format!("  block {tag} at {} is restored", allocation.ptr));
        self.machine.write_tag(allocation.ptr, allocation.bytes_requested, tag, stream);
        let block = into_block(&self.subject.allocator, allocation);
        blocks.push(Held { owned: Owned::Block(block), tag, stream: stream.clone(), read_elsewhere: false });
    }
}
