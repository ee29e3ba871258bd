//! What-ifs: one that changes nothing gives the recorded result, one that does is replayed in several address orders,
//! with a control; limits stay or are lifted as documented.

use warpool::memory::Settings;
use warpool::memory::report::Snapshot;
use warpool_trace::replay::{
    AllocatorChoice, DeviceReplays, LimitOrigin, Outcome, ReplayOptions, ReplayReport, WhatIf, replay, replay_devices,
};

use crate::common::{MIB, RECORDINGS, recording};

const GIB: u64 = 1024 * MIB;
/// The memory of the H200 that the recordings were made on.
const H200: u64 = 150_109_880_320;

fn snapshot(name: &str) -> Snapshot {
    recording(&format!("{name}.pickle.xz")).snapshot
}

/// All recordings, by name.
fn names() -> Vec<String> {
    let files = std::fs::read_dir(RECORDINGS).expect("the folder").map(|file| file.expect("a file").file_name());
    let names = files.filter_map(|name| name.to_str()?.strip_suffix(".pickle.xz").map(ToOwned::to_owned));
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

fn set(changes: &str) -> WhatIf {
    WhatIf { changes: Some(changes.to_owned()), ..WhatIf::default() }
}

fn on(capacity: u64) -> WhatIf {
    WhatIf { capacity: Some(capacity), ..WhatIf::default() }
}

fn replaced(settings: &str) -> WhatIf {
    WhatIf { settings: Some(Settings::parse(settings).expect("valid settings")), ..WhatIf::default() }
}

/// The figures of a result that are compared.
fn figures(report: &ReplayReport) -> (&'static str, u64, u64, u64, u64, u64) {
    let ReplayReport { outcome, peak_live_bytes, peak_reserved_bytes, segments_allocated, retries, ooms, .. } = report;
    (outcome.name(), *peak_live_bytes, *peak_reserved_bytes, *segments_allocated, *retries, *ooms)
}

#[test]
fn what_if_that_changes_nothing_gives_the_recorded_result() {
    for name in names() {
        let snapshot = snapshot(&name);
        let options = ReplayOptions::default();
        let replays = DeviceReplays::new(&snapshot, &options).expect("a recording");
        let settings = Settings::from_recorded(&snapshot.settings).expect("recorded settings");
        for device in replays.devices() {
            let report = |what_if: &WhatIf| device.report(what_if, &options).expect("an answer");
            let recorded = report(&WhatIf::default());
            let conf = settings.to_conf_string();
            let expandable = if settings.expandable_segments { "True" } else { "False" };
            let mut what_ifs = vec![replaced(&conf), set(&conf), set(&format!("expandable_segments:{expandable}"))];
            // The recorded device, where it is known; as people write it.
            if device.card().bytes_total.is_some() || recorded.inferred.memory_limit.is_none() {
                what_ifs.extend([on(H200), on(150_109_106_995)]);
            }
            if recorded.inferred.memory_limit.is_none() {
                what_ifs.extend([set("per_process_memory_fraction:1.0"), on(200 * GIB), on(1024 * GIB)]);
            }
            for what_if in what_ifs {
                let answer = report(&what_if);
                assert_eq!(figures(&answer), figures(&recorded), "{name}, device {}: {what_if:?}", device.device());
                assert_eq!(answer.in_force.changes, [], "{name}: {what_if:?}");
                assert_eq!(answer.orders.run == answer.orders.fit, answer.ooms == 0, "{name}: {what_if:?}");
            }
        }
    }
}

#[test]
fn what_if_is_answered_for_several_orders_of_addresses() {
    let snapshot = snapshot("oom_stacks.fraction_6gib");
    let options = ReplayOptions { address_orders: Some(4), ..ReplayOptions::default() };
    let replays = DeviceReplays::new(&snapshot, &options).expect("a recording");
    let [device] = replays.devices() else { panic!("one device") };
    let report = device.report(&set("max_split_size_mb:64"), &options).expect("an answer");
    assert_eq!(report.orders.run, 4);
    let control = report.control.expect("addresses matter here");
    assert_eq!(control.run, 4);
    assert!(control.peak_reserved_bytes_least <= control.peak_reserved_bytes_most);
    assert_eq!(report.orders.peak_reserved_bytes_most.max(report.peak_reserved_bytes), report.peak_reserved_bytes);
    assert_eq!(report.ooms == 0, report.orders.all_fit(), "the worst order is reported");
    // The same result again, whatever the order of the threads.
    let again = device.report(&set("max_split_size_mb:64"), &ReplayOptions { threads: Some(1), ..options.clone() });
    let again = again.expect("an answer");
    assert_eq!((again.orders, again.control), (report.orders, report.control));
}

#[test]
fn limits_are_lifted_by_settings_and_by_another_device() {
    let snapshot = snapshot("oom_stacks.fraction_6gib");
    let options = ReplayOptions { address_orders: Some(2), ..ReplayOptions::default() };
    let replays = DeviceReplays::new(&snapshot, &options).expect("a recording");
    let report = |what_if: &WhatIf| replays.devices()[0].report(what_if, &options).expect("an answer");
    let kept = report(&set("garbage_collection_threshold:0.5"));
    assert_eq!((kept.in_force.memory_limit, kept.in_force.limit_origin), (Some(6 * GIB), LimitOrigin::Recorded));
    assert_eq!(kept.warnings, [""; 0], "garbage collection has an effect under a recorded limit");
    for lifts in [set("per_process_memory_fraction:1.0"), on(24 * GIB), on(200 * GIB)] {
        let report = report(&lifts);
        assert_eq!(report.outcome.name(), "completed", "{lifts:?}");
        assert_eq!((report.in_force.memory_limit, report.in_force.limit_lifted), (None, Some(6 * GIB)), "{lifts:?}");
        assert!(report.orders.all_fit() && report.orders.margin_bytes_least > Some(GIB), "{:?}", report.orders);
    }
    let lowered = report(&set("memory_cap_mb:5000"));
    assert_eq!(lowered.outcome.name(), "out_of_memory");
    assert_eq!(
        (lowered.in_force.memory_limit, lowered.in_force.limit_origin),
        (Some(5000 * MIB), LimitOrigin::Settings)
    );
}

#[test]
fn full_device_is_told_from_a_limit() {
    for (name, device_full) in [
        ("device_full.native", true),
        ("device_full.expandable", true),
        ("oom_stacks.fraction_6gib", false),
        ("churn.expandable_cap", false),
        ("churn.max_split_64_cap", false),
    ] {
        let report = replay(&snapshot(name), &ReplayOptions::default()).expect("a recording");
        assert_eq!(report.inferred.memory_limit.expect("a limit").device_full, device_full, "{name}");
        let origin = if device_full { LimitOrigin::RecordedDeviceFull } else { LimitOrigin::Recorded };
        assert_eq!(report.in_force.limit_origin, origin, "{name}");
    }
}

#[test]
fn settings_in_force_and_their_differences_are_reported() {
    let snapshot = snapshot("churn.max_split_40_gc_roundup_8");
    let options = ReplayOptions { address_orders: Some(1), ..ReplayOptions::default() };
    let replays = DeviceReplays::new(&snapshot, &options).expect("a recording");
    let report = |what_if: &WhatIf| replays.devices()[0].report(what_if, &options).expect("an answer");
    let shown = |report: &ReplayReport| {
        let changes = report.in_force.changes.iter();
        let changes: Vec<String> =
            changes.map(|change| format!("{} {} {}", change.key, change.recorded, change.used)).collect();
        format!("{} | {}", report.in_force.settings, changes.join(", "))
    };
    let changed = report(&set("max_split_size_mb:64"));
    assert_eq!(
        shown(&changed),
        "max_split_size_mb:64,garbage_collection_threshold:0.7,roundup_power2_divisions:8 | max_split_size_mb 40 64"
    );
    let replaced = report(&replaced("max_split_size_mb:64"));
    assert_eq!(
        shown(&replaced),
        "max_split_size_mb:64 | max_split_size_mb 40 64, garbage_collection_threshold 0.7 off, \
         roundup_power2_divisions 8 off"
    );
    let paged = WhatIf { allocator: AllocatorChoice::Paged, ..set("max_split_size_mb:64,memory_cap_mb:4096") };
    let paged = report(&paged);
    assert_eq!(shown(&paged), "memory_cap_mb:4096 | memory_cap_mb none 4096");
    assert_eq!(paged.warnings.len(), 1, "{:?}", paged.warnings);
    assert!(paged.warnings[0].contains("`max_split_size_mb`: no effect: the backend paged"), "{:?}", paged.warnings);
    let driver_pool = WhatIf { allocator: AllocatorChoice::DriverPool, ..set("expandable_segments:True") };
    let driver_pool = report(&driver_pool);
    assert!(driver_pool.warnings[0].contains("`expandable_segments`: no effect"), "{:?}", driver_pool.warnings);
}

#[test]
fn devices_have_a_report_each() {
    let mut snapshot = snapshot("mempool.native");
    snapshot.traces.push(snapshot.traces[0].clone());
    let second = snapshot.segments.clone().into_iter();
    snapshot.segments.extend(second.map(|segment| warpool::memory::report::SegmentInfo { device: 1, ..segment }));
    let reports = replay_devices(&snapshot, &ReplayOptions::default()).expect("two devices");
    assert_eq!(reports.iter().map(|report| report.device).collect::<Vec<_>>(), [0, 1]);
    for report in &reports {
        assert!(report.fidelity.exact);
        assert_eq!((report.events, report.peak_reserved_bytes), (839, 1_130_364_928));
        assert!(matches!(report.outcome, Outcome::Completed));
    }
}

#[test]
fn invalid_changes_are_an_error() {
    let options = ReplayOptions { changes: Some("max_splt_size_mb:64".to_owned()), ..ReplayOptions::default() };
    let error = replay(&snapshot("mempool.native"), &options).expect_err("no such key");
    assert!(error.to_string().contains("did you mean `max_split_size_mb`?"), "{error}");
}
