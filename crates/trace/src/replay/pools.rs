//! Which pool each region was in. Newer recordings say so. Older ones say it only of what is there at the end; for the
//! rest, a region is taken to be in the default pool unless the recording contradicts that: a better block was passed
//! over, new memory came although some lay free, or a group of segments went back while others that would have gone
//! with them stayed.
//!
//! A finer division always explains a recording, one pool per region in the extreme. So the coarsest is sought, and
//! what was inferred is counted.

use std::collections::BTreeMap;

use warpool::memory::MemPoolId;

use super::ledger::RegionId;
use super::survey::{NOWHERE, Survey};

/// A pool by its place in [`Pools::origins`].
pub(super) type PoolIndex = u16;

/// The default pool.
pub(super) const DEFAULT: PoolIndex = 0;

/// How a pool is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PoolOrigin {
    /// The recording names it.
    Recorded(MemPoolId),
    /// Something must have been in another pool.
    Inferred,
}

/// The pools of a recording, and what is in them.
#[derive(Clone, Debug, Default)]
pub(super) struct Pools {
    /// All of them, the default pool first.
    pub origins: Vec<PoolOrigin>,
    /// By region.
    pub of_region: Vec<PoolIndex>,
    /// Regions whose pool the recording does not name and that were put into another than the default pool.
    pub regions_inferred: u64,
    /// Regions whose pool the recording does not name, taken to be in the default pool.
    pub regions_assumed: u64,
    /// Contradictions that no division explains.
    pub contradictions: u64,
}

impl Pools {
    /// Nothing but the default pool.
    pub fn default_only() -> Self {
        Self { origins: vec![PoolOrigin::Recorded(MemPoolId::DEFAULT)], ..Self::default() }
    }

    pub fn of(&self, region: RegionId) -> PoolIndex {
        self.of_region.get(region as usize).copied().unwrap_or(DEFAULT)
    }

    /// The pool of that name; a new one if it is new.
    pub fn recorded(&mut self, id: MemPoolId) -> PoolIndex {
        let origin = PoolOrigin::Recorded(id);
        match self.origins.iter().position(|&other| other == origin) {
            Some(at) => PoolIndex::try_from(at).expect("few pools"),
            None => self.add(origin),
        }
    }

    fn add(&mut self, origin: PoolOrigin) -> PoolIndex {
        self.origins.push(origin);
        PoolIndex::try_from(self.origins.len() - 1).expect("fewer than 65536 pools")
    }
}

/// Divides the regions into pools. `gives_back_parts`: a release that leaves something need not be the end of a pool.
pub(super) fn divide(survey: &Survey, gives_back_parts: bool) -> Pools {
    let mut pools = Pools::default_only();
    let known: Vec<bool> = survey.regions.iter().map(|region| region.pool.is_some()).collect();
    pools.of_region = vec![DEFAULT; survey.regions.len()];
    for (region, info) in survey.regions.iter().enumerate() {
        if let Some(id) = info.pool {
            pools.of_region[region] = pools.recorded(id);
        }
    }
    let mut settled = known.clone();
    for release in &survey.releases {
        let stayed = release.left.iter().any(|&id| known[id as usize] && pools.of(id) == DEFAULT);
        let ended = release.small_first || (stayed && !gives_back_parts);
        let unknown: Vec<RegionId> = release.regions.iter().copied().filter(|&id| !settled[id as usize]).collect();
        let of_default = release.regions.iter().any(|&id| known[id as usize] && pools.of(id) == DEFAULT);
        if ended && !of_default && !unknown.is_empty() {
            // It may have been the end of a pool that is known by what outlived it.
            let private = release.regions.iter().map(|&id| pools.of(id)).find(|&pool| pool != DEFAULT);
            let pool = private.unwrap_or_else(|| pools.add(PoolOrigin::Inferred));
            for id in unknown {
                pools.of_region[id as usize] = pool;
                settled[id as usize] = true;
            }
        }
    }
    resolve(survey, &known, &settled, &mut pools);
    for (region, known) in known.iter().enumerate() {
        if !known {
            let inferred = pools.of_region[region] != DEFAULT;
            pools.regions_inferred += u64::from(inferred);
            pools.regions_assumed += u64::from(!inferred);
        }
    }
    pools
}

/// Moves regions out of pools in which they contradict others, until none do.
fn resolve(survey: &Survey, known: &[bool], settled: &[bool], pools: &mut Pools) {
    let mut enemies: BTreeMap<RegionId, Vec<RegionId>> = BTreeMap::new();
    for pair in survey.rivalries.iter().filter(|pair| pair.winner != pair.loser) {
        enemies.entry(pair.winner).or_default().push(pair.loser);
        enemies.entry(pair.loser).or_default().push(pair.winner);
    }
    let fits = |pools: &Pools, region: RegionId, pool: PoolIndex| {
        enemies.get(&region).is_none_or(|others| others.iter().all(|&other| pools.of(other) != pool))
    };
    // How much speaks against the default pool.
    let weight = |region: RegionId| {
        let others = enemies.get(&region).map_or(&[][..], Vec::as_slice);
        others
            .iter()
            .filter(|&&other| known[other as usize] && survey.regions[other as usize].pool == Some(MemPoolId::DEFAULT))
            .count()
    };
    let mut moves_left = 4 * survey.regions.len();
    loop {
        let open = survey
            .rivalries
            .iter()
            .filter(|pair| pair.winner != pair.loser && pools.of(pair.winner) == pools.of(pair.loser));
        let movable = open.clone().find_map(|pair| {
            let free = |id: RegionId| !known[id as usize] && !settled[id as usize];
            match (free(pair.winner), free(pair.loser)) {
                (false, false) => None,
                (true, false) => Some(pair.winner),
                (false, true) => Some(pair.loser),
                (true, true) if pair.fresh || weight(pair.winner) >= weight(pair.loser) => Some(pair.winner),
                (true, true) => Some(pair.loser),
            }
        });
        let Some(region) = movable.filter(|_| moves_left > 0) else {
            pools.contradictions = open.count() as u64;
            return;
        };
        moves_left -= 1;
        let inferred = (1..pools.origins.len())
            .map(|pool| PoolIndex::try_from(pool).expect("few pools"))
            .find(|&pool| pools.origins[pool as usize] == PoolOrigin::Inferred && fits(pools, region, pool));
        let pool = inferred.unwrap_or_else(|| pools.add(PoolOrigin::Inferred));
        pools.of_region[region as usize] = pool;
    }
}

/// The pool of each allocation, in their order.
pub(super) fn of_allocations(survey: &Survey, pools: &Pools) -> Vec<PoolIndex> {
    survey.alloc_regions.iter().map(|&region| if region == NOWHERE { DEFAULT } else { pools.of(region) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::ledger::Region;
    use crate::replay::survey::Rivalry;
    use warpool::memory::SegmentKind;

    /// Regions by their pools (`.` is unknown, `0` the default), and who cannot be with whom.
    fn check(regions: &str, rivalries: &[(RegionId, RegionId, bool)], expected: &[PoolIndex]) {
        let region = |name: char| Region {
            base: 0,
            end: 0,
            stream: 0,
            kind: SegmentKind::Large,
            expandable: false,
            pool: name.to_digit(10).map(|user| MemPoolId { graph: 0, user }),
            bytes: 0,
        };
        let survey = Survey {
            regions: regions.chars().map(region).collect(),
            rivalries: rivalries
                .iter()
                .map(|&(winner, loser, fresh)| Rivalry { winner, loser, fresh, addr: 0, excess: 0 })
                .collect(),
            ..Survey::default()
        };
        assert_eq!(divide(&survey, false).of_region, expected, "{regions}");
    }

    #[test]
    fn regions_are_apart_where_they_must_be() {
        check("...", &[], &[0, 0, 0]);
        check("0.1", &[], &[0, 0, 1]);
        check("0.", &[(1, 0, true)], &[0, 1]);
        check(".0", &[(1, 0, false)], &[1, 0]);
        check("0..", &[(1, 0, true), (2, 0, true)], &[0, 1, 1]);
        check("0..", &[(1, 0, true), (2, 0, true), (2, 1, true)], &[0, 1, 2]);
        check("00", &[(1, 0, true)], &[0, 0]);
    }
}
