//! Range observers: registrations that follow them are never used after their memory has left.

use std::sync::{Arc, Mutex};

use warpool::driver::DeviceId;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::memory::pools::PoolOptions;
use warpool::memory::report::{Action, RangeChange, RangeEvent};
use warpool::memory::sleep::{Keep, Tags};
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, HostAllocator, MemPool, MemPoolId, PagedAllocator,
    PinnedSettings, Settings,
};
use warpool::{Device, Instance, Stream};
use warpool_testing::Registered;

const MIB: u64 = 1 << 20;
const FIRST: DeviceId = DeviceId(0);

struct Machine {
    sim: Arc<SimDriver>,
    instance: Instance,
    subject: Arc<dyn DeviceAllocator>,
    registered: Arc<Registered>,
    changes: Arc<Mutex<Vec<RangeChange>>>,
}

impl Machine {
    fn new(name: &str, capacity: u64) -> Self {
        let mut config = SimConfig::default().with_capacity(capacity);
        config.devices[0].bytes_context = 0;
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(sim.clone()).unwrap();
        let expandable = Settings::parse("expandable_segments:True").unwrap();
        let subject: Arc<dyn DeviceAllocator> = match name {
            "native" => Arc::new(CachingAllocator::new(&instance, Settings::default())),
            "expandable" => Arc::new(CachingAllocator::new(&instance, expandable)),
            _ => Arc::new(PagedAllocator::new(&instance, Settings::default()).unwrap()),
        };
        let registered = Arc::new(Registered::new(&sim, "followed"));
        Self { sim, instance, subject, registered, changes: Arc::default() }
    }

    fn device(&self) -> Device {
        self.instance.device(0).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device().default_stream().unwrap()
    }

    /// Registers every range when it is mapped, and ends registrations that overlap with what goes.
    fn follow(&self) {
        let (registered, changes, subject) =
            (self.registered.clone(), self.changes.clone(), Arc::downgrade(&self.subject));
        self.subject.observers().attach_range_observer(Arc::new(move |change| {
            // No lock is held: the allocator can be called.
            subject.upgrade().expect("it is calling").stats(FIRST).unwrap();
            changes.lock().unwrap().push(*change);
            match change.event {
                RangeEvent::Mapped => assert!(registered.mapped(change.ptr, change.bytes), "{change:?}"),
                RangeEvent::Unmapping | RangeEvent::Left => registered.gone(change.ptr, change.bytes),
            }
        }));
    }

    /// Sends to a block through the registrations that cover it.
    fn send(&self, block: &DeviceBlock, stream: &Stream) {
        self.registered.send(block.ptr(), block.bytes(), 1, stream.id());
        assert_eq!(self.sim.stale_registrations(), []);
    }

    fn changes(&self) -> Vec<(RangeEvent, u64)> {
        self.changes.lock().unwrap().iter().map(|change| (change.event, change.bytes / MIB)).collect()
    }

    fn finish(self) {
        self.device().synchronize().unwrap();
        assert_eq!(self.sim.hazards(), []);
        assert_eq!(self.sim.stale_registrations(), []);
        let generations: Vec<u64> = self.changes.lock().unwrap().iter().map(|change| change.generation).collect();
        assert_eq!(generations, (1..=generations.len() as u64).collect::<Vec<_>>());
    }
}

const ALL: [&str; 3] = ["native", "expandable", "paged"];

#[test]
fn registrations_follow_memory_that_comes_and_goes() {
    for name in ALL {
        let machine = Machine::new(name, 256 * MIB);
        machine.follow();
        let stream = machine.stream();
        for round in 0..4 {
            // Other sizes each time, so that memory is taken, split and returned.
            let sizes = [3, 20, 60, 11 + round * 7].map(|size| size * MIB);
            let blocks = sizes.map(|size| machine.subject.allocate(size, &stream).unwrap());
            blocks.iter().for_each(|block| machine.send(block, &stream));
            drop(blocks);
            if round % 2 == 0 {
                machine.subject.trim(FIRST, MemPoolId::DEFAULT).unwrap();
            }
        }
        machine.finish();
    }
}

/// The control: who registers segments once is wrong as soon as pages move.
#[test]
fn without_following_registrations_become_stale() {
    for name in ALL {
        let machine = Machine::new(name, 256 * MIB);
        let stream = machine.stream();
        let block = machine.subject.allocate(60 * MIB, &stream).unwrap();
        let id = machine.sim.register_memory(block.ptr(), block.bytes(), "once").unwrap();
        block.free().unwrap();
        machine.subject.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        machine.sim.write_registered(id, 0, 64, 1, stream.id()).unwrap();
        machine.device().synchronize().unwrap();
        assert_eq!(machine.sim.hazards().len(), 1, "{name}");
    }
}

/// Before memory returns to the driver, observers are told, and it is still there then.
#[test]
fn segments_are_announced_before_they_are_unmapped() {
    for name in ["native", "expandable"] {
        let machine = Machine::new(name, 256 * MIB);
        machine.follow();
        machine.subject.allocate(60 * MIB, &machine.stream()).unwrap().free().unwrap();
        let (sim, there) = (machine.sim.clone(), Arc::new(Mutex::new(0)));
        let seen = there.clone();
        machine.subject.observers().attach_range_observer(Arc::new(move |change| {
            if change.event == RangeEvent::Unmapping {
                let id = sim.register_memory(change.ptr, change.bytes, "a last look").unwrap();
                sim.deregister_memory(id).unwrap();
                *seen.lock().unwrap() += 1;
            }
        }));
        machine.subject.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        assert_eq!(*there.lock().unwrap(), 1, "{name}");
        assert_eq!(machine.changes(), [(RangeEvent::Mapped, 60), (RangeEvent::Unmapping, 60)], "{name}");
        machine.finish();
    }
}

#[test]
fn pages_are_told_as_ranges_and_moves_as_such() {
    let machine = Machine::new("paged", 256 * MIB);
    machine.follow();
    let entries = Arc::new(Mutex::new(0));
    let counted = entries.clone();
    let actions = [Action::SegmentMap, Action::SegmentUnmap];
    machine.subject.observers().attach_tracker(&actions, Arc::new(move |_, _| *counted.lock().unwrap() += 1));
    let (stream, side) = (machine.stream(), machine.device().pool_stream().unwrap());
    let block = machine.subject.allocate(200 * MIB, &stream).unwrap();
    assert_eq!(machine.changes(), [(RangeEvent::Mapped, 200)], "100 pages are one range");
    assert_eq!(*entries.lock().unwrap(), 1, "for trackers too");
    block.free().unwrap();
    // The other stream gets the pages: there is no other memory.
    let taken = machine.subject.allocate(200 * MIB, &side).unwrap();
    machine.send(&taken, &side);
    let told = machine.changes();
    let sum = |event| told.iter().filter(|(one, _)| *one == event).map(|(_, size)| size).sum::<u64>();
    assert!(sum(RangeEvent::Left) >= 144, "all but the rest of the device: {told:?}");
    assert_eq!(sum(RangeEvent::Unmapping), 0);
    machine.finish();
}

#[test]
fn stable_pools_are_told_of_twice() {
    for name in ALL {
        let machine = Machine::new(name, 256 * MIB);
        machine.follow();
        let stream = machine.stream();
        let pool = MemPool::new(&machine.subject, &machine.device(), PoolOptions::stable()).unwrap();
        for size in [50, 20, 40] {
            let block = machine.subject.allocate_in(&pool, size * MIB, &stream).unwrap();
            machine.send(&block, &stream);
        }
        machine.subject.trim(FIRST, pool.id()).unwrap();
        assert_eq!(machine.changes(), [(RangeEvent::Mapped, 50)], "{name}");
        pool.close().unwrap();
        assert_eq!(machine.changes(), [(RangeEvent::Mapped, 50), (RangeEvent::Unmapping, 50)], "{name}");
        machine.finish();
    }
}

#[test]
fn registrations_follow_memory_that_sleeps_and_wakes() {
    for name in ALL {
        let machine = Machine::new(name, 256 * MIB);
        machine.follow();
        let stream = machine.stream();
        let host = HostAllocator::new(&machine.instance, PinnedSettings::default());
        let tags = Tags::new(&machine.subject, &host).unwrap();
        let block = {
            let _scope = tags.tag(&machine.device(), "weights").unwrap().enter().unwrap();
            machine.subject.allocate(30 * MIB, &stream).unwrap()
        };
        for keep in [Keep::Host, Keep::Discard] {
            machine.send(&block, &stream);
            tags.sleep(&["weights"], keep).unwrap();
            tags.wake(&["weights"]).unwrap();
        }
        machine.send(&block, &stream);
        let expected = [RangeEvent::Mapped, RangeEvent::Unmapping, RangeEvent::Mapped, RangeEvent::Unmapping];
        let mut told = machine.changes();
        assert_eq!(told.pop(), Some((RangeEvent::Mapped, 30)));
        assert_eq!(told, expected.map(|event| (event, 30)), "{name}");
        machine.finish();
    }
}
