//! Registered memory: blocks of the default pool, of a private pool and of a stable pool, on a device with little
//! memory, while driver calls fail. Every block is written through registrations, as a network card would.
//!
//! Memory of the stable pool is registered once, by the program: that must stay valid as long as the pool has uses. All
//! other memory is registered when range observers are told that it is there, and no registration may be of memory that
//! has left when the call returns that moved it.

use std::sync::Arc;

use warpool::driver::DevicePtr;
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{RangeEvent, SnapshotOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPool, MemPoolId};
use warpool_testing::Registered;

use crate::allocators::{draw_paged, draw_settings};
use crate::context::Context;
use crate::machine::{Machine, Outcome, device_id};

const STREAMS: usize = 3;
const MIB: u64 = 1 << 20;

struct Run<'a> {
    context: &'a mut Context,
    machine: Machine,
    allocator: Arc<dyn DeviceAllocator>,
    is_paged: bool,
    stable: Stable,
    private: MemPool,
    /// Registrations that follow the range observers.
    followed: Arc<Registered>,
    blocks: Vec<Block>,
}

/// The stable pool, and the registrations of its segments.
struct Stable {
    pool: MemPool,
    registered: Registered,
}

struct Block {
    allocation: Allocation,
    is_stable: bool,
    /// The stream that used it last.
    stream: usize,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let capacity = context.rng.pick(&[100, 200, 400]) * MIB;
    let is_told = !context.rng.one_in(4);
    let machine = Machine::with(context, 1, STREAMS, |config| {
        config.track_suballocations = is_told;
        config.devices[0].properties.bytes_total = capacity;
        config.devices[0].properties.multicast_granularity = [0, 2 * MIB, 8 * MIB][(capacity / MIB % 3) as usize];
    });
    let is_paged = context.rng.one_in(2);
    let settings = draw_settings(&mut context.rng);
    context.step(format!("{capacity} bytes, paged: {is_paged}, {}", settings.to_conf_string()));
    let allocator: Arc<dyn DeviceAllocator> = if is_paged {
        Arc::new(draw_paged(&mut context.rng, &machine.instance, settings))
    } else {
        Arc::new(CachingAllocator::new(&machine.instance, settings))
    };
    let followed = Arc::new(Registered::new(&machine.sim, "followed"));
    let follower = Arc::clone(&followed);
    allocator.observers().attach_range_observer(Arc::new(move |change| match change.event {
        // What a failed call has mapped may be gone by now; that it left is told next.
        RangeEvent::Mapped => drop(follower.mapped(change.ptr, change.bytes)),
        RangeEvent::Unmapping | RangeEvent::Left => follower.gone(change.ptr, change.bytes),
    }));
    let stable = Stable::new(&allocator, &machine);
    let private = MemPool::new(&allocator, &machine.device(0), PoolOptions::default()).unwrap();
    let blocks = Vec::new();
    let mut run = Run { context, machine, allocator, is_paged, stable, private, followed, blocks };
    for _ in 0..40 + run.context.rng.below(120) {
        run.step();
        run.check();
    }
    run.finish();
}

impl Stable {
    fn new(allocator: &Arc<dyn DeviceAllocator>, machine: &Machine) -> Self {
        let pool = MemPool::new(allocator, &machine.device(0), PoolOptions::stable()).unwrap();
        Self { pool, registered: Registered::new(&machine.sim, "stable") }
    }
}

impl Run<'_> {
    fn step(&mut self) {
        match self.context.rng.below(32) {
            0..11 => self.allocate(),
            11..17 => self.free(),
            17..23 => self.send(),
            23 | 24 => self.trim(),
            25 => self.replace_pools(),
            26..28 => {
                let (stream, pause) = (self.context.rng.below(STREAMS), self.context.rng.one_in(2));
                self.machine.pause_or_resume(self.machine.stream(0, stream), pause);
            }
            28 => {
                self.context.step("synchronize");
                self.machine.synchronize();
            }
            _ => {
                let stream = self.context.rng.below(STREAMS);
                self.machine.wait_for(self.machine.stream(0, stream));
            }
        }
    }

    /// No registration is of memory that has left.
    fn check(&self) {
        if let Some((id, why)) = self.machine.sim.stale_registrations().first() {
            panic!("{id} is stale: {why}");
        }
        self.machine.check_hazards();
    }

    fn allocate(&mut self) {
        let stream = self.context.rng.below(STREAMS);
        let bytes = self.context.rng.pick(&[1000, 300 << 10, 3 * MIB, 11 * MIB, 25 * MIB, 60 * MIB]);
        let which = self.context.rng.below(5);
        let pool = match which {
            0 | 1 => self.stable.pool.id(),
            2 => self.private.id(),
            _ => MemPoolId::DEFAULT,
        };
        self.context.step(format!("allocate {bytes} in {pool} on stream {stream}"));
        let request = Request::new(device_id(0), self.machine.stream(0, stream).id(), bytes).in_pool(pool);
        let allocator = &self.allocator;
        let Outcome::Done(allocation) = self.machine.call(self.context, || allocator.allocate_raw(request)) else {
            return;
        };
        self.context.counts.allocations += 1;
        let is_stable = which < 2;
        if is_stable {
            self.register_segment(allocation.ptr);
        }
        self.blocks.push(Block { allocation, is_stable, stream });
        self.send_to(self.blocks.len() - 1);
    }

    /// Registers the segment of the stable pool that contains an address, unless that was done before.
    fn register_segment(&mut self, ptr: DevicePtr) {
        let Stable { pool, registered } = &self.stable;
        if registered.covers(ptr, 1) {
            return;
        }
        let options = SnapshotOptions { pool: Some(pool.id()), traces: false };
        let segments = self.allocator.snapshot(options).unwrap().segments;
        let contains = |at: u64, size: u64| (at..at + size).contains(&ptr.0);
        let segment = segments.iter().find(|one| contains(one.address, one.total_size)).expect("it has one");
        assert!(registered.mapped(DevicePtr(segment.address), segment.total_size), "all of the segment is there");
        self.context.made("stable segment");
    }

    fn send(&mut self) {
        if !self.blocks.is_empty() {
            let at = self.context.rng.below(self.blocks.len());
            self.send_to(at);
        }
    }

    /// Writes a block through its registrations, in any stream, after its work so far.
    fn send_to(&mut self, at: usize) {
        let stream = self.context.rng.below(STREAMS);
        let Block { allocation, is_stable, stream: last } = &mut self.blocks[at];
        let (before, allocation) = (std::mem::replace(last, stream), *allocation);
        self.context.step(format!("send to {} on stream {stream}", allocation.ptr));
        self.machine.wait(self.machine.stream(0, stream), self.machine.stream(0, before));
        let on = self.machine.stream(0, stream).id();
        self.allocator.record_use(allocation, on).unwrap();
        let registered = if *is_stable { &self.stable.registered } else { &*self.followed };
        assert!(registered.covers(allocation.ptr, allocation.bytes_requested), "all of a block is registered");
        // Its ends, and its middle.
        let part = allocation.bytes_requested.min(4096);
        for offset in [0, (allocation.bytes_requested - part) / 2, allocation.bytes_requested - part] {
            registered.send(allocation.ptr.offset(offset), part, 1, on);
        }
        self.context.made(if *is_stable { "stable send" } else { "send" });
    }

    fn free(&mut self) {
        if !self.blocks.is_empty() {
            let at = self.context.rng.below(self.blocks.len());
            self.free_at(at);
        }
    }

    fn free_at(&mut self, at: usize) {
        let Block { allocation, .. } = self.blocks.swap_remove(at);
        self.context.step(format!("free {}", allocation.ptr));
        let allocator = &self.allocator;
        // A fault in a free leaves what it could not do to later calls.
        self.machine.call(self.context, || allocator.free(allocation));
    }

    fn trim(&mut self) {
        let pools = [MemPoolId::DEFAULT, self.stable.pool.id(), self.private.id()];
        let pool = self.context.rng.pick(&pools);
        self.context.step(format!("trim {pool}"));
        let allocator = &self.allocator;
        self.machine.call(self.context, || allocator.trim(device_id(0), pool));
        self.context.made("trim");
    }

    /// The stable pool or the private one ends, with its blocks, and another one begins. The owner ends the
    /// registrations of a stable pool before it gives up the pool.
    fn replace_pools(&mut self) {
        let is_stable = self.context.rng.one_in(2);
        let id = if is_stable { self.stable.pool.id() } else { self.private.id() };
        if !is_stable && self.is_paged && !self.context.rng.one_in(2) {
            return;
        }
        self.context.step(format!("pool {id} is replaced"));
        if is_stable {
            while let Some(at) = self.blocks.iter().position(|block| block.is_stable) {
                self.free_at(at);
            }
            self.machine.synchronize();
            self.stable.registered.end_all();
            self.stable = Stable::new(&self.allocator, &self.machine);
        } else {
            self.private = MemPool::new(&self.allocator, &self.machine.device(0), PoolOptions::default()).unwrap();
        }
        self.context.made("pool replaced");
    }

    fn finish(mut self) {
        self.context.step("the end");
        while !self.blocks.is_empty() {
            self.free_at(self.blocks.len() - 1);
        }
        self.machine.synchronize();
        let Self { machine, allocator, stable, private, followed, .. } = self;
        stable.registered.end_all();
        drop((stable, private));
        allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        assert_eq!(machine.sim.object_counts().registrations, 0, "registrations of memory that is gone");
        drop((followed, allocator));
        machine.close(true);
    }
}
