//! Stable pools: one physical allocation per segment, aligned for registration, that stays as long as the pool is used.

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, DeviceId, Pattern};
use warpool::memory::external::FnAllocator;
use warpool::memory::pools::PoolOptions;
use warpool::memory::report::SnapshotOptions;
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, PagedAllocator,
    PluggableAllocator, Settings,
};
use warpool::{Device, Error, Instance, Stream};

const MIB: u64 = 1 << 20;
const FIRST: DeviceId = DeviceId(0);

struct Machine {
    sim: Arc<SimDriver>,
    instance: Instance,
    subject: Arc<dyn DeviceAllocator>,
}

impl Machine {
    fn device(&self) -> Device {
        self.instance.device(0).unwrap()
    }

    fn pool(&self) -> MemPool {
        MemPool::new(&self.subject, &self.device(), PoolOptions::stable()).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device().default_stream().unwrap()
    }

    /// The segments of a pool: address and size.
    fn segments(&self, pool: &MemPool) -> Vec<(u64, u64)> {
        let options = SnapshotOptions { pool: Some(pool.id()), traces: false };
        let segments = self.subject.snapshot(options).unwrap().segments;
        segments.iter().map(|segment| (segment.address, segment.total_size)).collect()
    }

    fn finish(self) {
        self.instance.devices().for_each(|device| device.synchronize().unwrap());
        assert_eq!(self.sim.hazards(), []);
    }
}

/// Runs a check with each allocator that has such pools, on two devices of that size.
fn each(capacity: u64, check: impl Fn(Machine)) {
    for name in ["native", "expandable", "paged"] {
        let mut config = SimConfig::default().with_capacity(capacity).with_devices(2);
        for device in &mut config.devices {
            device.bytes_context = 0;
            device.properties.multicast_granularity = 32 * MIB;
        }
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(sim.clone()).unwrap();
        let expandable = Settings::parse("expandable_segments:True").unwrap();
        let subject: Arc<dyn DeviceAllocator> = match name {
            "native" => Arc::new(CachingAllocator::new(&instance, Settings::default())),
            "expandable" => Arc::new(CachingAllocator::new(&instance, expandable)),
            _ => Arc::new(PagedAllocator::new(&instance, Settings::default()).unwrap()),
        };
        check(Machine { sim, instance, subject });
    }
}

#[test]
fn a_segment_is_one_physical_allocation_of_the_granularity_of_multicast() {
    each(1 << 30, |machine| {
        let (pool, stream) = (machine.pool(), machine.stream());
        let created = machine.sim.call_count(Call::VmCreate);
        let blocks: Vec<DeviceBlock> =
            [1000, 3 * MIB, 40 * MIB].map(|bytes| machine.subject.allocate_in(&pool, bytes, &stream).unwrap()).into();
        let segments = machine.segments(&pool);
        assert_eq!(machine.sim.call_count(Call::VmCreate) - created, segments.len() as u64);
        let mut sizes: Vec<u64> = segments.iter().map(|&(_, size)| size / MIB).collect();
        sizes.sort_unstable();
        assert_eq!(sizes, [32, 32, 64], "small, large, of its own size");
        assert!(segments.iter().all(|(address, _)| address % (32 * MIB) == 0), "{segments:?}");
        assert_eq!(machine.subject.stats(FIRST).unwrap().reserved_bytes.all.current, 128 * MIB, "all of it is counted");
        drop(blocks);
        drop(pool);
        machine.finish();
    });
}

/// A request that would have to exceed the limit with the rounded size runs out of memory.
#[test]
fn the_limit_counts_the_rounded_size() {
    each(1 << 30, |machine| {
        machine.subject.set_memory_cap(FIRST, Some(24 * MIB)).unwrap();
        let (pool, stream) = (machine.pool(), machine.stream());
        let refused = machine.subject.allocate_in(&pool, 3 * MIB, &stream).map(drop);
        assert!(matches!(refused, Err(Error::OutOfMemory(_))), "{refused:?}");
        machine.finish();
    });
}

#[test]
fn segments_stay_until_the_pool_has_no_uses() {
    each(256 * MIB, |machine| {
        let (pool, stream) = (machine.pool(), machine.stream());
        let block = machine.subject.allocate_in(&pool, 60 * MIB, &stream).unwrap();
        let (at, segments) = (block.ptr(), machine.segments(&pool));
        block.free().unwrap();
        let before = machine.sim.call_count(Call::VmUnmap);
        // Other memory comes and goes, and runs out.
        let others: Vec<DeviceBlock> =
            std::iter::from_fn(|| machine.subject.allocate(20 * MIB, &stream).ok()).take(16).collect();
        assert!((8..13).contains(&others.len()), "{} blocks beside 64 MiB", others.len());
        assert_eq!(machine.segments(&pool), segments);
        drop(others);
        machine.subject.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        machine.subject.trim(FIRST, pool.id()).unwrap();
        assert_eq!(machine.segments(&pool), segments, "the pool has a use");
        let again = machine.subject.allocate_in(&pool, 60 * MIB, &stream).unwrap();
        assert_eq!(again.ptr(), at);
        let unmapped = machine.sim.call_count(Call::VmUnmap) - before;
        // Without uses it stays as long as a block is allocated.
        let id = pool.id();
        pool.close().unwrap();
        machine.subject.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        assert_eq!(machine.sim.call_count(Call::VmUnmap) - before, unmapped);
        again.free().unwrap();
        assert_eq!(machine.subject.trim(FIRST, MemPoolId::DEFAULT).unwrap(), 64 * MIB);
        assert_eq!(machine.sim.call_count(Call::VmUnmap) - before, unmapped + 1);
        assert!(machine.subject.pools().unwrap().pool_uses(FIRST, id).is_err(), "it is gone");
        machine.finish();
    });
}

#[test]
fn peers_access_pools_created_before_and_after() {
    each(1 << 30, |machine| {
        let (first, stream) = (machine.pool(), machine.stream());
        let before = machine.subject.allocate_in(&first, 10 * MIB, &stream).unwrap();
        machine.subject.enable_peer_access(DeviceId(1), FIRST).unwrap();
        let after = machine.subject.allocate_in(&first, 60 * MIB, &stream).unwrap();
        let second = machine.pool();
        let new = machine.subject.allocate_in(&second, 10 * MIB, &stream).unwrap();
        let peer = machine.instance.device(1).unwrap().default_stream().unwrap();
        for block in [&before, &after, &new] {
            machine.sim.fill(block.ptr(), Pattern::U8(7), block.bytes(), peer.id()).unwrap();
            peer.synchronize().unwrap();
        }
        machine.finish();
    });
}

#[test]
fn an_allocator_without_a_cache_has_none() {
    let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
    let external = FnAllocator::new(|_, _, _| Ok(None), |_, _, _, _| Ok(()));
    let subject = Arc::new(PluggableAllocator::new(&instance, Arc::new(external)).unwrap());
    let refused = MemPool::new(&subject, &instance.device(0).unwrap(), PoolOptions::stable()).map(drop);
    assert!(matches!(&refused, Err(Error::Unsupported { what, .. }) if what.contains("stable")), "{refused:?}");
}

#[test]
fn a_device_without_virtual_memory_has_none() {
    let mut config = SimConfig::default();
    config.devices[0].properties.virtual_memory = false;
    let instance = Instance::new(Arc::new(SimDriver::new(config))).unwrap();
    let subject = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let refused = MemPool::new(&subject, &instance.device(0).unwrap(), PoolOptions::stable()).map(drop);
    assert!(matches!(&refused, Err(Error::Unsupported { what, .. }) if what.contains("stable")), "{refused:?}");
}
