//! Candidates and their ranks.

use warpool_trace::replay::{AllocatorChoice, DeviceReplay, DeviceReplays, ReplayOptions};
use warpool_trace::tune::{Candidate, SmallestDevice, TrialOptions, Tuned, candidates, try_all, tune};

use crate::common::recording;

const OPTIONS: TrialOptions<'static> = TrialOptions { capacity: None, address_orders: 1, threads: 2, progress: None };

#[test]
fn candidates_without_effect_are_left_out() {
    let snapshot = recording("resnet_train.native.pickle.xz").snapshot;
    let replays = DeviceReplays::new(&snapshot, &ReplayOptions::default()).expect("a recording");
    let devices: Vec<&DeviceReplay<'_>> = replays.devices().iter().collect();
    let names: Vec<String> = candidates(&devices).into_iter().map(|candidate| candidate.name).collect();
    assert_eq!(names[0], "as recorded");
    assert!(!names.iter().any(|name| name.contains("garbage")), "there is no limit: {names:?}");
    assert!(!names.contains(&"defaults".to_owned()), "it was recorded with them: {names:?}");
    assert!(names.len() >= 10, "{names:?}");
    let limited = recording("oom_stacks.fraction_6gib.pickle.xz").snapshot;
    let replays = DeviceReplays::new(&limited, &ReplayOptions::default()).expect("a recording");
    let devices: Vec<&DeviceReplay<'_>> = replays.devices().iter().collect();
    assert!(candidates(&devices).iter().any(|candidate| candidate.name == "garbage_collection_threshold:0.8"));
}

#[test]
fn the_least_reserved_is_first_among_those_that_fit() {
    let one = recording("resnet_train.native.pickle.xz").snapshot;
    let two = recording("oom_stacks.fraction_6gib.pickle.xz").snapshot;
    let options = ReplayOptions::default();
    let replays = [&one, &two].map(|snapshot| DeviceReplays::new(snapshot, &options).expect("a recording"));
    let devices: Vec<&DeviceReplay<'_>> = replays.iter().flat_map(DeviceReplays::devices).collect();
    let tried = vec![
        Candidate::recorded(&Default::default()),
        Candidate::replaced("expandable_segments:True").expect("valid"),
        Candidate::replaced("roundup_power2_divisions:2").expect("valid"),
    ];
    let tuned = tune(&devices, tried, &OPTIONS).expect("replays");
    assert_eq!(tuned[0].candidate.set, "expandable_segments:True");
    assert!(tuned[0].fits() && !tuned[1].fits(), "one of the two ran out of memory as recorded");
    assert_eq!(tuned[0].reports.len(), 2);
    let peaks: Vec<u64> = tuned[1..].iter().map(Tuned::peak_reserved_bytes).collect();
    assert!(peaks.is_sorted(), "{peaks:?}");
    for tuned in &tuned {
        check_smallest(&devices, tuned, &OPTIONS);
    }
}

/// On the smallest device it fits, and on one that is smaller by twice the tolerance it does not.
fn check_smallest(devices: &[&DeviceReplay<'_>], tuned: &Tuned, options: &TrialOptions<'_>) {
    let Tuned { candidate, smallest_device, .. } = tuned;
    let SmallestDevice { bytes, tolerance_bytes } = smallest_device.expect("each fits where memory is ample");
    assert!(tolerance_bytes <= (bytes / 100).max(64 << 20), "{}: {tolerance_bytes} of {bytes}", candidate.name);
    let fits = |capacity| {
        let options = TrialOptions { capacity: Some(capacity), ..*options };
        let reports = try_all(devices, std::slice::from_ref(candidate), &options).expect("replays");
        reports[0].iter().all(|report| report.orders.all_fit())
    };
    assert!(fits(bytes), "{}: {bytes}", candidate.name);
    assert!(!fits(bytes - 2 * tolerance_bytes), "{}: {bytes} is not the smallest", candidate.name);
}

#[test]
fn smallest_device_is_the_smallest_for_every_candidate() {
    let options = TrialOptions { address_orders: 3, ..OPTIONS };
    for name in [
        "churn.gc_call",
        "device_full.native",
        "device_full.expandable",
        "graphs.native",
        "pools.native",
        "ring.late_streams",
        "verdict.fragmentation",
        "verdict.other_stream",
    ] {
        let snapshot = recording(&format!("{name}.pickle.xz")).snapshot;
        let replays = DeviceReplays::new(&snapshot, &ReplayOptions::default()).expect("a recording");
        let devices: Vec<&DeviceReplay<'_>> = replays.devices().iter().collect();
        let tuned = tune(&devices, candidates(&devices), &options).expect("replays");
        for tuned in tuned.iter().filter(|tuned| tuned.smallest_device.is_some()) {
            check_smallest(&devices, tuned, &options);
        }
        assert!(tuned.iter().filter(|tuned| tuned.smallest_device.is_some()).count() > 3, "{name}");
    }
}

#[test]
fn another_allocator_has_to_save_materially_more() {
    let snapshot = recording("oom_stacks.fraction_6gib.pickle.xz").snapshot;
    let replays = DeviceReplays::new(&snapshot, &ReplayOptions::default()).expect("a recording");
    let devices: Vec<&DeviceReplay<'_>> = replays.devices().iter().collect();
    let paged = || Candidate::allocator(AllocatorChoice::Paged, "");
    let settings = |string: &str| Candidate::replaced(string).expect("valid");
    let first = |tried: Vec<Candidate>| tune(&devices, tried, &OPTIONS).expect("replays").remove(0).candidate.name;
    // Saving 14 MiB is no reason to install another allocator.
    assert_eq!(first(vec![paged(), settings("expandable_segments:True")]), "expandable_segments:True");
    // Saving more than 256 MiB is.
    assert_eq!(first(vec![settings("max_split_size_mb:64"), paged()]), "backend:paged");
}

#[test]
fn recorded_settings_come_before_what_saves_less_than_addresses_change() {
    let snapshot = recording("prefetch_streams_train.native.pickle.xz").snapshot;
    let replays = DeviceReplays::new(&snapshot, &ReplayOptions::default()).expect("a recording");
    let devices: Vec<&DeviceReplay<'_>> = replays.devices().iter().collect();
    let tried = vec![
        Candidate::replaced("max_split_size_mb:1024").expect("valid"),
        Candidate::recorded(devices[0].recorded_settings()),
    ];
    let tuned = tune(&devices, tried, &OPTIONS).expect("replays");
    assert!(tuned[0].candidate.is_recorded(), "{:?}", tuned[0].candidate);
}

#[test]
fn candidates_say_how_to_switch_them_on() {
    let apply = |string: &str| Candidate::replaced(string).expect("valid").apply();
    assert_eq!(apply("expandable_segments:True"), "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    let list = "roundup_power2_divisions:[256:1,>:4]";
    assert_eq!(apply(list), format!("export PYTORCH_CUDA_ALLOC_CONF='{list}'"));
    assert_eq!(apply(""), "unset PYTORCH_CUDA_ALLOC_CONF");
    let paged = |entries: &str| Candidate::allocator(AllocatorChoice::Paged, entries).apply();
    assert_eq!(paged(""), "pip install warpool\nimport warpool.torch; warpool.torch.enable()");
    assert!(paged("memory_cap_mb:64").ends_with("warpool.torch.enable(\"backend:paged,memory_cap_mb:64\")"));
    assert_eq!(Candidate::recorded(&Default::default()).apply(), "keep the settings as they are");
}
