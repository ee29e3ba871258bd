//! Caps: what is refused, what makes room first, and that a refused request takes nothing.

use std::sync::Arc;
use std::sync::Mutex;

use warpool::Error;
use warpool::driver::DeviceId;
use warpool::driver::sim::SimConfig;
use warpool::memory::HostBlock;

use super::lab::{HostLab, KIB, MIB};

#[test]
fn a_cap_on_all_is_an_error_of_its_own_kind() {
    let lab = HostLab::new("pinned_cap_mb:10");
    let block = lab.alloc(6 * MIB);
    let report = lab.capped(5 * MIB);
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
    // Exactly what is left is fine, and raising the cap helps.
    let rest = lab.alloc(4 * MIB);
    lab.capped(1);
    lab.set("pinned_cap_mb:12");
    drop((lab.alloc(1), block, rest));
    lab.finish();
}

#[test]
fn cached_segments_make_room_and_only_as_many_as_needed() {
    let lab = HostLab::new("pinned_cap_mb:10");
    let [two, three, four] = [2, 3, 4].map(|mib| lab.alloc(mib * MIB));
    drop((two, three));
    // 1 MiB is left and 2 more are missing: the smallest segment that is enough goes.
    let block = lab.alloc(3 * MIB + 4 * KIB);
    assert_eq!(lab.stats().num_host_free, 1);
    assert_eq!(lab.pinned_bytes(), 9 * MIB + 4 * KIB);
    // What would not fit even then takes nobody's cache.
    let before = lab.pinned_bytes();
    lab.capped(9 * MIB);
    assert_eq!((lab.pinned_bytes(), lab.stats().num_host_free), (before, 1));
    drop((block, four));
    lab.finish();
}

#[test]
fn the_last_small_segment_takes_what_is_left() {
    let lab = HostLab::new("pinned_cap_mb:3");
    let large = lab.alloc(3 * MIB - 64 * KIB);
    let small = lab.alloc(50 * KIB);
    assert_eq!(lab.pinned_bytes(), 3 * MIB);
    lab.capped(20 * KIB);
    drop((large, small));
    lab.finish();
}

#[test]
fn every_device_has_its_own_cap() {
    let lab = HostLab::on(SimConfig::default().with_devices(2), "pinned_device_cap_mb:4");
    let [zero, one] = [0, 1].map(|index| lab.instance.device(index).unwrap());
    let first = lab.pinned.allocate_for(3 * MIB, &one).unwrap();
    assert_eq!(lab.stats().pinned_bytes_by_device, [0, 3 * MIB]);
    let Err(Error::PinnedCap(report)) = lab.pinned.allocate_for(2 * MIB, &one) else { panic!("too much") };
    assert_eq!((report.device, report.bytes_pinned), (Some(DeviceId(1)), 3 * MIB));
    assert!(report.to_string().contains("3.00 MiB is pinned for device 1"), "{report}");
    assert!(report.to_string().contains("pinned_device_cap_mb allows 4.00 MiB"), "{report}");
    let second = lab.pinned.allocate_for(2 * MIB, &zero).unwrap();
    // A free block of one device is not another's.
    drop(first);
    let third = lab.pinned.allocate_for(2 * MIB, &zero).unwrap();
    assert_eq!(lab.stats().pinned_bytes_by_device, [4 * MIB, 3 * MIB]);
    let fourth = lab.pinned.allocate_for(3 * MIB, &one).unwrap();
    assert_eq!(lab.stats().pinned_bytes_by_device, [4 * MIB, 3 * MIB]);
    drop((second, third, fourth));
    lab.finish();
}

/// What waits for a stream is no room, and the report says where it is.
#[test]
fn what_waits_counts() {
    let lab = HostLab::new("pinned_cap_mb:4");
    let stream = lab.stream();
    let block = lab.alloc(3 * MIB);
    lab.pause_stream(&stream);
    lab.upload(&block, &stream);
    lab.free(block);
    let report = lab.capped(2 * MIB);
    assert_eq!((report.bytes_allocated, report.bytes_pending), (0, 3 * MIB));
    lab.let_go(&stream);
    drop(lab.alloc(2 * MIB));
    lab.finish();
}

#[test]
fn callbacks_are_asked_before_it_fails() {
    let lab = HostLab::new("pinned_cap_mb:4");
    let hoard: Arc<Mutex<Vec<HostBlock>>> = Arc::new(Mutex::new(vec![lab.alloc(3 * MIB)]));
    let theirs = Arc::clone(&hoard);
    let give = move |_: DeviceId| !std::mem::take(&mut *theirs.lock().unwrap()).is_empty();
    lab.pinned.observers().attach_pressure_callback(Arc::new(give));
    let block = lab.alloc(3 * MIB);
    lab.capped(3 * MIB);
    drop(block);
    lab.finish();
}

#[test]
fn trim_stops_at_its_target() {
    let lab = HostLab::new("");
    let blocks = [1, 2, 3, 4, 5].map(|mib| lab.alloc(mib * MIB));
    let kept = lab.alloc(7 * MIB);
    assert_eq!((lab.trim(0), lab.pinned_bytes()), (0, 22 * MIB), "all of it is in use");
    drop(blocks);
    assert_eq!(lab.trim(30 * MIB), 0);
    // 2 too many: the segment of 2 goes. 6 too many: none is enough alone, so the largest, and then the one that is.
    assert_eq!((lab.trim(20 * MIB), lab.pinned_bytes()), (2 * MIB, 20 * MIB));
    assert_eq!((lab.trim(14 * MIB), lab.pinned_bytes()), (6 * MIB, 14 * MIB));
    assert_eq!((lab.trim(0), lab.pinned_bytes()), (7 * MIB, 7 * MIB));
    drop(kept);
    assert_eq!((lab.trim(0), lab.pinned_bytes()), (7 * MIB, 0));
    lab.finish();
}
