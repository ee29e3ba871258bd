//! Blocks of a pool that serve requests of the default pool before those run out of memory (`use_on_oom`): a checkpoint
//! of the pool neither records nor frees them, with either allocator.

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, Pattern};
use warpool::memory::pools::{PoolCheckpoint, PoolOptions};
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPool, PagedAllocator, Settings,
};
use warpool::{Error, Instance, Stream};

const MIB: u64 = 1 << 20;

/// Runs `check` on a device that is full except for a free block of 40 MiB in a pool, so that a request of the default
/// pool gets that block. `check` gets the earlier checkpoint of the pool and the block.
fn check(check: impl Fn(&Arc<dyn DeviceAllocator>, &MemPool, &Stream, PoolCheckpoint, DeviceBlock)) {
    for (is_paged, no_split) in [(false, false), (false, true), (true, true)] {
        let mut config = SimConfig::default().with_capacity(200 * MIB);
        config.devices[0].bytes_context = 2 * MIB;
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(sim.clone()).unwrap();
        let subject: Arc<dyn DeviceAllocator> = if is_paged {
            Arc::new(PagedAllocator::new(&instance, Settings::default()).unwrap())
        } else {
            Arc::new(CachingAllocator::new(&instance, Settings::default()))
        };
        let device = instance.device(0).unwrap();
        let lease = device.lease_stream().unwrap();
        let options = PoolOptions { use_on_oom: true, no_split, ..PoolOptions::default() };
        let pool = MemPool::new(&subject, &device, options).unwrap();
        let own = subject.allocate_in(&pool, 40 * MIB, &lease).unwrap();
        let own_at = own.ptr();
        let full = subject.checkpoints().unwrap().checkpoint(DeviceId(0), pool.id()).unwrap();
        drop(own);
        let rest: Vec<DeviceBlock> = std::iter::from_fn(|| subject.allocate(20 * MIB, &lease).ok()).take(7).collect();
        let lent = subject.allocate(38 * MIB, &lease).expect("the pool lends its block");
        assert_eq!(lent.ptr(), own_at);
        sim.fill_via(lent.ptr(), &lease);
        check(&subject, &pool, &lease, full, lent);
        drop(rest);
        device.synchronize().unwrap();
        assert_eq!(sim.hazards(), []);
    }
}

trait Fill {
    fn fill_via(&self, ptr: warpool::driver::DevicePtr, stream: &Stream);
}

impl Fill for SimDriver {
    fn fill_via(&self, ptr: warpool::driver::DevicePtr, stream: &Stream) {
        use warpool::driver::Copies as _;
        self.fill(ptr, Pattern::U32(1), 4, stream.id()).unwrap();
    }
}

/// Issue 18: the restore freed it, and the next request got it too.
#[test]
fn a_restore_does_not_free_them() {
    check(|subject, pool, stream, _, lent| {
        let empty = subject.checkpoints().unwrap().checkpoint(DeviceId(0), pool.id()).unwrap();
        assert_eq!(empty.live().len(), 0, "it is not the pool's");
        let restored = subject.checkpoints().unwrap().restore(&empty).unwrap();
        assert_eq!((restored.freed, restored.allocated), (vec![], vec![]));
        assert!(subject.find(lent.ptr()).is_ok());
        let next = subject.allocate(38 * MIB, stream);
        assert!(next.is_err(), "all memory is in use");
        drop(next);
        lent.free().unwrap();
        assert!(subject.allocate_in(pool, 38 * MIB, stream).is_ok(), "it is the pool's again");
    });
}

/// A block that the pool had at that address cannot be restored meanwhile.
#[test]
fn a_restore_of_the_same_memory_is_refused_until_they_are_freed() {
    check(|subject, _, _, full, lent| {
        let error = subject.checkpoints().unwrap().restore(&full).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint { why, .. } if why.contains("default pool")), "{error}");
        assert!(subject.find(lent.ptr()).is_ok());
        lent.free().unwrap();
        let restored = subject.checkpoints().unwrap().restore(&full).unwrap();
        assert_eq!((restored.freed.len(), restored.allocated.len()), (0, 1));
        restored.allocated.into_iter().for_each(|block| subject.free(block).unwrap());
    });
}
