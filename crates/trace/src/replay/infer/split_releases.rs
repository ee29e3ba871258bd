//! Separates releases that follow each other without a pause, such as those of two private pools. Segments of one pool
//! never conflict, so a release with conflicting segments was more than one release.

use rustc_hash::{FxHashMap, FxHashSet};

use super::heap::{RecordedSegment, SegmentId};
use super::observe::{Observations, PoolConflict, Release, is_small_first};

/// Splits releases where their segments cannot have been in one pool.
pub(super) fn split_releases(observed: &mut Observations) {
    let mut conflicts: FxHashMap<SegmentId, Vec<SegmentId>> = FxHashMap::default();
    for &PoolConflict { chosen, passed_over, .. } in &observed.conflicts {
        conflicts.entry(chosen).or_default().push(passed_over);
        conflicts.entry(passed_over).or_default().push(chosen);
    }
    let releases = std::mem::take(&mut observed.releases);
    observed.releases =
        releases.into_iter().flat_map(|release| split(release, &conflicts, &observed.segments)).collect();
}

fn split(
    release: Release,
    conflicts: &FxHashMap<SegmentId, Vec<SegmentId>>,
    segments: &[RecordedSegment],
) -> Vec<Release> {
    // Only if each event is one segment, which also means that no free completed in between.
    if release.segments.len() != release.events.len() {
        return vec![release];
    }
    let mut starts = vec![0];
    let mut part: FxHashSet<SegmentId> = FxHashSet::default();
    for (at, segment) in release.segments.iter().enumerate() {
        if conflicts.get(segment).is_some_and(|others| others.iter().any(|other| part.contains(other))) {
            starts.push(at);
            part.clear();
        }
        part.insert(*segment);
    }
    if starts.len() == 1 {
        return vec![release];
    }
    let mut bytes_reserved_before = release.bytes_reserved_before;
    let ends = starts.iter().skip(1).copied().chain([release.segments.len()]);
    let parts = starts.iter().copied().zip(ends).map(|(start, end)| {
        let part = release.segments[start..end].to_vec();
        let is_last = end == release.segments.len();
        // What the later parts release was kept until then.
        let kept_changes = if start == 0 {
            let later = release.segments[end..].iter().map(|&id| (id, 1));
            release.kept_changes.iter().copied().chain(later).collect()
        } else {
            part.iter().map(|&id| (id, -1)).collect()
        };
        let first = Release {
            events: release.events.start + start..release.events.start + end,
            small_first: is_small_first(&part, segments),
            kept_changes,
            bytes_reserved_before,
            next_request: release.next_request.clone().filter(|_| is_last),
            immediate: start > 0 || release.immediate,
            segments: part,
        };
        let size = |&id: &SegmentId| segments[id as usize].end.saturating_sub(segments[id as usize].base);
        bytes_reserved_before = first.segments.iter().map(size).fold(bytes_reserved_before, u64::saturating_sub);
        first
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use warpool::memory::report::SegmentKind;

    use super::*;

    fn release(segments: &[SegmentId]) -> Release {
        Release {
            events: 10..10 + segments.len(),
            segments: segments.to_vec(),
            kept_changes: vec![(9, 1)],
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
        assert_eq!(observed.releases[0].kept_changes, [(9, 1), (2, 1), (3, 1)]);
        assert_eq!(observed.releases[1].kept_changes, [(2, -1), (3, -1)]);
        assert!(observed.releases[0].small_first && !observed.releases[1].small_first);
    }
}
