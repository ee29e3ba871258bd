//! Separates releases that follow each other without a pause, such as those of two private pools. Segments of one pool
//! never conflict, so a release whose segments do was more than one.

use rustc_hash::FxHashSet;

use super::heap::{RecordedSegment, SegmentId};
use super::observe::{Observations, PoolConflict, Release, is_small_first};

/// Splits releases where their segments cannot have been in one pool.
pub(super) fn split_releases(observed: &mut Observations) {
    let conflicts: FxHashSet<(SegmentId, SegmentId)> = observed
        .conflicts
        .iter()
        .flat_map(|&PoolConflict { chosen, passed_over, .. }| [(chosen, passed_over), (passed_over, chosen)])
        .collect();
    let releases = std::mem::take(&mut observed.releases);
    observed.releases =
        releases.into_iter().flat_map(|release| split(release, &conflicts, &observed.segments)).collect();
}

fn split(
    release: Release,
    conflicts: &FxHashSet<(SegmentId, SegmentId)>,
    segments: &[RecordedSegment],
) -> Vec<Release> {
    // Only if each event is one segment, which also means that no free completed in between.
    if release.segments.len() != release.events.len() {
        return vec![release];
    }
    let mut starts = vec![0];
    for (at, &segment) in release.segments.iter().enumerate() {
        let part = &release.segments[*starts.last().expect("one at least")..at];
        if part.iter().any(|&other| conflicts.contains(&(segment, other))) {
            starts.push(at);
        }
    }
    if starts.len() == 1 {
        return vec![release];
    }
    let mut bytes_reserved_before = release.bytes_reserved_before;
    let ends = starts.iter().skip(1).copied().chain([release.segments.len()]);
    let parts = starts.iter().copied().zip(ends).map(|(start, end)| {
        let part = release.segments[start..end].to_vec();
        let is_last = end == release.segments.len();
        let first = Release {
            events: release.events.start + start..release.events.start + end,
            small_first: is_small_first(&part, segments),
            kept: release.kept.iter().chain(&release.segments[end..]).copied().collect(),
            bytes_reserved_before,
            next_request: release.next_request.clone().filter(|_| is_last),
            immediate: start > 0 || release.immediate,
            segments: part,
        };
        let size = |&id: &SegmentId| segments[id as usize].end - segments[id as usize].base;
        bytes_reserved_before = bytes_reserved_before.saturating_sub(first.segments.iter().map(size).sum());
        first
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use warpool::memory::SegmentKind;

    use super::*;

    fn release(segments: &[SegmentId]) -> Release {
        Release {
            events: 10..10 + segments.len(),
            segments: segments.to_vec(),
            kept: vec![9],
            bytes_reserved_before: 100,
            next_request: None,
            small_first: false,
            immediate: false,
        }
    }

    #[test]
    fn release_with_conflicting_segments_is_split() {
        let segment =
            |kind| RecordedSegment { base: 0, end: 10, stream: 0, kind, expandable: false, pool: None, bytes: 0 };
        let segments: Vec<RecordedSegment> =
            [SegmentKind::Small, SegmentKind::Large, SegmentKind::Large, SegmentKind::Large].map(segment).to_vec();
        let conflict = PoolConflict { chosen: 2, passed_over: 1, chosen_is_new: true, addr: 0, excess: 0 };
        let releases = vec![release(&[0, 1, 2, 3])];
        let mut observed = Observations { segments, conflicts: vec![conflict], releases, ..Observations::default() };
        split_releases(&mut observed);
        let parts: Vec<_> = observed
            .releases
            .iter()
            .map(|part| (part.events.clone(), part.segments.clone(), part.bytes_reserved_before))
            .collect();
        assert_eq!(parts, [(10..12, vec![0, 1], 100), (12..14, vec![2, 3], 80)]);
        assert_eq!(observed.releases[0].kept, [9, 2, 3]);
        assert!(observed.releases[0].small_first && !observed.releases[1].small_first);
    }
}
