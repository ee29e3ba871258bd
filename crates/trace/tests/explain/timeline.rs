//! Timelines: the state computed from allocations and ranges at any position is the state that the events lead to.

use warpool::memory::report::{BlockState, Snapshot};
use warpool_trace::explain::{Explanation, MomentKind};
use warpool_trace::timeline::{MarkKind, Sample, Timeline, TimelineOptions, timelines};

use crate::common::recording;
use crate::parts::{names, quick};

fn timelines_of(snapshot: &Snapshot) -> Vec<Timeline> {
    timelines(snapshot, &TimelineOptions::default()).expect("a recording")
}

/// Live, pending free and reserved bytes at a position, from allocations and ranges alone.
fn sums(timeline: &Timeline, position: u64) -> [u64; 4] {
    let mut sums = [0; 4];
    for allocation in timeline.allocations.iter().filter(|it| it.is_active_at(position)) {
        if allocation.waits_at(position) {
            sums[2] += allocation.bytes;
        } else {
            sums[0] += allocation.requested;
            sums[1] += allocation.bytes - allocation.requested;
        }
    }
    sums[3] = timeline.ranges.iter().filter(|it| it.is_reserved_at(position)).map(|it| it.bytes).sum();
    sums
}

fn of_sample(sample: &Sample) -> [u64; 4] {
    [sample.allocated, sample.rounding, sample.waiting, sample.reserved]
}

#[test]
fn every_recording_is_drawn_as_its_events_and_its_explanation_say() {
    warpool_testing::in_parallel(&names(), |name| {
        for timeline in timelines_of(&recording(name).snapshot) {
            expect_state_at_every_position(&timeline, name);
            expect_samples_of_the_explanation(&timeline, name);
        }
    });
}

/// Allocations and ranges give the state at every position.
fn expect_state_at_every_position(timeline: &Timeline, name: &str) {
    assert_eq!(timeline.allocations_left_out, 0, "{name}");
    let finest = &timeline.levels[0];
    assert_eq!((finest.positions, finest.buckets.len() as u64), (1, timeline.events + 1), "{name}");
    for step in 0..=40 {
        let position = timeline.events * step / 40;
        let sample = &finest.buckets[usize::try_from(position).expect("small")].sample;
        assert_eq!(sums(timeline, position), of_sample(sample), "{name} at {position}");
        assert_eq!(sample.categories.iter().sum::<u64>(), sample.allocated, "{name} at {position}");
        let free = sample.reserved - sample.live() - sample.waiting;
        assert!(sample.cached <= free, "{name} at {position}: {sample:?}");
    }
    let most = finest.buckets.iter().map(|bucket| bucket.sample.live()).max();
    assert_eq!(most, Some(timeline.peak_live.live()), "{name}");
}

/// The moments of `explain` come from the blocks themselves.
fn expect_samples_of_the_explanation(timeline: &Timeline, name: &str) {
    let Timeline { levels, explanation, .. } = timeline;
    for moment in &explanation.moments {
        let after = u64::from(moment.kind != MomentKind::OutOfMemory);
        let position = moment.event.map_or(0, |event| event + after);
        let sample = &levels[0].buckets[usize::try_from(position).expect("small")].sample;
        let parts = &moment.parts;
        let expected = [parts.allocated, parts.rounding, parts.waiting_for_streams, parts.reserved()];
        assert_eq!(of_sample(sample), expected, "{name}");
        for share in &moment.categories {
            assert_eq!(sample.categories[share.category.index()], share.bytes, "{name}: {share:?}");
        }
    }
    let Explanation { ooms, .. } = explanation;
    let marks = timeline.marks.iter().filter(|mark| mark.kind == MarkKind::OutOfMemory);
    assert_eq!(marks.count() as u64, *ooms, "{name}");
}

#[test]
fn a_snapshot_without_a_history_is_one_position() {
    let mut snapshot = recording("resnet_train.native.pickle.xz").snapshot;
    snapshot.traces.clear();
    let found = timelines_of(&snapshot);
    let [timeline] = found.as_slice() else { panic!("one device") };
    assert_eq!((timeline.events, timeline.levels[0].buckets.len()), (0, 1));
    assert_eq!(sums(timeline, 0), of_sample(&timeline.peak_live));
    let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
    let live = blocks.filter(|block| block.state == BlockState::ActiveAllocated).map(|block| block.size).sum::<u64>();
    assert_eq!(timeline.peak_live.live(), live);
}

#[test]
fn retries_are_marked_and_what_it_takes_is_bounded() {
    let snapshot = recording("oom_stacks.fraction_6gib.pickle.xz").snapshot;
    let options = TimelineOptions { allocations_max: 5000, buckets_max: 3000, explain: quick() };
    let mut bounded = timelines(&snapshot, &options).expect("a recording").remove(0);
    let whole = timelines_of(&snapshot).remove(0);
    let retries: Vec<_> = whole.marks.iter().filter(|mark| mark.kind == MarkKind::Retry).collect();
    // PyTorch counted eight: the last is the one that failed, which released nothing.
    assert_eq!(retries.len(), 7, "{retries:?}");
    assert!(retries.iter().all(|mark| mark.bytes > 0));
    assert_eq!(bounded.allocations.len(), 5000);
    assert_eq!(bounded.allocations_left_out, whole.allocations.len() as u64 - 5000);
    assert!(bounded.levels[0].buckets.len() <= 3000);
    assert_eq!(bounded.peak_live, whole.peak_live);
    // The kept allocations are most of the live bytes at the peak.
    let position = whole.peak_live.position;
    assert!(sums(&bounded, position)[0] > sums(&whole, position)[0] * 3 / 4);
    bounded.reduce();
    assert_eq!((bounded.allocations.len(), bounded.levels[0].positions), (2500, 128));
    let peaks = bounded.levels[0].buckets.iter().map(|bucket| bucket.sample.live()).max();
    assert_eq!(peaks, Some(whole.peak_live.live()));
}
