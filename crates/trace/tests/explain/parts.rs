//! The parts of a moment add up to the device's total, on every recording.

use warpool::memory::report::BlockState;
use warpool_trace::cards::DeviceOrigin;
use warpool_trace::explain::{ExplainOptions, Explanation, MomentChoice, MomentKind, Verdict, explain};
use warpool_trace::replay::{ReplayOptions, replay};

use warpool_testing::in_parallel;

use crate::common::{RECORDINGS, recording};

/// All recordings.
pub fn names() -> Vec<String> {
    let files = std::fs::read_dir(RECORDINGS).expect("the folder").map(|file| file.expect("a file").file_name());
    let names =
        files.filter_map(|name| name.to_str().filter(|name| name.ends_with(".pickle.xz")).map(ToOwned::to_owned));
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

fn explained(name: &str, options: &ExplainOptions<'_>) -> Vec<Explanation> {
    explain(&recording(name).snapshot, options).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The peak of reserved bytes, as the events of the recording add up.
fn recorded_peak(name: &str) -> u64 {
    let report = replay(&recording(name).snapshot, &ReplayOptions::default()).expect("a recording");
    report.fidelity.recorded_peak_reserved_bytes
}

/// Without replays of changes.
pub fn quick() -> ExplainOptions<'static> {
    ExplainOptions { skips_fits: true, ..ExplainOptions::default() }
}

#[test]
fn parts_add_up_to_the_device_on_every_recording() {
    in_parallel(&names(), |name| {
        for explanation in explained(name, &quick()) {
            for moment in &explanation.moments {
                let known = moment.bytes_reserved + moment.request.and_then(|it| it.device_free).unwrap_or(0);
                let total = explanation.device_bytes_total.unwrap_or(known);
                assert_eq!(moment.parts.total(), total, "{name}: {:?}", moment.parts);
                assert_eq!(moment.parts.reserved(), moment.bytes_reserved, "{name}: {:?}", moment.parts);
                assert_eq!(moment.bytes_requested, moment.parts.allocated, "{name}");
                let categories: u64 = moment.categories.iter().map(|share| share.bytes).sum();
                assert_eq!(categories, moment.bytes_requested, "{name}: every block has a category");
                assert_eq!(moment.holders.bytes, moment.parts.allocated, "{name}: holders are what is allocated");
                let by_line: u64 = moment.holders.groups.iter().map(|holder| holder.bytes).sum();
                assert_eq!(by_line, moment.parts.allocated, "{name}");
            }
            let peaks = explanation.peaks.expect("it has a history");
            assert_eq!(peaks.reserved.bytes, recorded_peak(name), "{name}: the peak of its segment events");
            let is_oom = explanation.ooms > 0;
            let expected = if is_oom { MomentKind::OutOfMemory } else { MomentKind::Allocated };
            assert_eq!(explanation.moment().kind, expected, "{name}");
            if !is_oom {
                assert_eq!(explanation.moment().bytes_allocated, peaks.allocated.bytes, "{name}");
            }
            assert_eq!(explanation.verdict == Verdict::Fitted, !is_oom, "{name}");
        }
    });
}

/// The state that the events lead to is the state of the snapshot.
#[test]
fn without_a_history_the_segments_of_the_snapshot_tell() {
    for name in names() {
        let mut snapshot = recording(&name).snapshot;
        snapshot.traces.clear();
        if snapshot.segments.is_empty() {
            continue;
        }
        let explanations = explain(&snapshot, &quick()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let [explanation] = explanations.as_slice() else { panic!("{name}: one device") };
        let moment = explanation.moment();
        assert_eq!((moment.kind, explanation.verdict), (MomentKind::Event, Verdict::Unknown), "{name}");
        assert_eq!(explanation.device_bytes_total, None, "{name}");
        assert_eq!(moment.parts.total(), moment.bytes_reserved, "{name}");
        let blocks = || snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let in_state = |state: BlockState| blocks().filter(|block| block.state == state).map(|block| block.size).sum();
        let allocated: u64 = in_state(BlockState::ActiveAllocated);
        assert_eq!(moment.parts.allocated + moment.parts.rounding, allocated, "{name}");
        assert_eq!(moment.parts.waiting_for_streams, in_state(BlockState::ActivePendingFree), "{name}");
    }
}

#[test]
fn lines_of_a_model_that_hold_most_are_named() {
    let explanations = explained("oom_stacks.fraction_6gib.pickle.xz", &quick());
    let moment = explanations[0].moment();
    assert!(moment.holders.has_stacks());
    assert_eq!(explanations[0].verdict, Verdict::Fragmentation, "{:?}", explanations[0].evidence);
    assert_eq!(moment.event, Some(108_301));
    let names: Vec<&str> = moment.holders.groups.iter().take(6).map(|holder| holder.name.as_str()).collect();
    assert_eq!(names[0], "dropout (torch/nn/functional.py:1443)");
    assert_eq!(names[1], "relu (torch/nn/functional.py:1723)");
    assert!(names.iter().filter(|name| name.starts_with("_init_group (torch/optim/adam.py")).count() == 2, "{names:?}");
    assert!(moment.holders.groups[0].line.as_deref() == Some("<module> (train.py:19)"));
    let adam = moment.holders.by_module.iter().find(|holder| holder.name == "torch.optim.adam");
    assert!(adam.is_some_and(|holder| holder.bytes > 1 << 30));
}

/// A given capacity is taken as the device that ran out of memory, if that is possible; else the question is whether
/// the program fits there.
#[test]
fn capacity_is_the_recorded_device_or_a_question() {
    let gib = 1 << 30;
    let on = |capacity: u64| ExplainOptions { capacity: Some(capacity), address_orders: Some(2), ..Default::default() };
    let explanation = &explained("verdict.outside.pickle.xz", &on(80 * gib))[0];
    assert_eq!((explanation.device_bytes_total, explanation.device_origin), (Some(80 * gib), DeviceOrigin::Argument));
    assert_eq!(explanation.moment().parts.total(), 80 * gib);
    assert_eq!(explanation.on_device, None);

    let explanation = &explained("resnet_train.native.pickle.xz", &on(80 * gib))[0];
    let on_device = explanation.on_device.expect("another device");
    assert!(on_device.orders.all_fit() && on_device.bytes_total == 80 * gib, "{on_device:?}");
    assert_eq!((explanation.device_bytes_total, explanation.verdict), (None, Verdict::Fitted));

    // As `warpool replay --capacity 6.5GiB` says, and with `expandable_segments:True`.
    let explanation = &explained("resnet_train.native.pickle.xz", &on(13 * gib / 2))[0];
    let on_device = explanation.on_device.expect("another device");
    assert!(!on_device.orders.all_fit() && on_device.oom_event.is_some(), "{on_device:?}");
    let first = explanation.advice.first().expect("there is something to do");
    assert_eq!((first.title.as_str(), first.fits), ("Set expandable_segments:True", Some(true)));
}

#[test]
fn named_moments_are_explained() {
    let at = |at| ExplainOptions { at, ..quick() };
    let name = "oom_stacks.fraction_6gib.pickle.xz";
    let allocated = explained(name, &at(MomentChoice::Allocated)).remove(0);
    let peaks = allocated.peaks.expect("a history");
    assert_eq!(allocated.moment().event, peaks.allocated.event);
    assert_eq!(allocated.moment().bytes_allocated, peaks.allocated.bytes);
    assert_eq!(allocated.verdict, Verdict::Fragmentation, "why it ran out does not depend on the moment");
    let reserved = explained(name, &at(MomentChoice::Reserved)).remove(0);
    assert_eq!(reserved.moment().bytes_reserved, peaks.reserved.bytes);
    let event = explained(name, &at(MomentChoice::Event(1000))).remove(0);
    let time_us = event.moment().time_us.expect("it has times");
    assert_eq!((event.moment().kind, event.moment().event), (MomentKind::Event, Some(1000)));
    let time = explained(name, &at(MomentChoice::Time(time_us.unsigned_abs()))).remove(0);
    assert_eq!(time.moment().time_us, Some(time_us), "the last event of that time");
    let late = explained(name, &at(MomentChoice::Event(u64::MAX))).remove(0);
    assert_eq!(late.moment().event, Some(108_719), "the last event");
}
