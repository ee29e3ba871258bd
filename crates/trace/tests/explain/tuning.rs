//! Candidates and their ranks.

use warpool_trace::replay::{DeviceReplay, DeviceReplays, ReplayOptions};
use warpool_trace::tune::{Candidate, TrialOptions, Tuned, candidates, try_all, tune};

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
        let smallest = tuned.smallest_device_bytes.expect("each fits on a device that is large enough");
        let on = |capacity| TrialOptions { capacity: Some(capacity), ..OPTIONS };
        let fits = |capacity| {
            let reports = try_all(&devices, std::slice::from_ref(&tuned.candidate), &on(capacity)).expect("replays");
            reports[0].iter().all(|report| report.orders.all_fit())
        };
        assert!(fits(smallest), "{}: {smallest}", tuned.candidate.name);
        assert!(!fits(smallest / 10 * 8), "{}: {smallest} is not the smallest", tuned.candidate.name);
    }
}
