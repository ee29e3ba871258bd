//! The calls in Rust's terms, on simulated GPUs of their own: streams by their handles, devices, settings at run time.

use std::sync::Arc;
use std::thread;

use warpool::memory::{MemPoolId, Settings};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Call, DeviceId, DevicePtr, RawHandle, StreamOptions, Streams as _};
use warpool_torch::{Error, Runtime};

const FIRST: DeviceId = DeviceId(0);
const SECOND: DeviceId = DeviceId(1);
const MIB: isize = 1 << 20;

fn machine() -> (Arc<SimDriver>, Runtime) {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
    let runtime = Runtime::new(sim.clone(), Settings::default()).unwrap();
    (sim, runtime)
}

fn stream(sim: &SimDriver, device: DeviceId) -> RawHandle {
    let id = sim.stream_create(device, StreamOptions::default()).unwrap();
    sim.stream_handle(id).unwrap().raw
}

/// 0 and 1 are the default stream, of the device that is asked for; each stream has blocks of its own.
#[test]
fn handles_lead_to_their_streams() {
    let (sim, runtime) = machine();
    let own = stream(&sim, FIRST);
    let stream_of = |ptr| runtime.allocator().find(ptr).unwrap().stream;
    let at = |device, raw| runtime.malloc(MIB, device, RawHandle(raw)).unwrap();
    assert_eq!(stream_of(at(0, 0)), sim.stream_default(FIRST).unwrap());
    assert_eq!(stream_of(at(0, 1)), sim.stream_default(FIRST).unwrap());
    // The same handle right after, on another device.
    assert_eq!(stream_of(at(1, 1)), sim.stream_default(SECOND).unwrap());
    assert_eq!(stream_of(at(1, 0)), sim.stream_default(SECOND).unwrap());
    let block = at(0, own.0);
    assert_eq!(sim.stream_handle(stream_of(block)).unwrap().raw, own);
    runtime.free(block, 0).unwrap();
    assert_ne!(at(0, 0), block, "another stream's blocks are not given out");
}

#[test]
fn a_handle_is_looked_up_once() {
    let (sim, runtime) = machine();
    let (one, two) = (stream(&sim, FIRST), stream(&sim, FIRST));
    for _ in 0..100 {
        for raw in [one, two] {
            runtime.malloc(MIB, 0, raw).unwrap();
        }
    }
    thread::scope(|scope| _ = scope.spawn(|| runtime.malloc(MIB, 0, one).unwrap()));
    assert_eq!(sim.call_count(Call::StreamAdopt), 2);
}

/// What the driver does not know, or what means another stream on each thread, is refused; nothing is remembered of it.
#[test]
fn wrong_handles_are_errors() {
    let (sim, runtime) = machine();
    let elsewhere = stream(&sim, SECOND);
    for raw in [RawHandle(0xdead), RawHandle(2), elsewhere] {
        runtime.malloc(MIB, 0, raw).unwrap_err();
    }
    assert!(runtime.malloc(MIB, 1, elsewhere).is_ok());
    assert_eq!(runtime.allocator().stats(FIRST).unwrap().allocation.all.current, 0);
}

#[test]
fn odd_requests() {
    let (_, runtime) = machine();
    assert_eq!(runtime.malloc(0, 0, RawHandle(0)).unwrap(), DevicePtr(0));
    runtime.free(DevicePtr(0), 0).unwrap();
    runtime.record_stream(DevicePtr(0), RawHandle(0)).unwrap();
    let text = |outcome: Result<DevicePtr, Error>| outcome.unwrap_err().to_string();
    assert_eq!(text(runtime.malloc(-1, 0, RawHandle(0))), "cannot allocate -1 bytes; check how the size was computed");
    assert_eq!(text(runtime.malloc(1, 2, RawHandle(0))), "device index 2 is out of range [0, 2)");
    assert!(text(runtime.malloc(0, -3, RawHandle(0))).starts_with("there is no device -3"));
    let too_large = runtime.malloc(isize::MAX, 0, RawHandle(0)).unwrap_err();
    assert!(too_large.is_out_of_memory() && too_large.to_string().starts_with("CUDA out of memory. Tried to allocate"));
    assert!(runtime.free(DevicePtr(0x1234), 0).is_err());
    assert!(runtime.record_stream(DevicePtr(0x1234), RawHandle(0)).is_err());
}

/// The block says whose memory it is; the stream may be of another device. The default stream may be that of any device
/// in use.
#[test]
fn record_stream_finds_the_device() {
    let (sim, runtime) = machine();
    let (home, abroad) = (stream(&sim, FIRST), stream(&sim, SECOND));
    let block = runtime.malloc(MIB, 0, home).unwrap();
    runtime.record_stream(block, abroad).unwrap();
    runtime.record_stream(block, RawHandle(0)).unwrap();
    runtime.record_stream(block, RawHandle(0xdead)).unwrap_err();
    let records = sim.call_count(Call::EventRecord);
    runtime.free(block, 0).unwrap();
    assert_eq!(sim.call_count(Call::EventRecord) - records, 3, "one mark for each other stream");
}

/// A base is what sharing between processes needs: the driver's own allocation.
#[test]
fn a_block_knows_its_segment() {
    let (_, runtime) = machine();
    let (one, two) = (runtime.malloc(MIB, 0, RawHandle(0)).unwrap(), runtime.malloc(MIB, 0, RawHandle(0)).unwrap());
    assert_eq!(runtime.segment_of(two).unwrap(), (one, 2 << 20));
    assert_eq!(runtime.segment_of(two.offset(77)).unwrap(), (one, 2 << 20));
    assert!(runtime.segment_of(DevicePtr(0x10)).is_err());
}

/// Nobody is asked about a device that nobody used.
#[test]
fn emptying_the_cache_leaves_other_devices_alone() {
    let (_, runtime) = machine();
    runtime.empty_cache().unwrap();
    let block = runtime.malloc(MIB, 1, RawHandle(0)).unwrap();
    runtime.free(block, 0).unwrap();
    runtime.empty_cache().unwrap();
    assert_eq!(runtime.allocator().stats(SECOND).unwrap().reserved_bytes.all.current, 0);
    assert_eq!(runtime.allocator().trim(SECOND, MemPoolId::DEFAULT).unwrap(), 0);
}

/// A further string adds to what is; a wrong one changes nothing and says everything.
#[test]
fn settings_change_while_it_works() {
    let (_, runtime) = machine();
    runtime.set_settings("expandable_segments:True,per_process_memory_fraction:0.5").unwrap();
    assert_eq!(runtime.allocator().memory_fraction(SECOND).unwrap(), 0.5);
    runtime.set_settings("max_split_size_mb:200").unwrap();
    let before = runtime.settings();
    assert!(before.expandable_segments && before.max_split_bytes == Some(200 << 20));
    let text = runtime.set_settings("max_splt_size_mb:1,garbage_collection_threshold:7").unwrap_err().to_string();
    assert!(text.contains("max_split_size_mb") && text.contains("garbage_collection_threshold"), "{text}");
    assert_eq!(runtime.settings(), before);
    runtime.set_settings("memory_cap_mb:100").unwrap();
    let refused = runtime.malloc(200 * MIB, 0, RawHandle(0)).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
}
