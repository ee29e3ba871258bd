//! Tells releases apart that follow each other without a pause, such as the ends of two pools: what was in one pool
//! never contradicts itself, so a release whose regions do was more than one.

use rustc_hash::FxHashSet;
use warpool::memory::SegmentKind;

use super::ledger::{Region, RegionId};
use super::survey::{Release, Rivalry, Survey};

/// Splits releases where their regions cannot have been in one pool.
pub(super) fn tell_apart(survey: &mut Survey) {
    let rivals: FxHashSet<(RegionId, RegionId)> =
        survey.rivalries.iter().flat_map(|&Rivalry { winner, loser, .. }| [(winner, loser), (loser, winner)]).collect();
    let releases = std::mem::take(&mut survey.releases);
    survey.releases = releases.into_iter().flat_map(|release| split(release, &rivals, &survey.regions)).collect();
}

fn split(release: Release, rivals: &FxHashSet<(RegionId, RegionId)>, regions: &[Region]) -> Vec<Release> {
    // Only where each event is one region, which also means that nothing completed in between.
    if release.regions.len() != release.events.len() {
        return vec![release];
    }
    let mut starts = vec![0];
    for (at, &region) in release.regions.iter().enumerate() {
        let part = &release.regions[*starts.last().expect("one at least")..at];
        if part.iter().any(|&other| rivals.contains(&(region, other))) {
            starts.push(at);
        }
    }
    if starts.len() == 1 {
        return vec![release];
    }
    let mut bytes_before = release.bytes_before;
    let ends = starts.iter().skip(1).copied().chain([release.regions.len()]);
    let parts = starts.iter().copied().zip(ends).map(|(start, end)| {
        let part = release.regions[start..end].to_vec();
        let left = release.left.iter().chain(&release.regions[end..]).copied().collect();
        let is_last = end == release.regions.len();
        let first = Release {
            events: release.events.start + start..release.events.start + end,
            small_first: is_small_first(&part, regions),
            left,
            bytes_before,
            next: release.next.clone().filter(|_| is_last),
            quick: start > 0 || release.quick,
            regions: part,
        };
        let size = |&id: &RegionId| regions[id as usize].end - regions[id as usize].base;
        bytes_before = bytes_before.saturating_sub(first.regions.iter().map(size).sum());
        first
    });
    parts.collect()
}

/// Whether small segments came before large ones, as when a private pool ends.
pub(super) fn is_small_first(part: &[RegionId], regions: &[Region]) -> bool {
    let kind = |id: RegionId| regions[id as usize].kind;
    let last_small = part.iter().rposition(|&id| kind(id) == SegmentKind::Small);
    let first_large = part.iter().position(|&id| kind(id) == SegmentKind::Large);
    last_small.zip(first_large).is_some_and(|(small, large)| small < large)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(regions: &[RegionId]) -> Release {
        Release {
            events: 10..10 + regions.len(),
            regions: regions.to_vec(),
            left: vec![9],
            bytes_before: 100,
            next: None,
            small_first: false,
            quick: false,
        }
    }

    #[test]
    fn a_release_that_contradicts_itself_was_two() {
        let region = |kind| Region { base: 0, end: 10, stream: 0, kind, expandable: false, pool: None, bytes: 0 };
        let regions: Vec<Region> =
            [SegmentKind::Small, SegmentKind::Large, SegmentKind::Large, SegmentKind::Large].map(region).to_vec();
        let rivalry = Rivalry { winner: 2, loser: 1, fresh: true, addr: 0, excess: 0 };
        let mut survey =
            Survey { regions, rivalries: vec![rivalry], releases: vec![release(&[0, 1, 2, 3])], ..Survey::default() };
        tell_apart(&mut survey);
        let parts: Vec<_> =
            survey.releases.iter().map(|part| (part.events.clone(), part.regions.clone(), part.bytes_before)).collect();
        assert_eq!(parts, [(10..12, vec![0, 1], 100), (12..14, vec![2, 3], 80)]);
        assert_eq!(survey.releases[0].left, [9, 2, 3]);
        assert!(survey.releases[0].small_first && !survey.releases[1].small_first);
    }
}
