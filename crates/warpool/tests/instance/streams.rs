//! Streams, guards and leases. If a test has a counterpart in PyTorch, its name is given.

use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use crate::common::{device, keep_busy, machine};
use warpool::driver::decorate::Counting;
use warpool::driver::sim::{SimConfig, SimDevice, SimDriver};
use warpool::driver::{
    Call, CaptureMode, DeviceId, Driver, ForeignStream, PriorityRange, RawHandle, StreamOptions, Streams,
};
use warpool::{Error, Instance, MultiStreamGuard, STREAMS_PER_POOL, Stream};

#[test]
fn a_device_index_out_of_range_is_an_error() {
    let (_, instance) = machine(2);
    assert_eq!(instance.device(7).unwrap_err().to_string(), "device index 7 is out of range [0, 2)");
    assert_eq!(instance.device(2).unwrap_err(), Error::DeviceOutOfRange { index: 2, count: 2 });
    assert_eq!(instance.devices().map(|device| device.index()).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(instance.device(1).unwrap().properties().peers, [DeviceId(0)]);
}

#[test]
fn a_driver_without_devices_is_an_error() {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(0)));
    assert_eq!(Instance::new(sim).unwrap_err(), Error::NoDevice { driver: "sim" });
}

#[test]
fn an_instance_creates_no_context() {
    let (sim, instance) = machine(2);
    let _ = (instance.current_device(), instance.event(), instance.device(1).unwrap().event_pool());
    let _guard = instance.device(1).unwrap().enter();
    assert_eq!(sim.object_counts().streams, 0);
    assert_eq!(sim.object_counts().events, 0);
    assert_eq!(sim.object_counts().bytes_used, 0);
}

/// StreamPoolTest.
#[test]
fn the_33rd_stream_equals_the_first() {
    let (sim, instance) = machine(2);
    let device = instance.device(0).unwrap();
    let streams: Vec<_> = (0..200).map(|_| device.pool_stream().unwrap()).collect();
    assert_eq!(streams.iter().map(Stream::id).collect::<HashSet<_>>().len(), STREAMS_PER_POOL);
    assert_eq!(streams[32], streams[0]);
    assert_eq!(streams[199], streams[199 % 32]);
    assert!(streams.iter().all(|stream| !stream.is_default().unwrap() && stream.info().unwrap().non_blocking));
    // Created only for the priority and device that were used.
    assert_eq!(sim.object_counts().streams, 32);
}

/// A stream as if another library had created it.
fn as_foreign(raw: RawHandle) -> ForeignStream {
    // SAFETY: these tests destroy no stream, and a simulated driver follows no handle.
    unsafe { ForeignStream::new(raw) }
}

/// CopyAndMoveTest.
#[test]
fn equal_streams_hash_alike() {
    let device = device();
    let hash = |stream: &Stream| BuildHasherDefault::<DefaultHasher>::default().hash_one(stream);
    let stream = device.pool_stream().unwrap();
    let copy = stream.clone();
    assert_eq!((&copy, hash(&copy)), (&stream, hash(&stream)));
    let same = Stream::external(&device, as_foreign(stream.raw().unwrap())).unwrap();
    assert_eq!((&same, hash(&same)), (&stream, hash(&stream)));
    assert_ne!(device.pool_stream().unwrap(), stream);
}

#[test]
fn every_device_and_priority_has_its_own_round_robin() {
    let (sim, instance) = machine(2);
    let first = |device: u32, priority| instance.device(device).unwrap().pool_stream_at(priority).unwrap().id();
    let all: HashSet<_> = [(0, 0), (0, -1), (0, -2), (0, -3), (1, 0)].map(|(d, p)| first(d, p)).into();
    assert_eq!(all.len(), 5);
    assert_eq!(sim.object_counts().streams, 5 * 32);
}

/// StreamPriorityTest.
#[test]
fn priorities_are_clamped() {
    let device = device();
    // The device has 0 to -5; pools are kept for four priorities, as in PyTorch.
    assert_eq!(device.priority_range().unwrap(), PriorityRange { least: 0, greatest: -3 });
    for (requested, got) in [(0, 0), (-1, -1), (-3, -3), (-4, -3), (-100, -3), (5, 0), (i32::MIN, -3), (i32::MAX, 0)] {
        assert_eq!(device.pool_stream_at(requested).unwrap().priority().unwrap(), got, "requested for {requested}");
        assert_eq!(device.lease_stream_at(requested).unwrap().priority().unwrap(), got, "leased at {requested}");
    }
    assert_eq!(device.high_priority_stream().unwrap().priority().unwrap(), -3);
    assert_eq!(device.pool_stream().unwrap().priority().unwrap(), 0);
}

#[test]
fn a_device_with_fewer_priorities() {
    let mut config = SimConfig::default();
    config.devices[0] = SimDevice { priorities: PriorityRange { least: 0, greatest: -1 }, ..SimDevice::h200() };
    let device = Instance::new(Arc::new(SimDriver::new(config))).unwrap().device(0).unwrap();
    assert_eq!(device.priority_range().unwrap(), PriorityRange { least: 0, greatest: -1 });
    assert_eq!(device.high_priority_stream().unwrap().priority().unwrap(), -1);
}

/// GetAndSetTest.
#[test]
fn the_current_stream_starts_as_the_default() {
    let device = device();
    let default = device.default_stream().unwrap();
    assert_eq!(device.current_stream().unwrap(), default);
    let mine = device.pool_stream().unwrap();
    mine.make_current();
    assert_eq!(device.current_stream().unwrap(), mine);
    assert_eq!(device.instance().current_stream().unwrap(), mine);
    assert_ne!(mine, default);
    default.make_current();
    assert_eq!(device.current_stream().unwrap(), default);
}

/// MultithreadGetAndSetTest.
#[test]
fn another_thread_is_not_affected() {
    let (_, instance) = machine(2);
    let default = instance.current_stream().unwrap();
    let set = |instance: Instance| {
        thread::spawn(move || {
            let device = instance.device(1).unwrap();
            device.make_current();
            let stream = device.pool_stream().unwrap();
            stream.make_current();
            assert_eq!(instance.current_stream().unwrap(), stream);
            stream
        })
    };
    let threads = [set(instance.clone()), set(instance.clone())];
    let [a, b] = threads.map(|thread| thread.join().unwrap());
    assert_ne!(a, b);
    assert_eq!(instance.current_device().index(), 0);
    assert_eq!(instance.current_stream().unwrap(), default);
    assert_eq!(a.device().current_stream().unwrap(), a.device().default_stream().unwrap());
}

/// MultiGPUTest.
#[test]
fn setting_a_stream_does_not_change_the_device() {
    let (_, instance) = machine(2);
    let streams: Vec<_> = instance.devices().map(|device| device.pool_stream().unwrap()).collect();
    streams.iter().for_each(Stream::make_current);
    assert_eq!(instance.current_device().index(), 0);
    assert_eq!(instance.current_stream().unwrap(), streams[0]);
    let _guard = instance.device(1).unwrap().enter();
    assert_eq!(instance.current_stream().unwrap(), streams[1]);
}

#[test]
fn two_instances_have_separate_current_streams() {
    let (_, a) = machine(2);
    let (_, b) = machine(2);
    a.device(1).unwrap().make_current();
    assert_eq!((a.current_device().index(), b.current_device().index()), (1, 0));
    assert_ne!(a.current_stream().unwrap(), b.device(1).unwrap().current_stream().unwrap());
    let outcome = a.current_stream().unwrap().wait_stream(&b.current_stream().unwrap());
    assert!(matches!(outcome, Err(Error::ForeignInstance { .. })));
}

/// CUDAGuardTest.
#[test]
fn a_stream_guard_restores_stream_and_device() {
    let (_, instance) = machine(2);
    let [zero, one] = [0, 1].map(|index| instance.device(index).unwrap());
    let a: Vec<_> = (0..2).map(|_| zero.pool_stream().unwrap()).collect();
    let b: Vec<_> = (0..2).map(|_| one.pool_stream().unwrap()).collect();
    a[0].make_current();
    b[0].make_current();
    {
        let _guard = b[1].enter();
        assert_eq!(instance.current_device(), one);
        assert_eq!(instance.current_stream().unwrap(), b[1]);
        {
            let _guard = a[1].enter();
            assert_eq!(instance.current_device(), zero);
            assert_eq!(instance.current_stream().unwrap(), a[1]);
            assert_eq!(one.current_stream().unwrap(), b[1]);
        }
        assert_eq!(instance.current_device(), one);
        assert_eq!(zero.current_stream().unwrap(), a[0]);
    }
    assert_eq!(instance.current_device(), zero);
    assert_eq!(one.current_stream().unwrap(), b[0]);
    assert_eq!(zero.current_stream().unwrap(), a[0]);
}

#[test]
fn stream_guards_restore_in_any_order() {
    let (_, instance) = machine(2);
    let [zero, one] = [0, 1].map(|index| instance.device(index).unwrap());
    let (a, b, c) = (zero.pool_stream().unwrap(), one.pool_stream().unwrap(), zero.pool_stream().unwrap());
    let first = a.enter();
    let second = b.enter();
    let third = c.enter();
    drop(first);
    assert_eq!(zero.current_stream().unwrap(), c);
    drop(third);
    assert_eq!(instance.current_device(), one);
    assert_eq!(zero.current_stream().unwrap(), zero.default_stream().unwrap());
    assert_eq!(one.current_stream().unwrap(), b);
    drop(second);
    assert_eq!(instance.current_device(), zero);
    assert_eq!(one.current_stream().unwrap(), one.default_stream().unwrap());
}

#[test]
fn a_multi_stream_guard_sets_several_streams_and_not_the_device() {
    let (_, instance) = machine(3);
    let streams: Vec<_> = [1, 2].map(|index| instance.device(index).unwrap().pool_stream().unwrap()).into();
    {
        let _guard = MultiStreamGuard::enter(&streams);
        assert_eq!(instance.current_device().index(), 0);
        for stream in &streams {
            assert_eq!(stream.device().current_stream().unwrap(), *stream);
        }
        assert!(instance.current_stream().unwrap().is_default().unwrap());
    }
    assert!(instance.devices().all(|device| device.current_stream().unwrap().is_default().unwrap()));
}

#[test]
fn a_guard_restores_when_the_scope_panics() {
    let (_, instance) = machine(2);
    let stream = instance.device(1).unwrap().pool_stream().unwrap();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _guard = stream.enter();
        std::panic::resume_unwind(Box::new("on purpose"));
    }));
    assert!(outcome.is_err());
    assert_eq!(instance.current_device().index(), 0);
    assert!(stream.device().current_stream().unwrap().is_default().unwrap());
}

#[test]
fn reading_and_setting_what_is_current_makes_no_driver_call() {
    let counting = Arc::new(Counting::new(Arc::new(SimDriver::new(SimConfig::default().with_devices(2)))));
    let instance = Instance::new(counting.clone()).unwrap();
    let stream = instance.device(1).unwrap().pool_stream().unwrap();
    instance.current_stream().unwrap();
    counting.reset();
    for _ in 0..10 {
        let _guard = stream.enter();
        assert_eq!(instance.current_stream().unwrap(), stream);
        instance.device(0).unwrap().make_current();
        assert_ne!(instance.current_stream().unwrap(), stream);
        stream.device().pool_stream().unwrap();
    }
    assert_eq!(counting.counts(), []);
}

/// ExternalTest, ExternalMultiDeviceTest, ExternalGuardTest.
#[test]
fn external_streams_keep_their_handles() {
    let (sim, instance) = machine(2);
    let foreign: Vec<_> = instance
        .devices()
        .map(|device| {
            let id = sim.stream_create(device.id(), StreamOptions::default()).unwrap();
            (device, as_foreign(sim.stream_handle(id).unwrap().raw))
        })
        .collect();
    let streams: Vec<_> = foreign.iter().map(|(device, foreign)| Stream::external(device, *foreign).unwrap()).collect();
    for (stream, (device, foreign)) in streams.iter().zip(&foreign) {
        assert_eq!(stream.raw().unwrap(), foreign.raw());
        assert_eq!(stream.device(), *device);
        assert_eq!(*stream, Stream::external(device, *foreign).unwrap());
        let _guard = stream.enter();
        assert_eq!(instance.current_stream().unwrap(), *stream);
    }
    assert_ne!(streams[0], streams[1]);
    keep_busy(&streams[0]);
    assert!(!streams[0].query().unwrap());
    streams[0].synchronize().unwrap();
    assert!(streams[0].query().unwrap());
}

/// test_external_stream_wraps_null_handle.
#[test]
fn the_null_handle_is_the_default_stream() {
    let (_, instance) = machine(2);
    for device in instance.devices() {
        assert_eq!(Stream::external(&device, ForeignStream::NULL).unwrap(), device.default_stream().unwrap());
        assert_eq!(Stream::external(&device, ForeignStream::LEGACY).unwrap(), device.default_stream().unwrap());
        // One handle for a different stream on each thread: state that is kept per stream would not be ordered.
        assert_eq!(Stream::external(&device, ForeignStream::PER_THREAD), Err(Error::PerThreadStream));
    }
}

/// ExternalMultiThreadTest.
#[test]
fn external_streams_are_current_per_thread() {
    let (sim, instance) = machine(1);
    let device = instance.device(0).unwrap();
    let foreign = [(); 2].map(|()| {
        let id = sim.stream_create(device.id(), StreamOptions::default()).unwrap();
        as_foreign(sim.stream_handle(id).unwrap().raw)
    });
    let both_set = Barrier::new(2);
    thread::scope(|scope| {
        for foreign in foreign {
            let (device, both_set) = (&device, &both_set);
            scope.spawn(move || {
                Stream::external(device, foreign).unwrap().make_current();
                both_set.wait();
                assert_eq!(device.current_stream().unwrap().raw().unwrap(), foreign.raw());
            });
        }
    });
}

#[test]
fn a_stream_can_be_queried_for_completion_and_for_captures() {
    let device = device();
    let (busy, idle) = (device.pool_stream().unwrap(), device.pool_stream().unwrap());
    keep_busy(&busy);
    assert!(!busy.query().unwrap() && idle.query().unwrap());
    idle.wait_stream(&busy).unwrap();
    idle.synchronize().unwrap();
    assert!(busy.query().unwrap());

    let driver = device.instance().driver();
    assert!(!idle.is_capturing().unwrap());
    driver.capture_begin(idle.id(), CaptureMode::ThreadLocal).unwrap();
    assert!(idle.is_capturing().unwrap() && !busy.is_capturing().unwrap());
    driver.capture_end(idle.id()).unwrap();
    assert!(!idle.is_capturing().unwrap());
}

#[test]
fn a_host_callback_runs_in_stream_order() {
    let stream = device().pool_stream().unwrap();
    let count = Arc::new(AtomicU32::new(0));
    keep_busy(&stream);
    let counter = Arc::clone(&count);
    stream
        .host_callback(move || {
            counter.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
    stream.synchronize().unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[test]
fn leased_streams_are_exclusive() {
    let (sim, instance) = machine(1);
    let device = instance.device(0).unwrap();
    let shared: HashSet<_> = (0..64).map(|_| device.pool_stream().unwrap().id()).collect();
    let leases: Vec<_> = (0..40).map(|_| device.lease_stream().unwrap()).collect();
    let leased: HashSet<_> = leases.iter().map(|lease| lease.id()).collect();
    assert_eq!(leased.len(), 40);
    assert!(leased.is_disjoint(&shared));
    drop(leases);
    // Never more than were leased at the same time, and the longest idle first.
    for _ in 0..3 {
        let again: Vec<_> = (0..40).map(|_| device.lease_stream().unwrap()).collect();
        assert!(again.iter().all(|lease| leased.contains(&lease.id())));
    }
    assert_eq!(sim.object_counts().streams, 32 + 40);
}

#[test]
fn a_lease_is_returned_without_a_driver_call() {
    let counting = Arc::new(Counting::new(Arc::new(SimDriver::new(SimConfig::default()))));
    let device = Instance::new(counting.clone()).unwrap().device(0).unwrap();
    let lease = device.lease_stream().unwrap();
    keep_busy(&lease);
    counting.reset();
    drop(lease);
    assert_eq!(counting.counts(), []);
    drop(device.lease_stream().unwrap());
    assert_eq!(counting.count(Call::StreamCreate).calls, 0);
}

#[test]
fn the_stream_returned_first_is_leased_first() {
    let device = device();
    let (a, b, c) = (device.lease_stream().unwrap(), device.lease_stream().unwrap(), device.lease_stream().unwrap());
    let expected = [b.id(), c.id(), a.id()];
    drop(b);
    drop(c);
    drop(a);
    assert_eq!([(); 3].map(|()| device.lease_stream().unwrap()).map(|lease| lease.id()), expected);
}

#[test]
fn a_stream_returned_while_it_captures_is_not_leased() {
    let device = device();
    let driver: &dyn Driver = &**device.instance().driver();
    let lease = device.lease_stream().unwrap();
    let capturing = lease.id();
    driver.capture_begin(capturing, CaptureMode::Relaxed).unwrap();
    drop(lease);
    let other = device.lease_stream().unwrap();
    assert_ne!(other.id(), capturing);
    driver.capture_end(capturing).unwrap();
    assert_eq!(device.lease_stream().unwrap().id(), capturing);
}

#[test]
fn threads_share_pools() {
    const THREADS: usize = 8;
    let (sim, instance) = machine(2);
    let start = Barrier::new(THREADS);
    let handed_out: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    let device = instance.device(1).unwrap();
                    let mut streams = Vec::new();
                    for _ in 0..STREAMS_PER_POOL {
                        streams.push(device.pool_stream().unwrap().id());
                        let (a, b) = (device.lease_stream().unwrap(), device.lease_stream().unwrap());
                        assert_ne!(a.stream(), b.stream());
                    }
                    streams
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    // One round-robin for all threads: each stream equally often.
    let distinct: HashSet<_> = handed_out.iter().collect();
    assert_eq!(distinct.len(), STREAMS_PER_POOL);
    for stream in distinct {
        assert_eq!(handed_out.iter().filter(|other| *other == stream).count(), THREADS);
    }
    assert!(sim.object_counts().streams <= STREAMS_PER_POOL + 2 * THREADS);
}

#[test]
fn close_destroys_everything_once_it_is_the_last_handle() {
    let (sim, instance) = machine(2);
    let before = sim.object_counts();
    let stream = instance.device(1).unwrap().pool_stream().unwrap();
    drop(instance.device(0).unwrap().lease_stream().unwrap());
    stream.wait_stream(&instance.current_stream().unwrap()).unwrap();
    let another = instance.clone();
    assert_eq!(another.close(), Err(Error::StillInUse { references: 2 }));
    drop(stream);
    instance.close().unwrap();
    let after = sim.object_counts();
    assert_eq!((after.streams, after.events), (before.streams, before.events));
}
