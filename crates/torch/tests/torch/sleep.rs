//! Memory that sleeps, through `Runtime` on a simulated GPU: tags of threads, statistics, errors of a full device.

use std::sync::Arc;

use warpool::memory::Settings;
use warpool::memory::sleep::{Keep, TagState};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Copies as _, DeviceId, DevicePtr, ForeignStream, Memory as _};
use warpool_torch::{Error, Runtime};

const DEVICE: DeviceId = DeviceId(0);
const MIB: isize = 1 << 20;

fn runtime(settings: &str) -> (Arc<SimDriver>, Runtime) {
    let mut config = SimConfig::default().with_capacity(512 << 20);
    config.devices[0].bytes_context = 0;
    let sim = Arc::new(SimDriver::new(config));
    let runtime = Runtime::new(sim.clone(), Settings::parse(settings).unwrap()).unwrap();
    (sim, runtime)
}

fn allocate(runtime: &Runtime, bytes: isize) -> DevicePtr {
    runtime.malloc(bytes, 0, ForeignStream::NULL).unwrap()
}

/// Allocates in the scope of a tag.
fn tagged(runtime: &Runtime, tag: &str, bytes: isize) -> DevicePtr {
    let scope = runtime.begin_tag(0, tag).unwrap();
    let ptr = allocate(runtime, bytes);
    runtime.end_tag(scope).unwrap();
    ptr
}

with_each_backend! {
    memory_of_a_tag_sleeps_and_wakes,
    calls_without_tags_answer,
    a_full_device_at_waking_is_an_error,
    memory_of_a_tag_is_not_shared_with_other_processes,
    host_memory_is_pinned_ahead,
}

/// Memory that another process has opened would not return to the driver, and it is not known whether one has.
fn memory_of_a_tag_is_not_shared_with_other_processes(backend: &str) {
    let (_, runtime) = runtime(backend);
    let weights = tagged(&runtime, "weights", 30 * MIB);
    let refused = runtime.share(weights, 2).expect_err("it has a tag");
    assert!(matches!(refused, Error::NotShareable) && refused.to_string().contains("it has a tag"), "{refused}");
    runtime.sleep(None, Keep::Host).unwrap();
    assert!(matches!(runtime.share(weights, 2), Err(Error::NotShareable)));
    runtime.wake(None).unwrap();
    runtime.free(weights, 0).unwrap();
}

fn host_memory_is_pinned_ahead(backend: &str) {
    let (_, runtime) = runtime(backend);
    assert_eq!(runtime.prepare_sleep(None).unwrap(), 0);
    let weights = tagged(&runtime, "weights", 30 * MIB);
    assert_eq!(runtime.prepare_sleep(Some(&["weights"])).unwrap(), 30 << 20);
    assert_eq!(runtime.sleep(None, Keep::Host).unwrap().bytes_copied, 30 << 20);
    assert_eq!(runtime.prepare_sleep(None).unwrap(), 0);
    runtime.wake(None).unwrap();
    runtime.free(weights, 0).unwrap();
}

fn memory_of_a_tag_sleeps_and_wakes(backend: &str) {
    let (sim, runtime) = runtime(backend);
    let (weights, cache) = (tagged(&runtime, "weights", 30 * MIB), tagged(&runtime, "kv", 50 * MIB));
    let other = allocate(&runtime, 10 * MIB);
    sim.upload(DEVICE, weights, &[7; 1000]).unwrap();
    sim.upload(DEVICE, cache, &[8; 1000]).unwrap();
    let free = sim.mem_info(DEVICE).unwrap().bytes_free;
    let report = runtime.sleep(None, Keep::Host).unwrap();
    assert_eq!((report.changed.len(), report.bytes_device), (2, 80 << 20));
    assert_eq!(sim.mem_info(DEVICE).unwrap().bytes_free, free + (80 << 20));
    let stats = runtime.stats(0).unwrap();
    assert_eq!(stats.asleep_bytes.all.current, 80 << 20);
    assert!(stats.allocated_bytes.all.current >= 90 << 20);
    assert!(runtime.tags().iter().all(|tag| matches!(tag.state, TagState::Asleep { keep: Keep::Host, .. })));
    runtime.wake(Some(&["weights"])).unwrap();
    let mut bytes = [0; 1000];
    sim.download(DEVICE, weights, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 1000]);
    runtime.free(cache, 0).unwrap();
    runtime.wake(None).unwrap();
    let snapshot = runtime.snapshot().unwrap();
    assert!(snapshot.annotations.iter().any(|mark| mark.name == "asleep: kv" && mark.stage == "END"));
    runtime.free(weights, 0).unwrap();
    runtime.free(other, 0).unwrap();
    assert_eq!(sim.hazards().len(), 0);
}

fn calls_without_tags_answer(backend: &str) {
    let (_, runtime) = runtime(backend);
    assert_eq!(runtime.sleep(None, Keep::Host).unwrap().changed, []);
    assert_eq!(runtime.tags(), []);
    assert!(matches!(
        runtime.sleep(Some(&["nobody"]), Keep::Host),
        Err(Error::Warpool(warpool::Error::UnknownTag { .. }))
    ));
    assert!(matches!(runtime.end_tag(3), Err(Error::TagNotOpen)));
    assert!(matches!(runtime.begin_tag(0, ""), Err(Error::TagName { length: 0 })));
}

fn a_full_device_at_waking_is_an_error(backend: &str) {
    let (_, runtime) = runtime(backend);
    let weights = tagged(&runtime, "weights", 300 * MIB);
    runtime.sleep(None, Keep::Discard).unwrap();
    let other = allocate(&runtime, 400 * MIB);
    let refused = runtime.wake(None).unwrap_err().to_string();
    assert!(refused.contains("300.00 MiB of device memory are needed"), "{refused}");
    runtime.free(other, 0).unwrap();
    runtime.wake(None).unwrap();
    runtime.free(weights, 0).unwrap();
}

#[test]
fn the_drivers_own_pools_cannot_sleep() {
    let (_, runtime) = runtime("backend:cudaMallocAsync");
    let refused = runtime.begin_tag(0, "weights").unwrap_err().to_string();
    assert!(refused.contains("choose backend:native or backend:paged"), "{refused}");
}
