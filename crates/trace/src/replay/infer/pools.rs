//! The pool of each segment. Newer recordings name it. Older ones name it only for segments that are in the snapshot.
//! Another segment is assumed to be in the default pool unless the recording contradicts that. Contradictions are: a
//! better block was not used; new memory was allocated although a free block fitted; some segments were released, and
//! others were kept that would have been released with them.
//!
//! A finer division into pools always explains a recording; the extreme is one pool per segment. So the coarsest one is
//! inferred, and the number of inferred assignments is reported.

use rustc_hash::{FxHashMap, FxHashSet};
use warpool::memory::MemPoolId;

use super::heap::SegmentId;
use super::observe::{Observations, PoolConflict, SEGMENT_UNKNOWN};
use crate::steps;

/// A pool by its number in [`InferredPools::origins`].
pub(in crate::replay) type PoolIndex = u32;

pub(in crate::replay) const DEFAULT_POOL: PoolIndex = 0;

/// How a pool is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::replay) enum PoolOrigin {
    /// The recording names it.
    Recorded(MemPoolId),
    /// Some segments cannot have been in a recorded pool.
    Inferred,
}

/// The pools of a recording and the pool of each segment.
#[derive(Clone, Debug)]
pub(in crate::replay) struct InferredPools {
    /// All pools, the default pool first.
    origins: Vec<PoolOrigin>,
    /// Those that the recording names, by id.
    by_id: FxHashMap<MemPoolId, PoolIndex>,
    /// The others, in their order.
    inferred: Vec<PoolIndex>,
    of_segment: Vec<PoolIndex>,
    segments_inferred: u64,
    segments_assumed: u64,
    conflicts_left: u64,
}

impl InferredPools {
    /// The default pool only.
    pub fn default_only() -> Self {
        Self {
            origins: vec![PoolOrigin::Recorded(MemPoolId::DEFAULT)],
            by_id: FxHashMap::from_iter([(MemPoolId::DEFAULT, DEFAULT_POOL)]),
            inferred: Vec::new(),
            of_segment: Vec::new(),
            segments_inferred: 0,
            segments_assumed: 0,
            conflicts_left: 0,
        }
    }

    /// Assigns the segments to pools. `releases_partially`: a release that keeps segments need not be that of a pool.
    pub(super) fn infer(observed: &Observations, releases_partially: bool) -> Self {
        let mut pools = Self::default_only();
        let known: Vec<bool> = observed.segments.iter().map(|segment| segment.pool.is_some()).collect();
        pools.of_segment = vec![DEFAULT_POOL; observed.segments.len()];
        for (segment, info) in observed.segments.iter().enumerate() {
            if let Some(id) = info.pool {
                pools.of_segment[segment] = pools.recorded(id);
            }
        }
        let assigned = pools.assign_released(observed, &known, releases_partially);
        pools.resolve_conflicts(observed, &known, &assigned);
        for (segment, known) in known.iter().enumerate() {
            if !known {
                let inferred = pools.of_segment[segment] != DEFAULT_POOL;
                pools.segments_inferred += u64::from(inferred);
                pools.segments_assumed += u64::from(!inferred);
            }
        }
        pools
    }

    /// All pools, the default pool first.
    pub fn origins(&self) -> &[PoolOrigin] {
        &self.origins
    }

    /// Segments of unknown pool that were assigned to a private pool.
    pub fn segments_inferred(&self) -> u64 {
        self.segments_inferred
    }

    /// Segments of unknown pool that were assumed to be in the default pool.
    pub fn segments_assumed(&self) -> u64 {
        self.segments_assumed
    }

    /// Conflicts between segments that no assignment resolves.
    pub fn conflicts_left(&self) -> u64 {
        self.conflicts_left
    }

    pub fn of_segment(&self, segment: SegmentId) -> PoolIndex {
        self.of_segment.get(segment as usize).copied().unwrap_or(DEFAULT_POOL)
    }

    /// The pool of each allocation, in their order.
    pub(super) fn of_allocations(&self, observed: &Observations) -> Vec<PoolIndex> {
        let pool = |&segment: &SegmentId| match segment {
            SEGMENT_UNKNOWN => DEFAULT_POOL,
            segment => self.of_segment(segment),
        };
        observed.allocation_segments.iter().map(pool).collect()
    }

    /// The pool of that recorded id; added if it is new.
    pub(super) fn recorded(&mut self, id: MemPoolId) -> PoolIndex {
        match self.by_id.get(&id) {
            Some(&pool) => pool,
            None => self.add(PoolOrigin::Recorded(id)),
        }
    }

    fn add(&mut self, origin: PoolOrigin) -> PoolIndex {
        self.origins.push(origin);
        let pool = PoolIndex::try_from(self.origins.len() - 1).expect("fewer than events, of which there are 2^32");
        match origin {
            PoolOrigin::Recorded(id) => drop(self.by_id.insert(id, pool)),
            PoolOrigin::Inferred => self.inferred.push(pool),
        }
        pool
    }

    /// Assigns segments that were released together while default-pool segments stayed to a private pool. Returns which
    /// segments have a pool after that.
    fn assign_released(&mut self, observed: &Observations, known: &[bool], releases_partially: bool) -> Vec<bool> {
        let mut assigned = known.to_vec();
        // How many of the segments that could have been released were known to be in the default pool.
        let mut default_kept = 0_i64;
        for release in &observed.releases {
            let in_default = |pools: &Self, id: SegmentId| known[id as usize] && pools.of_segment(id) == DEFAULT_POOL;
            steps::count(release.kept_changes.len());
            let changes = release.kept_changes.iter().filter(|&&(id, _)| in_default(self, id));
            default_kept += changes.map(|&(_, by)| i64::from(by)).sum::<i64>();
            let default_kept = default_kept > 0;
            let of_private_pool = release.small_first || (default_kept && !releases_partially);
            let unassigned: Vec<SegmentId> =
                release.segments.iter().copied().filter(|&id| !assigned[id as usize]).collect();
            let default_released = release.segments.iter().any(|&id| in_default(self, id));
            if of_private_pool && !default_released && !unassigned.is_empty() {
                // It may be a pool that is known from its other segments.
                let private = release.segments.iter().map(|&id| self.of_segment(id)).find(|&pool| pool != DEFAULT_POOL);
                let pool = private.unwrap_or_else(|| self.add(PoolOrigin::Inferred));
                for id in unassigned {
                    self.of_segment[id as usize] = pool;
                    assigned[id as usize] = true;
                }
            }
        }
        assigned
    }

    /// Moves segments that conflict with others of their pool to another pool, until none do.
    fn resolve_conflicts(&mut self, observed: &Observations, known: &[bool], assigned: &[bool]) {
        let conflicts = || observed.conflicts.iter().enumerate().filter(|(_, pair)| pair.chosen != pair.passed_over);
        // The conflicts of each segment, with the other one.
        let mut of_segment: FxHashMap<SegmentId, Vec<(usize, SegmentId)>> = FxHashMap::default();
        for (number, pair) in conflicts() {
            of_segment.entry(pair.chosen).or_default().push((number, pair.passed_over));
            of_segment.entry(pair.passed_over).or_default().push((number, pair.chosen));
        }
        let others_of = |segment: SegmentId| of_segment.get(&segment).map_or(&[][..], Vec::as_slice);
        // Conflicts with segments that are known to be in the default pool.
        let mut default_conflicts: FxHashMap<SegmentId, usize> = FxHashMap::default();
        for (&segment, others) in &of_segment {
            let in_default = |other: SegmentId| {
                known[other as usize] && observed.segments[other as usize].pool == Some(MemPoolId::DEFAULT)
            };
            default_conflicts.insert(segment, others.iter().filter(|&&(_, other)| in_default(other)).count());
        }
        // Which segment is moved, if both are in one pool.
        let may_move = |id: SegmentId| !known[id as usize] && !assigned[id as usize];
        let moved_for = |pair: &PoolConflict| match (may_move(pair.chosen), may_move(pair.passed_over)) {
            (false, false) => None,
            (true, false) => Some(pair.chosen),
            (false, true) => Some(pair.passed_over),
            (true, true)
                if pair.chosen_is_new || default_conflicts[&pair.chosen] >= default_conflicts[&pair.passed_over] =>
            {
                Some(pair.chosen)
            }
            (true, true) => Some(pair.passed_over),
        };
        let is_open =
            |pools: &Self, pair: &PoolConflict| pools.of_segment(pair.chosen) == pools.of_segment(pair.passed_over);
        // A segment moves to a pool without conflicting segments, so a resolved conflict stays resolved.
        for (_, pair) in conflicts() {
            let Some(segment) = moved_for(pair).filter(|_| is_open(self, pair)) else { continue };
            steps::count(others_of(segment).len());
            let taken: FxHashSet<PoolIndex> =
                others_of(segment).iter().map(|&(_, other)| self.of_segment(other)).collect();
            let free = self.inferred.iter().copied().find(|pool| !taken.contains(pool));
            let pool = free.unwrap_or_else(|| self.add(PoolOrigin::Inferred));
            self.of_segment[segment as usize] = pool;
        }
        self.conflicts_left = conflicts().filter(|(_, pair)| is_open(self, pair)).count() as u64;
    }
}

#[cfg(test)]
mod tests {
    use warpool::memory::report::SegmentKind;

    use super::super::heap::RecordedSegment;
    use super::*;

    /// Segments by their recorded pools (`.` is unknown, `0` the default pool), and which pairs conflict.
    fn check(segments: &str, conflicts: &[(SegmentId, SegmentId, bool)], expected: &[PoolIndex]) {
        let segment = |name: char| RecordedSegment {
            base: 0,
            end: 0,
            stream: 0,
            kind: SegmentKind::Large,
            expandable: false,
            pool: name.to_digit(10).map(|user| MemPoolId { graph: 0, user }),
            bytes: 0,
        };
        let conflict = |&(chosen, passed_over, chosen_is_new): &(SegmentId, SegmentId, bool)| PoolConflict {
            chosen,
            passed_over,
            chosen_is_new,
            addr: 0,
            excess: 0,
        };
        let observed = Observations {
            segments: segments.chars().map(segment).collect(),
            conflicts: conflicts.iter().map(conflict).collect(),
            ..Observations::default()
        };
        assert_eq!(InferredPools::infer(&observed, false).of_segment, expected, "{segments}");
    }

    #[test]
    fn conflicting_segments_are_in_different_pools() {
        check("...", &[], &[0, 0, 0]);
        check("0.1", &[], &[0, 0, 1]);
        check("0.", &[(1, 0, true)], &[0, 1]);
        check(".0", &[(1, 0, false)], &[1, 0]);
        check("0..", &[(1, 0, true), (2, 0, true)], &[0, 1, 1]);
        check("0..", &[(1, 0, true), (2, 0, true), (2, 1, true)], &[0, 1, 2]);
        check("00", &[(1, 0, true)], &[0, 0]);
    }
}
