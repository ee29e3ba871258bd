//! `Runtime` on a simulated GPU: stream handles, devices, settings at run time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use warpool::memory::{MemPoolId, Settings};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Call, DeviceId, DevicePtr, ForeignStream, RawHandle, StreamOptions, Streams as _};
use warpool_torch::{Error, Runtime};

const FIRST: DeviceId = DeviceId(0);
const SECOND: DeviceId = DeviceId(1);
const MIB: isize = 1 << 20;
const DEFAULT: ForeignStream = ForeignStream::NULL;

fn two_devices(backend: &str) -> (Arc<SimDriver>, Runtime) {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
    let runtime = Runtime::new(sim.clone(), Settings::parse(backend).unwrap()).unwrap();
    (sim, runtime)
}

fn foreign(raw: u64) -> ForeignStream {
    // SAFETY: the simulated GPU looks handles up and never follows them.
    unsafe { ForeignStream::new(RawHandle(raw)) }
}

fn stream(sim: &SimDriver, device: DeviceId) -> ForeignStream {
    let id = sim.stream_create(device, StreamOptions::default()).unwrap();
    foreign(sim.stream_handle(id).unwrap().raw.0)
}

with_each_backend! {
    handles_are_resolved_to_streams,
    handle_is_resolved_once,
    wrong_handles_are_errors_and_change_nothing,
    edge_case_requests,
    record_stream_finds_the_streams_device,
    segment_of_an_address_is_found,
    empty_cache_skips_unused_devices,
    settings_change_at_run_time,
}

/// 0 and 1 are the default stream of the device in question; each stream has its own blocks.
fn handles_are_resolved_to_streams(backend: &str) {
    let (sim, runtime) = two_devices(backend);
    let own = stream(&sim, FIRST);
    let stream_of = |ptr| runtime.allocator().find(ptr).unwrap().stream;
    let at = |device, raw| runtime.malloc(MIB, device, foreign(raw)).unwrap();
    assert_eq!(stream_of(at(0, 0)), sim.stream_default(FIRST).unwrap());
    assert_eq!(stream_of(at(0, 1)), sim.stream_default(FIRST).unwrap());
    // The same handle right after, on another device.
    assert_eq!(stream_of(at(1, 1)), sim.stream_default(SECOND).unwrap());
    assert_eq!(stream_of(at(1, 0)), sim.stream_default(SECOND).unwrap());
    let block = at(0, own.raw().0);
    assert_eq!(sim.stream_handle(stream_of(block)).unwrap().raw, own.raw());
    runtime.free(block, 0).unwrap();
    assert_ne!(at(0, 0), block, "a block of another stream was reused");
}

fn handle_is_resolved_once(backend: &str) {
    let (sim, runtime) = two_devices(backend);
    let (one, two) = (stream(&sim, FIRST), stream(&sim, FIRST));
    for _ in 0..100 {
        for stream in [one, two] {
            runtime.malloc(MIB, 0, stream).unwrap();
        }
    }
    thread::scope(|scope| _ = scope.spawn(|| runtime.malloc(MIB, 0, one).unwrap()));
    assert_eq!(sim.call_count(Call::StreamAdopt), 2);
}

/// Unknown handles, that of another device, and the per-thread default stream.
fn wrong_handles_are_errors_and_change_nothing(backend: &str) {
    let (sim, runtime) = two_devices(backend);
    let elsewhere = stream(&sim, SECOND);
    for stream in [foreign(0xdead), ForeignStream::PER_THREAD, elsewhere] {
        runtime.malloc(MIB, 0, stream).unwrap_err();
    }
    assert!(runtime.malloc(MIB, 1, elsewhere).is_ok());
    assert_eq!(runtime.allocator().stats(FIRST).unwrap().allocation.all.current, 0);
}

fn edge_case_requests(backend: &str) {
    let (_, runtime) = two_devices(backend);
    assert_eq!(runtime.malloc(0, 0, DEFAULT).unwrap(), DevicePtr(0));
    runtime.free(DevicePtr(0), 0).unwrap();
    runtime.record_stream(DevicePtr(0), DEFAULT).unwrap();
    let text = |outcome: Result<DevicePtr, Error>| outcome.unwrap_err().to_string();
    assert_eq!(text(runtime.malloc(-1, 0, DEFAULT)), "cannot allocate -1 bytes; check how the size was computed");
    assert_eq!(text(runtime.malloc(1, 2, DEFAULT)), "device index 2 is out of range [0, 2)");
    assert!(text(runtime.malloc(0, -3, DEFAULT)).starts_with("device index -3 is negative"));
    let too_large = runtime.malloc(isize::MAX, 0, DEFAULT).unwrap_err();
    assert!(too_large.is_out_of_memory() && too_large.to_string().starts_with("CUDA out of memory. Tried to allocate"));
    assert!(runtime.free(DevicePtr(0x1234), 0).is_err());
    assert!(runtime.record_stream(DevicePtr(0x1234), DEFAULT).is_err());
}

/// The stream may belong to another device than the memory, and the default stream to any device in use.
fn record_stream_finds_the_streams_device(backend: &str) {
    let (sim, runtime) = two_devices(backend);
    let (own, other) = (stream(&sim, FIRST), stream(&sim, SECOND));
    let block = runtime.malloc(MIB, 0, own).unwrap();
    // With pages, the free of a stream's last block records an event in it, too.
    runtime.malloc(MIB, 0, own).unwrap();
    runtime.record_stream(block, other).unwrap();
    runtime.record_stream(block, DEFAULT).unwrap();
    runtime.record_stream(block, foreign(0xdead)).unwrap_err();
    let records = sim.call_count(Call::EventRecord);
    runtime.free(block, 0).unwrap();
    assert_eq!(sim.call_count(Call::EventRecord) - records, 3, "one event per other stream");
}

fn segment_of_an_address_is_found(backend: &str) {
    let (_, runtime) = two_devices(backend);
    let (one, two) = (runtime.malloc(MIB, 0, DEFAULT).unwrap(), runtime.malloc(MIB, 0, DEFAULT).unwrap());
    assert_eq!(runtime.segment_of(two).unwrap(), (one, 2 << 20));
    assert_eq!(runtime.segment_of(two.offset(77)).unwrap(), (one, 2 << 20));
    assert!(runtime.segment_of(DevicePtr(0x10)).is_err());
}

fn empty_cache_skips_unused_devices(backend: &str) {
    let (_, runtime) = two_devices(backend);
    runtime.empty_cache().unwrap();
    let block = runtime.malloc(MIB, 1, DEFAULT).unwrap();
    runtime.free(block, 0).unwrap();
    runtime.empty_cache().unwrap();
    assert_eq!(runtime.allocator().stats(SECOND).unwrap().reserved_bytes.all.current, 0);
    assert_eq!(runtime.allocator().trim(SECOND, MemPoolId::DEFAULT).unwrap(), 0);
}

/// A string adds to the settings in effect; a wrong one changes nothing, and the error lists all problems.
fn settings_change_at_run_time(backend: &str) {
    let (_, runtime) = two_devices(backend);
    runtime.set_settings("expandable_segments:True,per_process_memory_fraction:0.5").unwrap();
    assert_eq!(runtime.allocator().memory_fraction(SECOND).unwrap(), 0.5);
    runtime.set_settings("max_split_size_mb:200").unwrap();
    let before = runtime.settings();
    assert!(before.expandable_segments && before.max_split_bytes == Some(200 << 20));
    let text = runtime.set_settings("max_splt_size_mb:1,garbage_collection_threshold:7").unwrap_err().to_string();
    assert!(text.contains("max_split_size_mb") && text.contains("garbage_collection_threshold"), "{text}");
    assert_eq!(runtime.settings(), before);
    runtime.set_settings("memory_cap_mb:100").unwrap();
    let refused = runtime.malloc(200 * MIB, 0, DEFAULT).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
}

/// Their names are those of the C interface and of Python.
#[test]
fn statistics_of_pages() {
    let (sim, runtime) = two_devices("backend:paged");
    let (one, two) = (runtime.malloc(64 * MIB, 1, DEFAULT).unwrap(), runtime.malloc(MIB, 1, DEFAULT).unwrap());
    runtime.free(one, 1).unwrap();
    let stats: BTreeMap<_, _> = runtime.page_stats(1).unwrap().named().into_iter().collect();
    assert_eq!((stats["active_bytes"], stats["free_mapped_bytes"]), (1 << 20, 65 << 20));
    assert_eq!((stats["reserved_bytes"], stats["pages"], stats["pages_created"]), (66 << 20, 17, 17));
    // On another stream: no new pages.
    let other = stream(&sim, SECOND);
    runtime.malloc(32 * MIB, 1, other).unwrap();
    let stats = runtime.page_stats(1).unwrap();
    assert_eq!((stats.pages, stats.totals.taken, stats.bytes_mapped_twice), (17, 8, 32 << 20));
    runtime.free(two, 1).unwrap();
    assert_eq!(runtime.page_stats(0).unwrap().named().iter().map(|&(_, value)| value).sum::<u64>(), 0);
}

#[test]
fn allocators_without_pages_have_no_statistics_of_them() {
    for backend in ["native", "cudaMallocAsync"] {
        let (_, runtime) = two_devices(&format!("backend:{backend}"));
        let text = runtime.page_stats(0).unwrap_err().to_string();
        assert!(text.contains(&format!("backend:{backend}; choose backend:paged")), "{text}");
    }
}

/// Settings that only PyTorch's allocator has are kept without effect; the backend stays.
#[test]
fn settings_of_the_paged_allocator_change_at_run_time() {
    let (_, runtime) = two_devices("backend:paged");
    runtime.set_settings("max_split_size_mb:200").unwrap();
    assert_eq!(runtime.settings().to_conf_string(), "backend:paged,max_split_size_mb:200");
    let text = runtime.set_settings("backend:native").unwrap_err().to_string();
    assert!(text.contains("the backend is paged and cannot be changed"), "{text}");
}

#[test]
fn paged_allocator_needs_virtual_memory_management() {
    let mut config = SimConfig::default();
    config.devices[0].properties.virtual_memory = false;
    let sim = Arc::new(SimDriver::new(config));
    let refused = Runtime::new(sim.clone(), Settings::parse("backend:paged").unwrap()).unwrap_err().to_string();
    assert!(refused.ends_with("choose backend:native"), "{refused}");
    Runtime::new(sim, Settings::default()).unwrap().malloc(MIB, 0, DEFAULT).unwrap();
}
