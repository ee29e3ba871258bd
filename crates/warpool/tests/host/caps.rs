//! Caps: which requests are refused, what is unpinned first, and that a refused request changes nothing.

use std::sync::Arc;
use std::sync::Mutex;

use warpool::Error;
use warpool::driver::DeviceId;
use warpool::driver::sim::SimConfig;
use warpool::memory::HostBlock;

use super::context::{KIB, MIB, TestContext};

#[test]
fn a_request_above_the_cap_is_a_pinned_cap_error() {
    let context = TestContext::new("pinned_cap_mb:10");
    let block = context.alloc(6 * MIB);
    let report = context.refused_by_cap(5 * MIB);
    assert_eq!((report.bytes_requested, report.bytes_segment, report.bytes_cap), (5 * MIB, 5 * MIB, 10 * MIB));
    assert_eq!(
        (report.device, report.bytes_pinned, report.bytes_allocated, report.bytes_pending),
        (None, 6 * MIB, 6 * MIB, 0)
    );
    let text = Error::PinnedCap(Box::new(report)).to_string();
    assert_eq!(
        text,
        "pinned memory is capped: 5.00 MiB requested, which pins 5.00 MiB more; 6.00 MiB is pinned in all, of which \
         6.00 MiB is allocated and 0 bytes waits for streams or graphs, and pinned_cap_mb allows 10.00 MiB; free some, \
         or raise the cap"
    );
    // A request for exactly the rest succeeds, and raising the cap helps.
    let rest = context.alloc(4 * MIB);
    context.refused_by_cap(1);
    context.set("pinned_cap_mb:12");
    drop((context.alloc(1), block, rest));
    context.finish();
}

#[test]
fn as_few_cached_segments_as_needed_are_unpinned() {
    let context = TestContext::new("pinned_cap_mb:10");
    let [two, three, four] = [2, 3, 4].map(|mib| context.alloc(mib * MIB));
    drop((two, three));
    // 1 MiB is left and 2 more are needed: the smallest sufficient segment is unpinned.
    let block = context.alloc(3 * MIB + 4 * KIB);
    assert_eq!(context.stats().num_host_free, 1);
    assert_eq!(context.pinned_bytes(), 9 * MIB + 4 * KIB);
    // A request that fails anyway unpins nothing.
    let before = context.pinned_bytes();
    context.refused_by_cap(9 * MIB);
    assert_eq!((context.pinned_bytes(), context.stats().num_host_free), (before, 1));
    drop((block, four));
    context.finish();
}

#[test]
fn a_small_segment_is_limited_by_the_rest_of_the_cap() {
    let context = TestContext::new("pinned_cap_mb:3");
    let large = context.alloc(3 * MIB - 64 * KIB);
    let small = context.alloc(50 * KIB);
    assert_eq!(context.pinned_bytes(), 3 * MIB);
    context.refused_by_cap(20 * KIB);
    drop((large, small));
    context.finish();
}

#[test]
fn every_device_has_its_own_cap() {
    let context = TestContext::on(SimConfig::default().with_devices(2), "pinned_device_cap_mb:4");
    let [zero, one] = [0, 1].map(|index| context.instance.device(index).unwrap());
    let first = context.pinned.allocate_for(3 * MIB, &one).unwrap();
    assert_eq!(context.stats().pinned_bytes_by_device, [0, 3 * MIB]);
    let Err(Error::PinnedCap(report)) = context.pinned.allocate_for(2 * MIB, &one) else {
        panic!("expected a refusal")
    };
    assert_eq!((report.device, report.bytes_pinned), (Some(DeviceId(1)), 3 * MIB));
    assert!(report.to_string().contains("3.00 MiB is pinned for device 1"), "{report}");
    assert!(report.to_string().contains("pinned_device_cap_mb allows 4.00 MiB"), "{report}");
    let second = context.pinned.allocate_for(2 * MIB, &zero).unwrap();
    // A free block of one device does not serve another.
    drop(first);
    let third = context.pinned.allocate_for(2 * MIB, &zero).unwrap();
    assert_eq!(context.stats().pinned_bytes_by_device, [4 * MIB, 3 * MIB]);
    let fourth = context.pinned.allocate_for(3 * MIB, &one).unwrap();
    assert_eq!(context.stats().pinned_bytes_by_device, [4 * MIB, 3 * MIB]);
    drop((second, third, fourth));
    context.finish();
}

#[test]
fn pending_blocks_count_against_the_cap() {
    let context = TestContext::new("pinned_cap_mb:4");
    let stream = context.stream();
    let block = context.alloc(3 * MIB);
    context.pause_stream(&stream);
    context.upload(&block, &stream);
    context.free(block);
    let report = context.refused_by_cap(2 * MIB);
    assert_eq!((report.bytes_allocated, report.bytes_pending), (0, 3 * MIB));
    context.finish_stream(&stream);
    drop(context.alloc(2 * MIB));
    context.finish();
}

#[test]
fn pressure_callbacks_run_before_a_request_fails() {
    let context = TestContext::new("pinned_cap_mb:4");
    let kept: Arc<Mutex<Vec<HostBlock>>> = Arc::new(Mutex::new(vec![context.alloc(3 * MIB)]));
    let release = move |_: DeviceId| !std::mem::take(&mut *kept.lock().unwrap()).is_empty();
    context.pinned.observers().attach_pressure_callback(Arc::new(release));
    let block = context.alloc(3 * MIB);
    context.refused_by_cap(3 * MIB);
    drop(block);
    context.finish();
}

#[test]
fn trim_stops_at_its_target() {
    let context = TestContext::new("");
    let blocks = [1, 2, 3, 4, 5].map(|mib| context.alloc(mib * MIB));
    let kept = context.alloc(7 * MIB);
    assert_eq!((context.trim(0), context.pinned_bytes()), (0, 22 * MIB), "all of it is in use");
    drop(blocks);
    assert_eq!(context.trim(30 * MIB), 0);
    // 2 MiB to unpin: the segment of 2. 6 MiB: none suffices alone, so the largest, and then the smallest sufficient.
    assert_eq!((context.trim(20 * MIB), context.pinned_bytes()), (2 * MIB, 20 * MIB));
    assert_eq!((context.trim(14 * MIB), context.pinned_bytes()), (6 * MIB, 14 * MIB));
    assert_eq!((context.trim(0), context.pinned_bytes()), (7 * MIB, 7 * MIB));
    drop(kept);
    assert_eq!((context.trim(0), context.pinned_bytes()), (7 * MIB, 0));
    context.finish();
}
