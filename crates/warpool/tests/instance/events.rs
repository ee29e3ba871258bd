//! Events and their pools. If a test has a counterpart in PyTorch, its name is given.

use std::sync::Arc;
use std::thread;

use crate::common::launch::launch_graph;
use crate::common::{device, keep_busy, machine};
use warpool::driver::decorate::Counting;
use warpool::driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool::driver::{Call, CaptureMode, Copies, DeviceId, Memory, NodeKind, Pattern};
use warpool::{Endpoint, Error, Event, EventOptions, Instance, PooledEvent, Stream, StreamLease};

fn counted() -> (Arc<Counting>, Instance) {
    let counting = Arc::new(Counting::new(Arc::new(SimDriver::new(SimConfig::default()))));
    let instance = Instance::new(counting.clone()).unwrap();
    (counting, instance)
}

#[test]
fn an_event_never_recorded_is_done() {
    let (counting, instance) = counted();
    let stream = instance.device(0).unwrap().pool_stream().unwrap();
    counting.reset();
    let event = instance.event();
    assert!(event.query().unwrap());
    event.synchronize().unwrap();
    event.wait(&stream).unwrap();
    stream.wait_event(&event).unwrap();
    assert_eq!((event.id(), event.device(), event.is_recorded()), (None, None, false));
    drop(event);
    assert_eq!(counting.counts(), []);
}

#[test]
fn a_reused_event_is_done_until_it_is_recorded() {
    let device = device();
    let stream = device.pool_stream().unwrap();
    let mut old = device.instance().event();
    keep_busy(&stream);
    old.record(&stream).unwrap();
    let id = old.id();
    drop(old);
    let mut new = device.instance().event();
    new.create(&device).unwrap();
    assert_eq!(new.id(), id);
    assert!(!stream.query().unwrap());
    assert!(new.query().unwrap(), "the record of its previous owner counts");
}

/// CUDAEventSyncTest, test_events.
#[test]
fn an_event_orders_streams_and_the_host() {
    let device = device();
    let (first, second) = (device.pool_stream().unwrap(), device.pool_stream().unwrap());
    let mut event = device.instance().event();
    keep_busy(&first);
    first.record_event(&mut event).unwrap();
    assert!(event.is_recorded() && event.device() == Some(device.id()));
    assert!(!event.query().unwrap());
    second.wait_event(&event).unwrap();
    assert!(!second.query().unwrap());
    second.synchronize().unwrap();
    assert!(event.query().unwrap() && first.query().unwrap());
    keep_busy(&first);
    event.record(&first).unwrap();
    event.synchronize().unwrap();
    assert!(event.query().unwrap());
}

/// Writes on one stream and reads on another, with or without a wait between; returns the hazards.
fn write_then_read(seed: u64, wait: impl Fn(&Stream, &Stream)) -> Vec<HazardKind> {
    const BYTES: u64 = 4096;
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_seed(seed)));
    let device = Instance::new(sim.clone()).unwrap().device(0).unwrap();
    let (writer, reader) = (device.lease_stream().unwrap(), device.pool_stream().unwrap());
    let [from, to] = [(); 2].map(|()| sim.mem_alloc(device.id(), BYTES).unwrap());
    sim.fill(from, Pattern::U8(1), BYTES, writer.id()).unwrap();
    wait(&reader, &writer);
    sim.copy(to.into(), from.into(), BYTES, reader.id()).unwrap();
    device.synchronize().unwrap();
    sim.hazards().into_iter().map(|hazard| hazard.kind).collect()
}

#[test]
fn a_wait_orders_memory_accesses_that_race_without_it() {
    for seed in 0..50 {
        let by_stream = write_then_read(seed, |reader, writer| reader.wait_stream(writer).unwrap());
        let by_event = write_then_read(seed, |reader, writer| {
            let mut event = reader.instance().event();
            event.record(writer).unwrap();
            event.wait(reader).unwrap();
        });
        let never_recorded = write_then_read(seed, |reader, _| reader.instance().event().wait(reader).unwrap());
        assert_eq!((by_stream, by_event), (vec![], vec![]), "seed {seed}");
        assert_eq!(never_recorded, [HazardKind::Race], "seed {seed}");
    }
}

/// CrossDeviceTest, test_events_wait.
#[test]
fn a_stream_of_another_device_can_wait_but_not_record() {
    let (_, instance) = machine(2);
    let [zero, one] = [0, 1].map(|index| instance.device(index).unwrap().pool_stream().unwrap());
    let mut event = instance.event();
    keep_busy(&zero);
    event.record(&zero).unwrap();
    event.wait(&one).unwrap();
    assert!(!one.query().unwrap());
    let error = event.record(&one).unwrap_err();
    assert_eq!(error, Error::EventDevice { event: DeviceId(0), stream: DeviceId(1) });
    assert!(error.to_string().starts_with("event of device 0 cannot record on a stream of device 1"));
    one.synchronize().unwrap();
    assert!(event.query().unwrap() && zero.query().unwrap());
    let again = event.create(&instance.device(1).unwrap());
    assert_eq!(again, Err(Error::EventExists { event: DeviceId(0), wanted: DeviceId(1) }));
}

#[test]
fn objects_of_another_instance_are_errors() {
    let (a, b) = (device(), device());
    let stream = b.pool_stream().unwrap();
    let mut event = a.instance().event();
    assert!(matches!(event.record(&stream), Err(Error::ForeignInstance { .. })));
    assert!(matches!(event.wait(&stream), Err(Error::ForeignInstance { .. })));
    assert!(matches!(event.create(&b), Err(Error::ForeignInstance { .. })));
    assert_eq!(event.id(), None);
}

#[test]
fn record_once_records_once() {
    let device = device();
    let (a, b) = (device.pool_stream().unwrap(), device.pool_stream().unwrap());
    let mut event = device.instance().event();
    assert!(event.record_once(&a).unwrap());
    a.synchronize().unwrap();
    keep_busy(&b);
    assert!(!event.record_once(&b).unwrap());
    assert!(event.query().unwrap());
}

/// test_events_elapsedtime, test_events_multi_gpu_elapsed_time, test_event_elapsed_time_restores_device_on_error.
#[test]
fn elapsed_time_has_an_error_for_each_missing_condition() {
    let (_, instance) = machine(2);
    let stream = instance.device(0).unwrap().pool_stream().unwrap();
    let plain = instance.event();
    let (mut start, mut end) = (instance.timing_event(), instance.timing_event());

    let missing = |which| Err(Error::ElapsedWithoutTiming { which });
    assert_eq!(plain.elapsed_ms(&end), missing(Endpoint::Start));
    assert_eq!(start.elapsed_ms(&plain), missing(Endpoint::End));
    assert_eq!(start.elapsed_ms(&end), Err(Error::ElapsedNotRecorded { which: Endpoint::Start }));
    start.record(&stream).unwrap();
    assert_eq!(start.elapsed_ms(&end), Err(Error::ElapsedNotRecorded { which: Endpoint::End }));
    keep_busy(&stream);
    end.record(&stream).unwrap();
    assert_eq!(start.elapsed_ms(&end), Err(Error::ElapsedNotReady));
    assert_eq!(instance.current_device().index(), 0);

    end.synchronize().unwrap();
    let there = start.elapsed_ms(&end).unwrap();
    assert!(there > 0.0);
    assert_eq!(end.elapsed_ms(&start).unwrap(), -there);

    let mut elsewhere = instance.timing_event();
    elsewhere.record(&instance.device(1).unwrap().pool_stream().unwrap()).unwrap();
    let across = Error::ElapsedAcrossDevices { start: DeviceId(0), end: DeviceId(1) };
    assert_eq!(start.elapsed_ms(&elsewhere), Err(across));
}

#[test]
fn the_event_dropped_last_is_reused_first() {
    let (sim, instance) = machine(1);
    let stream = instance.device(0).unwrap().pool_stream().unwrap();
    let recorded = |mut event: Event| {
        event.record(&stream).unwrap();
        event
    };
    let (a, b) = (recorded(instance.event()), recorded(instance.event()));
    let (first, second) = (a.id(), b.id());
    drop(a);
    drop(b);
    assert_eq!((recorded(instance.event()).id(), sim.object_counts().events), (second, 2));
    let (again, other) = (recorded(instance.event()), recorded(instance.event()));
    assert_eq!((again.id(), other.id()), (second, first));
    // Events with other options are not reused for it.
    assert!(![first, second].contains(&recorded(instance.timing_event()).id()));
    assert_eq!(sim.object_counts().events, 3);
}

#[test]
fn the_pool_reserves_and_trims() {
    let (sim, instance) = machine(2);
    let pool = instance.device(1).unwrap().event_pool();
    pool.reserve(5).unwrap();
    pool.reserve(3).unwrap();
    assert_eq!((pool.idle(), sim.object_counts().events), (5, 5));
    let taken = pool.take().unwrap();
    assert_eq!((taken.device_id(), pool.idle()), (DeviceId(1), 4));
    assert_eq!(pool.trim().unwrap(), 4);
    assert_eq!((pool.idle(), sim.object_counts().events), (0, 1));
    drop(taken);
    assert_eq!(pool.trim().unwrap(), 1);
    assert_eq!(sim.object_counts().events, 0);
    assert_eq!(pool.trim().unwrap(), 0);
}

#[test]
fn dropping_events_makes_no_driver_call() {
    let (counting, instance) = counted();
    let stream = instance.device(0).unwrap().pool_stream().unwrap();
    let all = |timing| [false, true].map(|blocking| EventOptions { timing, blocking, ..Default::default() });
    let shared = EventOptions { interprocess: true, ..Default::default() };
    let external = EventOptions { external: true, ..Default::default() };
    let options = [all(false), all(true), [shared, external]].concat();
    let events: Vec<_> = options
        .into_iter()
        .map(|options| {
            let mut event = instance.event_with(options).unwrap();
            event.record(&stream).unwrap();
            event
        })
        .collect();
    counting.reset();
    drop(events);
    assert_eq!(counting.counts(), []);
    // Those that must not be reused are destroyed when the next one is created.
    instance.device(0).unwrap().event_pool().reserve(2).unwrap();
    assert_eq!(counting.count(Call::EventDestroy).calls, 2);
    assert_eq!(counting.count(Call::EventCreate).calls, 1);
}

#[test]
fn exported_events() {
    let device = device();
    let impossible = EventOptions { timing: true, interprocess: true, ..Default::default() };
    assert_eq!(device.instance().event_with(impossible).unwrap_err(), Error::TimingInterprocess);
    assert_eq!(device.instance().event().export(&device), Err(Error::NotInterprocess));

    let mut event = device.instance().event_with(EventOptions { interprocess: true, ..Default::default() }).unwrap();
    let handle = event.export(&device).unwrap();
    assert_eq!(event.device(), Some(device.id()));
    assert!(event.query().unwrap() && !event.is_recorded());
    assert!(event.record_once(&device.pool_stream().unwrap()).unwrap());

    for bytes in [0, 63, 65] {
        assert_eq!(Event::import(&device, &vec![0; bytes]).unwrap_err(), Error::IpcHandleLength { bytes });
    }
    // A process cannot import its own event, nor arbitrary bytes.
    assert!(Event::import(&device, &handle).unwrap_err().driver().is_some());
    assert!(Event::import(&device, &[0xab; 64]).unwrap_err().driver().is_some());
}

#[test]
fn an_exported_event_is_queried_on_the_driver() {
    let (counting, instance) = counted();
    let device = instance.device(0).unwrap();
    let mut event = instance.event_with(EventOptions { interprocess: true, ..Default::default() }).unwrap();
    event.create(&device).unwrap();
    assert!(event.query().unwrap());
    assert_eq!(counting.count(Call::EventQuery).calls, 0);
    event.export(&device).unwrap();
    assert!(event.query().unwrap());
    assert_eq!(counting.count(Call::EventQuery).calls, 1);
}

/// test_graph_external_wait_and_record.
#[test]
fn an_external_event_is_external_only_in_a_capture() {
    let device = device();
    let (instance, driver) = (device.instance(), device.instance().driver());
    let lease: StreamLease = device.lease_stream().unwrap();
    let outside = device.pool_stream().unwrap();
    let external = EventOptions { external: true, ..Default::default() };
    let (mut begun, mut ended) = (instance.event_with(external).unwrap(), instance.event_with(external).unwrap());
    begun.record(&outside).unwrap();
    begun.wait(&outside).unwrap();
    outside.synchronize().unwrap();

    driver.capture_begin(lease.id(), CaptureMode::ThreadLocal).unwrap();
    begun.wait(&lease).unwrap();
    ended.record(&lease).unwrap();
    let graph = driver.capture_end(lease.id()).unwrap();
    let kinds: Vec<_> = driver.graph_topology(graph).unwrap().nodes.iter().map(|node| node.kind).collect();
    assert_eq!(kinds, [NodeKind::EventWait, NodeKind::EventRecord]);

    let exec = driver.graph_instantiate(graph, Default::default()).unwrap();
    keep_busy(&outside);
    begun.record(&outside).unwrap();
    launch_graph(&**driver, exec, lease.id()).unwrap();
    assert!(!lease.query().unwrap());
    ended.synchronize().unwrap();
    assert!(begun.query().unwrap());
    driver.graph_exec_destroy(exec).unwrap();
    driver.graph_destroy(graph).unwrap();
}

#[test]
fn a_plain_event_joins_a_stream_to_the_capture() {
    let device = device();
    let driver = device.instance().driver();
    let (origin, side) = (device.lease_stream().unwrap(), device.lease_stream().unwrap());
    driver.capture_begin(origin.id(), CaptureMode::ThreadLocal).unwrap();
    side.wait_stream(&origin).unwrap();
    assert!(side.is_capturing().unwrap());
    // The event was returned to the pool and taken again: its record in the capture is never queried.
    assert!(device.event_pool().take().unwrap().query().unwrap());
    origin.wait_stream(&side).unwrap();
    let graph = driver.capture_end(origin.id()).unwrap();
    assert!(!side.is_capturing().unwrap());
    driver.graph_destroy(graph).unwrap();
}

#[test]
fn events_move_between_threads() {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<(Event, PooledEvent, Stream, StreamLease, Instance)>();

    let (sim, instance) = machine(1);
    let pool = instance.device(0).unwrap().event_pool();
    pool.reserve(16).unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let stream = instance.device(0).unwrap().pool_stream().unwrap();
                for _ in 0..200 {
                    let [mut a, mut b] = [pool.take().unwrap(), pool.take().unwrap()];
                    assert_ne!(a.id(), b.id());
                    a.record(&stream).unwrap();
                    b.record(&stream).unwrap();
                    thread::scope(|inner| drop(inner.spawn(move || drop(a)).join()));
                    b.synchronize().unwrap();
                }
            });
        }
    });
    assert_eq!((pool.idle(), sim.object_counts().events), (16, 16));
}
