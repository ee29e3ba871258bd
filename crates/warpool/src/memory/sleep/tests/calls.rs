//! The result of each call in every state.

use warpool_driver::{Call, CaptureMode, Captures as _, Copies as _, DevicePtr, ErrorCode, Graphs as _, Streams as _};

use warpool_driver::decorate::FaultPlan;

use super::machine::{DEVICE, Kind, MIB, Machine};
use crate::Error;
use crate::error::{SleepCall, SleepShortage};
use crate::memory::sleep::{Keep, TagState};
use crate::memory::{Allocate as _, DriverPoolAllocator, MemPoolId, PinnedSettings, Request, Tags};

fn on_all(test: impl Fn(&Machine)) {
    for kind in Kind::ALL {
        println!("{kind:?}");
        let machine = Machine::new(kind, 256 * MIB);
        test(&machine);
        machine.check();
        assert_eq!(machine.finish(), None, "{kind:?}");
    }
}

#[test]
fn contents_and_addresses_return() {
    on_all(|machine| {
        let weights = [1000, 3 * MIB, 40 * MIB].map(|bytes| machine.allocate("weights", bytes, 0).unwrap());
        let cache = machine.allocate("kv", 60 * MIB, 1).unwrap();
        let other = machine.untagged(20 * MIB, 2).unwrap();
        for (value, block) in (1..).zip(&weights) {
            machine.write(block, value, 0);
        }
        machine.write(&cache, 7, 1);
        machine.write(&other, 8, 2);
        let (free, reserved) = (machine.free(), machine.reserved());
        let report = machine.sleep(&["weights", "kv"], Keep::Host).unwrap();
        assert_eq!(report.changed.len(), 2);
        let asleep = machine.allocator.stats(DEVICE).unwrap().asleep_bytes.all.current;
        assert_eq!(machine.free(), free + report.bytes_device, "the driver has the memory");
        assert_eq!((report.bytes_device, report.bytes_not_returned), (asleep, 0));
        assert_eq!(machine.reserved(), reserved - asleep);
        let live: u64 = weights.iter().chain([&cache]).map(|block| block.bytes).sum();
        assert_eq!(report.bytes_copied, live, "only allocated blocks are copied");
        // Another program uses the device meanwhile.
        let large = machine.untagged(200 * MIB, 2).unwrap();
        machine.write(&large, 9, 2);
        machine.expect(&other, 8, 2);
        machine.allocator.free(large).unwrap();
        machine.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        // Wake the weights first.
        machine.wake(&["weights"]).unwrap();
        for (value, block) in (1..).zip(&weights) {
            machine.expect(block, value, 1);
        }
        assert!(machine.is_asleep("kv") && !machine.is_asleep("weights"));
        machine.wake(&["kv"]).unwrap();
        machine.expect(&cache, 7, 0);
        assert_eq!((machine.free(), machine.reserved()), (free, reserved));
        assert_eq!(machine.pinned(), 0, "the host copy is gone");
        for block in weights.into_iter().chain([cache, other]) {
            machine.allocator.free(block).unwrap();
        }
    });
}

/// A load frees tensors of a tag and allocates larger ones, which their segments do not fit.
#[test]
fn free_segments_of_a_tag_return_before_memory_runs_out() {
    on_all(|machine| {
        let kept = machine.allocate("weights", 30 * MIB, 0).unwrap();
        machine.write(&kept, 1, 0);
        for tag in ["weights", "kv", "nothing"] {
            let freed = [0, 1, 2, 0].map(|stream| machine.allocate("weights", 50 * MIB, stream).unwrap());
            for (stream, block) in [0, 1, 2, 0].into_iter().zip(freed) {
                machine.write(&block, 2, stream);
                // One of them is still used by another stream.
                machine.expect(&block, 2, stream);
                machine.allocator.record_use(block, machine.streams[2].id()).unwrap();
                machine.allocator.free(block).unwrap();
            }
            assert!(machine.tag("weights").info().bytes_device >= 230 * MIB, "free segments are cached");
            let large =
                if tag == "nothing" { machine.untagged(200 * MIB, 1) } else { machine.allocate(tag, 200 * MIB, 1) };
            let large = large.unwrap();
            machine.write(&large, 3, 1);
            machine.expect(&large, 3, 1);
            machine.expect(&kept, 1, 0);
            let found = machine.untagged(100 * MIB, 0);
            assert!(matches!(found, Err(Error::OutOfMemory(_))), "what is allocated stays: {found:?}");
            machine.allocator.free(large).unwrap();
            assert_eq!(machine.defect(), None);
        }
        machine.sleep(&["weights"], Keep::Host).unwrap();
        machine.wake(&["weights"]).unwrap();
        machine.expect(&kept, 1, 0);
        machine.allocator.free(kept).unwrap();
    });
}

#[test]
fn discarded_contents_are_zero() {
    on_all(|machine| {
        let block = machine.allocate("kv", 30 * MIB, 0).unwrap();
        machine.write(&block, 5, 0);
        let report = machine.sleep(&["kv"], Keep::Discard).unwrap();
        assert_eq!((report.bytes_copied, machine.pinned()), (0, 0));
        machine.wake(&["kv"]).unwrap();
        machine.expect(&block, 0, 1);
        machine.allocator.free(block).unwrap();
    });
}

#[test]
fn calls_in_the_state_that_is_there_already_change_nothing() {
    on_all(|machine| {
        let block = machine.allocate("weights", 5 * MIB, 0).unwrap();
        machine.write(&block, 5, 0);
        let name = ("weights".to_owned(), DEVICE);
        let awake = machine.wake(&["weights"]).unwrap();
        assert_eq!((awake.changed, awake.unchanged), (vec![], vec![name.clone()]));
        machine.sleep(&["weights"], Keep::Host).unwrap();
        let TagState::Asleep { keep: Keep::Host, since_us } = machine.tag("weights").info().state else {
            panic!("it sleeps");
        };
        let again = machine.sleep(&["weights"], Keep::Host).unwrap();
        assert_eq!((again.changed, again.unchanged, again.bytes_device), (vec![], vec![name.clone()], 0));
        assert_eq!(machine.tag("weights").info().state, TagState::Asleep { keep: Keep::Host, since_us });
        machine.wake(&["weights"]).unwrap();
        machine.expect(&block, 5, 0);
        // A host copy that is no longer wanted.
        machine.sleep(&["weights"], Keep::Host).unwrap();
        assert!(machine.tag("weights").info().bytes_host > 0);
        machine.sleep(&["weights"], Keep::Discard).unwrap();
        assert_eq!(machine.tag("weights").info().bytes_host, 0);
        machine.wake(&["weights"]).unwrap();
        machine.expect(&block, 0, 0);
        let unknown = machine.sleep(&["weights", "nobody"], Keep::Host).unwrap_err();
        assert_eq!(unknown, Error::UnknownTag { tag: "nobody".into(), known: vec!["weights".into()] });
        assert!(!machine.is_asleep("weights"));
        // A tag without memory sleeps too.
        machine.tag("empty");
        machine.sleep(&["empty"], Keep::Host).unwrap();
        assert!(machine.is_asleep("empty"));
        machine.wake(&["empty"]).unwrap();
        machine.allocator.free(block).unwrap();
    });
}

#[test]
fn a_sleeping_tag_serves_no_request_and_takes_frees() {
    on_all(|machine| {
        let [first, second] = [0, 1].map(|_| machine.allocate("kv", 30 * MIB, 0).unwrap());
        let small = machine.allocate("kv", 100, 0).unwrap();
        machine.write(&second, 5, 0);
        // A free block that fits is not used either.
        machine.allocator.free(machine.allocate("kv", 200, 0).unwrap()).unwrap();
        machine.sleep(&["kv"], Keep::Host).unwrap();
        for bytes in [200, 30 * MIB] {
            let refused = machine.allocate("kv", bytes, 0).unwrap_err();
            assert_eq!(refused, Error::TagAsleep { tag: "kv".into() });
            assert!(refused.to_string().contains("wake the tag"), "{refused}");
        }
        let pool = machine.tag("kv").pool().id();
        let named = Request::new(DEVICE, machine.streams[0].id(), 200).in_pool(pool);
        assert_eq!(machine.allocator.allocate_raw(named), Err(Error::TagAsleep { tag: "kv".into() }));
        // Garbage collection frees what sleeps.
        machine.allocator.record_use(first, machine.streams[1].id()).unwrap();
        machine.allocator.free(first).unwrap();
        machine.check();
        machine.allocator.free(small).unwrap();
        machine.wake(&["kv"]).unwrap();
        machine.expect(&second, 5, 1);
        let third = machine.allocate("kv", 30 * MIB, 0).unwrap();
        machine.allocator.free(second).unwrap();
        machine.allocator.free(third).unwrap();
    });
}

#[test]
fn what_is_freed_asleep_returns_to_the_driver() {
    on_all(|machine| {
        let block = machine.allocate("kv", 30 * MIB, 0).unwrap();
        machine.sleep(&["kv"], Keep::Host).unwrap();
        machine.allocator.free(block).unwrap();
        machine.wake(&["kv"]).unwrap();
        let report = machine.sleep(&["kv"], Keep::Host).unwrap();
        let info = machine.tag("kv").info();
        assert_eq!((report.bytes_copied, info.segments, info.bytes), (0, 0, 0), "free segments are not kept");
        machine.wake(&["kv"]).unwrap();
    });
}

#[test]
fn tags_that_are_dropped_asleep_leave_nothing() {
    for kind in Kind::ALL {
        let mut machine = Machine::new(kind, 256 * MIB);
        let [first, second] = [3, 30].map(|mib| machine.allocate("kv", mib * MIB, 0).unwrap());
        machine.sleep(&["kv"], Keep::Host).unwrap();
        machine.tags = Tags::new(&machine.allocator, &machine.host).unwrap();
        assert_eq!(machine.reserved(), 0);
        machine.allocator.free(first).unwrap();
        machine.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        assert_eq!(machine.reserved(), 0, "what sleeps is still not reserved");
        machine.allocator.free(second).unwrap();
        assert_eq!(machine.finish(), None, "{kind:?}");
    }
}

#[test]
fn work_in_streams_is_waited_for() {
    on_all(|machine| {
        let block = machine.allocate("weights", 40 * MIB, 0).unwrap();
        for value in 1..20 {
            machine.write(&block, value, 0);
            machine.expect(&block, value, 0);
        }
        machine.sleep(&["weights"], Keep::Host).unwrap();
        machine.wake(&["weights"]).unwrap();
        machine.expect(&block, 19, 2);
        machine.allocator.free(block).unwrap();
    });
}

#[test]
fn scopes_nest_and_are_open_in_many_threads() {
    on_all(|machine| {
        let [weights, cache] = ["weights", "kv"].map(|name| machine.tag(name));
        let pool_of = |block: &crate::memory::Allocation| {
            let pools = [&weights, &cache].map(|tag| tag.pool().clone());
            let has = |pool: &crate::memory::MemPool| {
                machine.allocator.pools().unwrap().has_exactly(DEVICE, pool.id(), &[block.ptr]).unwrap()
            };
            pools.iter().find(|pool| has(pool)).map(crate::memory::MemPool::id)
        };
        let allocate = || machine.untagged(MIB, 0).unwrap();
        let outer = weights.enter().unwrap();
        let inner = cache.enter().unwrap();
        let innermost = weights.enter().unwrap();
        let block = allocate();
        assert_eq!(pool_of(&block), Some(weights.pool().id()));
        machine.allocator.free(block).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let untagged = allocate();
                assert_eq!(pool_of(&untagged), None, "a scope is of its thread");
                machine.allocator.free(untagged).unwrap();
                let _scope = weights.enter().unwrap();
                let block = allocate();
                assert_eq!(pool_of(&block), Some(weights.pool().id()));
                machine.allocator.free(block).unwrap();
            });
        });
        drop(innermost);
        let block = allocate();
        assert_eq!(pool_of(&block), Some(cache.pool().id()));
        machine.allocator.free(block).unwrap();
        // Scopes may be closed in any order.
        drop(outer);
        drop(inner);
        let block = allocate();
        assert_eq!(pool_of(&block), None);
        machine.allocator.free(block).unwrap();
    });
}

#[test]
fn pinned_memory_that_runs_out_is_reported_and_changes_nothing() {
    for kind in Kind::ALL {
        let pinned = PinnedSettings { cap_bytes: Some(32 * MIB), ..PinnedSettings::default() };
        let config = warpool_driver::sim::SimConfig::default();
        let machine = Machine::with(kind, config, 256 * MIB, pinned);
        let [first, second] = ["weights", "kv"].map(|tag| machine.allocate(tag, 20 * MIB, 0).unwrap());
        machine.write(&first, 1, 0);
        machine.write(&second, 2, 0);
        let (free, reserved) = (machine.free(), machine.reserved());
        let Err(Error::Sleep(failure)) = machine.sleep(&["weights", "kv"], Keep::Host) else { panic!("no memory") };
        let shortage = SleepShortage::PinnedMemory { bytes_needed: 40 * MIB, bytes_found: 20 * MIB };
        assert_eq!((failure.call, failure.shortage, failure.is_undone), (SleepCall::Sleep, shortage, true));
        assert!(matches!(failure.source, Some(Error::PinnedCap(_))), "{failure}");
        assert_eq!((machine.free(), machine.reserved()), (free, reserved));
        assert_eq!(machine.pinned(), 0);
        machine.expect(&first, 1, 1);
        machine.expect(&second, 2, 2);
        // One of them fits.
        machine.sleep(&["kv"], Keep::Host).unwrap();
        machine.wake(&["kv"]).unwrap();
        machine.expect(&second, 2, 2);
        for block in [first, second] {
            machine.allocator.free(block).unwrap();
        }
        assert_eq!(machine.finish(), None);
    }
}

#[test]
fn a_device_that_is_full_at_waking_is_reported_and_changes_nothing() {
    on_all(|machine| {
        let [first, second] = ["weights", "kv"].map(|tag| machine.allocate(tag, 60 * MIB, 0).unwrap());
        machine.write(&first, 1, 0);
        machine.sleep(&["weights", "kv"], Keep::Host).unwrap();
        let other = machine.untagged(160 * MIB, 1).unwrap();
        let free = machine.free();
        let Err(Error::Sleep(failure)) = machine.wake(&["weights", "kv"]) else { panic!("no memory") };
        let shortage = SleepShortage::DeviceMemory { bytes_needed: 120 * MIB, bytes_found: 60 * MIB };
        assert_eq!((failure.shortage, machine.free()), (shortage, free));
        assert!(machine.is_asleep("weights") && machine.is_asleep("kv"), "{failure}");
        // There is room for one, and cached memory makes room for the other.
        machine.wake(&["weights"]).unwrap();
        machine.expect(&first, 1, 0);
        machine.allocator.free(other).unwrap();
        machine.wake(&["kv"]).unwrap();
        for block in [first, second] {
            machine.allocator.free(block).unwrap();
        }
    });
}

#[test]
fn a_limit_counts_what_is_awake() {
    on_all(|machine| {
        machine.set_cap(Some(100 * MIB));
        let weights = machine.allocate("weights", 60 * MIB, 0).unwrap();
        assert!(matches!(machine.untagged(60 * MIB, 0), Err(Error::OutOfMemory(_))));
        machine.sleep(&["weights"], Keep::Host).unwrap();
        let other = machine.untagged(60 * MIB, 0).unwrap();
        let Err(Error::Sleep(failure)) = machine.wake(&["weights"]) else { panic!("over the limit") };
        assert_eq!(failure.shortage, SleepShortage::Limit { bytes_needed: 60 * MIB });
        assert!(machine.is_asleep("weights"), "{failure}");
        machine.allocator.free(other).unwrap();
        machine.wake(&["weights"]).unwrap();
        assert!(matches!(machine.untagged(60 * MIB, 0), Err(Error::OutOfMemory(_))));
        machine.allocator.free(weights).unwrap();
        machine.set_cap(None);
    });
}

#[test]
fn a_capture_forbids_both() {
    on_all(|machine| {
        let block = machine.allocate("weights", 6 * MIB, 0).unwrap();
        let pools = machine.allocator.pools().unwrap();
        pools.capture_began(DEVICE).unwrap();
        machine.sim.capture_begin(machine.streams[0].id(), CaptureMode::Global).unwrap();
        let refused = machine.sleep(&["weights"], Keep::Host).unwrap_err();
        assert_eq!(refused, Error::SleepInCapture { call: SleepCall::Sleep });
        assert_eq!(machine.wake(&["weights"]), Err(Error::SleepInCapture { call: SleepCall::Wake }));
        let graph = machine.sim.capture_end(machine.streams[0].id()).unwrap();
        machine.sim.graph_destroy(graph).unwrap();
        pools.capture_ended(DEVICE).unwrap();
        machine.sleep(&["weights"], Keep::Host).unwrap();
        machine.wake(&["weights"]).unwrap();
        machine.allocator.free(block).unwrap();
    });
}

#[test]
fn memory_that_the_driver_refuses_to_take_back_is_retried() {
    on_all(|machine| {
        let block = machine.allocate("weights", 60 * MIB, 0).unwrap();
        machine.write(&block, 3, 0);
        let free = machine.free();
        machine.faulty.set_plan(FaultPlan::new().fail_fraction(&[Call::VmRelease], 1.0, 0, ErrorCode::Unknown(999)));
        let report = machine.sleep(&["weights"], Keep::Host).unwrap();
        machine.faulty.clear_plan();
        assert_eq!((report.bytes_device, report.bytes_not_returned), (0, 60 * MIB));
        assert_eq!(machine.tag("weights").info().bytes_device, 60 * MIB);
        machine.sleep(&["weights"], Keep::Host).unwrap();
        machine.wake(&["weights"]).unwrap();
        machine.expect(&block, 3, 1);
        assert_eq!(machine.free(), free, "it has its memory once");
        machine.allocator.free(block).unwrap();
    });
}

#[test]
fn allocators_without_a_cache_say_that_they_cannot() {
    let machine = Machine::new(Kind::Caching, 64 * MIB);
    let instance = machine.device.instance();
    let allocator: std::sync::Arc<dyn crate::memory::DeviceAllocator> =
        std::sync::Arc::new(DriverPoolAllocator::new(instance));
    let refused = Tags::new(&allocator, &machine.host).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { what: "memory that sleeps", .. }), "{refused}");
}

#[test]
fn snapshots_say_when_memory_slept() {
    on_all(|machine| {
        let block = machine.allocate("weights", 6 * MIB, 0).unwrap();
        machine.sleep(&["weights"], Keep::Host).unwrap();
        machine.wake(&["weights"]).unwrap();
        let mut snapshot = machine.allocator.snapshot(crate::memory::SnapshotOptions::default()).unwrap();
        machine.tags.add_to(&mut snapshot);
        let marks: Vec<(&str, &str)> = snapshot.annotations.iter().map(|mark| (&*mark.name, &*mark.stage)).collect();
        assert_eq!(marks, [("asleep: weights", "START"), ("asleep: weights", "END")]);
        assert!(snapshot.annotations[0].time_us <= snapshot.annotations[1].time_us);
        machine.allocator.free(block).unwrap();
    });
}

#[test]
fn owned_blocks_keep_their_contents() {
    on_all(|machine| {
        let block = {
            let _scope = machine.tag("weights").enter().unwrap();
            machine.allocator.allocate(6 * MIB, &machine.streams[0]).unwrap()
        };
        let ptr: DevicePtr = block.ptr();
        machine.sim.fill(ptr, warpool_driver::Pattern::U8(7), block.bytes(), machine.streams[0].id()).unwrap();
        machine.sleep(&["weights"], Keep::Host).unwrap();
        machine.wake(&["weights"]).unwrap();
        machine.expect_at(ptr, block.bytes(), 0x0707_0707, 1);
        machine.sim.stream_synchronize(machine.streams[1].id()).unwrap();
    });
}

#[test]
fn pools_of_others_carry_a_tag_too() {
    on_all(|machine| {
        let pools = machine.allocator.pools().unwrap();
        let make = |upstream| {
            let options = crate::memory::PoolOptions { upstream: Some(upstream), ..Default::default() };
            pools.create_pool(DEVICE, options)
        };
        let own = machine.allocate("graphs", 30 * MIB, 0).unwrap();
        let pool = machine.tags.make_pool(&machine.device, "graphs", make).unwrap();
        let request = Request::new(DEVICE, machine.streams[0].id(), 40 * MIB).in_pool(pool);
        let block = machine.allocator.allocate_raw(request).unwrap();
        machine.write(&block, 4, 0);
        let report = machine.sleep(&["graphs"], Keep::Host).unwrap();
        assert_eq!((report.changed.len(), report.bytes_device), (1, 70 * MIB));
        assert_eq!((machine.tag("graphs").info().bytes, machine.reserved()), (70 * MIB, 0));
        assert_eq!(machine.allocator.allocate_raw(request), Err(Error::TagAsleep { tag: "graphs".into() }));
        let refused = machine.tags.make_pool(&machine.device, "graphs", make).unwrap_err();
        assert_eq!(refused, Error::TagAsleep { tag: "graphs".into() });
        machine.wake(&["graphs"]).unwrap();
        machine.expect(&block, 4, 0);
        machine.allocator.free(block).unwrap();
        machine.allocator.free(own).unwrap();
        pools.release_pool(DEVICE, pool).unwrap();
        machine.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        assert_eq!(machine.tag("graphs").info().bytes, 30 * MIB, "a pool that is gone has no memory");
    });
}

#[test]
fn what_is_prepared_is_not_pinned_by_the_sleep() {
    on_all(|machine| {
        let blocks = [("weights", 30), ("kv", 3)].map(|(tag, mib)| machine.allocate(tag, mib * MIB, 0).unwrap());
        machine.write(&blocks[0], 5, 0);
        let pinned = || (machine.host.stats().num_host_alloc, machine.host.stats().allocated_bytes.current);
        let before = pinned();
        assert_eq!(machine.tags.prepare(&["weights", "kv"]).unwrap(), 33 * MIB);
        let prepared = pinned();
        assert!(prepared.0 > before.0 && prepared.1 >= 33 * MIB, "{prepared:?}");
        assert_eq!(machine.pinned(), 0, "it is cached");
        machine.tags.prepare(&["weights"]).unwrap();
        machine.sleep(&["weights", "kv"], Keep::Host).unwrap();
        assert_eq!(pinned(), prepared);
        assert_eq!(machine.tags.prepare(&["weights"]).unwrap(), 0, "what sleeps has its contents on the host");
        machine.wake(&["weights", "kv"]).unwrap();
        machine.expect(&blocks[0], 5, 0);
        assert!(matches!(machine.tags.prepare(&["nobody"]), Err(Error::UnknownTag { .. })));
        blocks.into_iter().for_each(|block| machine.allocator.free(block).unwrap());
    });
}

#[test]
fn pinned_memory_that_runs_out_while_preparing_is_reported() {
    let pinned = PinnedSettings { cap_bytes: Some(32 * MIB), ..PinnedSettings::default() };
    let machine = Machine::with(Kind::Paged, warpool_driver::sim::SimConfig::default(), 256 * MIB, pinned);
    let blocks = ["weights", "kv"].map(|tag| machine.allocate(tag, 20 * MIB, 0).unwrap());
    let Err(Error::Sleep(failure)) = machine.tags.prepare(&["weights", "kv"]) else { panic!("over the cap") };
    let shortage = SleepShortage::PinnedMemory { bytes_needed: 40 * MIB, bytes_found: 20 * MIB };
    assert_eq!((failure.shortage, failure.is_undone), (shortage, true));
    assert!(Error::Sleep(failure).is_out_of_memory());
    machine.sleep(&["kv"], Keep::Host).unwrap();
    machine.wake(&["kv"]).unwrap();
    blocks.into_iter().for_each(|block| machine.allocator.free(block).unwrap());
    assert_eq!(machine.finish(), None);
}

#[test]
fn what_sleeps_does_not_count_when_pages_are_trimmed_to_a_target() {
    let machine = Machine::new(Kind::Paged, 256 * MIB);
    let weights = machine.allocate("weights", 60 * MIB, 0).unwrap();
    let (kept, freed) = (machine.untagged(20 * MIB, 0).unwrap(), machine.untagged(40 * MIB, 0).unwrap());
    machine.allocator.free(freed).unwrap();
    machine.sleep(&["weights"], Keep::Host).unwrap();
    assert_eq!(machine.reserved(), 60 * MIB);
    assert_eq!(machine.trim_to(60 * MIB), 0);
    assert_eq!((machine.trim_to(48 * MIB), machine.reserved()), (12 * MIB, 48 * MIB));
    machine.wake(&["weights"]).unwrap();
    assert_eq!((machine.trim_to(100 * MIB), machine.reserved()), (8 * MIB, 100 * MIB));
    for block in [weights, kept] {
        machine.allocator.free(block).unwrap();
    }
    assert_eq!(machine.finish(), None);
}
