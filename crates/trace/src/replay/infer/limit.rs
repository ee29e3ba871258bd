//! Why memory was released to the driver, and which memory limit the recorded program ran under. A recording contains
//! neither. Memory is released by the program (`empty_cache`), with a private pool, or by the allocator because the
//! limit was reached. In the last case one limit must explain all releases: no request that succeeded was above it, and
//! every request that failed was.

use warpool::memory::SegmentKind;

use super::heap::SegmentId;
use super::observe::{DriverAllocation, NextRequest, Observations, Release};
use super::pools::{DEFAULT_POOL, InferredPools, PoolIndex};
use super::rules::{MIB, RecordedRules};
use crate::steps;

/// Why memory was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::replay) enum ReleaseCause {
    /// The allocator waited for all events and released everything cached, to retry the request behind it.
    Retry,
    /// The allocator released some of it for the request behind it, and waited for nothing.
    Partial,
    /// The program emptied the cache.
    Trim,
    /// The program released a pool.
    PoolReleased(PoolIndex),
}

/// Bounds of the memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::replay) struct LimitBounds {
    pub at_least: u64,
    pub below: u64,
    /// The device itself was full: it had less free than a failed request needed.
    pub device_full: bool,
    /// Values to try, the likeliest first.
    pub candidates: Vec<u64>,
}

/// How often an allocation was retried after everything cached was released: a recording does not count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::replay) struct RetryBounds {
    pub least: u64,
    pub most: u64,
}

/// What was inferred.
#[derive(Clone, Debug)]
pub(super) struct ReleaseCauses {
    /// The cause of each release.
    pub causes: Vec<ReleaseCause>,
    pub limit: Option<LimitBounds>,
    pub retries: RetryBounds,
    pub remarks: Vec<String>,
}

/// Infers the causes of all releases, and the limit.
pub(super) fn infer_causes(observed: &Observations, pools: &InferredPools, rules: &RecordedRules) -> ReleaseCauses {
    let mut at_least = reserved_at_least(observed, rules);
    let mut below = u64::MAX;
    let mut remarks = Vec::new();

    let mut failures = 0;
    let mut device_full = false;
    let mut unexplained = 0_u64;
    for failure in &observed.failed_requests {
        let bytes = failure.bytes_reserved.saturating_add(failure.segment_bytes);
        if bytes > at_least {
            below = below.min(bytes);
            failures += 1;
            device_full |= failure.device_free < failure.segment_bytes;
            continue;
        }
        unexplained += 1;
        if unexplained == 1 {
            remarks.push(format!(
                "a request failed that would have brought reserved memory to {} MiB, although {} MiB were reserved at \
                 another time: the memory limit changed while the program ran",
                bytes / MIB,
                at_least / MIB
            ));
        }
    }
    if unexplained > 1 {
        remarks.push(format!("so did {} further requests", unexplained - 1));
    }

    // How many of the segments that could have been released were in the default pool.
    let mut default_kept = 0_i64;
    let possible_causes = |release: &Release| {
        steps::count(release.kept_changes.len());
        let changes = release.kept_changes.iter().filter(|&&(id, _)| pools.of_segment(id) == DEFAULT_POOL);
        default_kept += changes.map(|&(_, by)| i64::from(by)).sum::<i64>();
        PossibleCauses::new(release, observed, pools, rules, at_least, default_kept > 0)
    };
    let candidates: Vec<PossibleCauses> = observed.releases.iter().map(possible_causes).collect();
    let is_limited = failures > 0 || shows_limit(&candidates);

    let mut retries = 0;
    let causes = candidates
        .iter()
        .map(|possible| {
            if let Some(pool) = possible.pool {
                return ReleaseCause::PoolReleased(pool);
            }
            if !is_limited || (possible.retry_below.is_none() && possible.garbage_below.is_none()) {
                return ReleaseCause::Trim;
            }
            // Where both are possible, the limit that allows both.
            below = below.min(possible.retry_below.max(possible.garbage_below).unwrap_or(u64::MAX));
            if possible.retry_below.is_some() && possible.is_full {
                retries += u64::from(!possible.may_be_partial);
                ReleaseCause::Retry
            } else {
                ReleaseCause::Partial
            }
        })
        .collect();
    let threshold = rules.garbage_collection_threshold();
    if threshold > 0.0 && below < u64::MAX {
        // Where an unused segment stayed cached, the threshold was not reached.
        let kept = observed.driver_allocations.iter().filter(|allocation| allocation.had_unused_segment);
        let kept = kept.map(|allocation| limit_at_threshold(allocation.bytes_reserved_before, threshold));
        at_least = kept.filter(|&bytes| bytes < below).fold(at_least, u64::max);
    }
    let limit = (below < u64::MAX && at_least < below).then(|| LimitBounds {
        at_least,
        below,
        device_full,
        candidates: likely_limits(at_least, below),
    });
    // A failed request was retried too.
    let failed = failures_without_release(observed, failures);
    let possible = observed.releases.iter().filter(|release| release.next_request.is_some()).count() as u64;
    let retries = match limit {
        Some(_) => RetryBounds { least: retries + failed, most: possible + failed },
        None => RetryBounds::default(),
    };
    ReleaseCauses { causes, limit, retries, remarks }
}

/// The most that was reserved as a limit counts it: the limit was at least this.
fn reserved_at_least(observed: &Observations, rules: &RecordedRules) -> u64 {
    let allocated = observed.driver_allocations.iter();
    let bytes =
        |allocation: &DriverAllocation| allocation.bytes_reserved_before.saturating_add(allocation.segment_bytes);
    let allocated = allocated.map(bytes).max().unwrap_or(0);
    // Expandable segments grow by whole chunks, of which only the needed part is compared with the limit.
    let has_expandable = observed.segments.iter().any(|segment| segment.expandable);
    let not_compared = if has_expandable { rules.sizes().chunk(SegmentKind::Large) } else { 0 };
    observed.peak_reserved_bytes.saturating_sub(not_compared).max(allocated)
}

/// Whether the releases show that there was a limit. A single one that could have either cause is taken for the
/// program's own, unless it came directly before the request.
fn shows_limit(releases: &[PossibleCauses]) -> bool {
    let retries: Vec<&PossibleCauses> = releases.iter().filter(|release| release.retry_below.is_some()).collect();
    let trims = releases.iter().filter(|release| release.must_be_trim).count();
    releases.iter().any(|release| release.must_be_retry)
        || retries.len() > 1
        || releases.iter().any(|release| release.garbage_below.is_some())
        || (retries.len() == 1 && trims == 0 && retries[0].immediate)
}

/// Failed requests without a release before them: nothing was cached, but they were retried all the same.
fn failures_without_release(observed: &Observations, failures: u64) -> u64 {
    let has_failed = |release: &&Release| release.next_request.as_ref().is_some_and(|next| next.failed);
    failures.saturating_sub(observed.releases.iter().filter(has_failed).count() as u64)
}

/// The causes that one release by itself allows.
struct PossibleCauses {
    /// It released this private pool.
    pool: Option<PoolIndex>,
    /// It can only have been for the next request.
    must_be_retry: bool,
    /// It can have been for the next request, if the limit was below this.
    retry_below: Option<u64>,
    /// It can have been garbage collection, if the limit was below this.
    garbage_below: Option<u64>,
    /// Nothing that could have been released was kept.
    is_full: bool,
    /// Only segments were released that may be released without the rest: oversize or unused ones.
    may_be_partial: bool,
    must_be_trim: bool,
    immediate: bool,
}

impl PossibleCauses {
    fn new(
        release: &Release,
        observed: &Observations,
        pools: &InferredPools,
        rules: &RecordedRules,
        at_least: u64,
        keeps_default: bool,
    ) -> Self {
        let segment = |id: SegmentId| &observed.segments[id as usize];
        let has_pool = |ids: &[SegmentId], pool: PoolIndex| ids.iter().any(|&id| pools.of_segment(id) == pool);
        let is_full = !keeps_default;
        let first = release.segments.first().map(|&id| pools.of_segment(id));
        let all_in = |pool: PoolIndex| release.segments.iter().all(|&id| pools.of_segment(id) == pool);
        let pool = first.filter(|&pool| pool != DEFAULT_POOL && all_in(pool));
        let all_large =
            release.segments.iter().all(|&id| segment(id).kind == SegmentKind::Large && !segment(id).expandable);
        let all_oversize = rules.max_split_bytes().is_some_and(|limit| {
            let is_oversize =
                |id: SegmentId| !segment(id).expandable && segment(id).end.saturating_sub(segment(id).base) >= limit;
            release.segments.iter().all(|&id| is_oversize(id))
        });
        let pool_of_request = |next: &NextRequest| {
            let segment = observed.allocation_segments.get(next.allocation).filter(|_| !next.failed);
            segment.map_or(DEFAULT_POOL, |&segment| pools.of_segment(segment))
        };
        // The next request, if no cached block fitted before the release.
        let unserved = release.next_request.as_ref().filter(|next| !has_pool(&next.could_serve, pool_of_request(next)));
        let bytes = unserved.map(|next| release.bytes_reserved_before.saturating_add(next.segment_bytes));
        // The program empties the cache before it makes a request, which a free block would then have served.
        let passed_over =
            unserved.is_some_and(|next| !next.failed && has_pool(&next.could_serve_after, pool_of_request(next)));
        let retry_below = bytes.filter(|&bytes| bytes > at_least && (is_full || all_oversize) && pool.is_none());
        let threshold = rules.garbage_collection_threshold();
        let may_collect = threshold > 0.0 && all_large && unserved.is_some() && pool.is_none();
        let garbage_below = may_collect
            .then(|| limit_at_threshold(release.bytes_reserved_before, threshold))
            .filter(|&bytes| bytes > at_least);
        Self {
            pool,
            must_be_retry: retry_below.is_some() && passed_over,
            retry_below,
            garbage_below,
            is_full,
            may_be_partial: all_oversize || may_collect,
            must_be_trim: pool.is_none() && retry_below.is_none() && garbage_below.is_none(),
            immediate: release.immediate,
        }
    }
}

/// The limit of which `bytes` are the garbage collection threshold.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a bound of a limit; one byte more or less makes no difference"
)]
fn limit_at_threshold(bytes: u64, threshold: f64) -> u64 {
    (bytes as f64 / threshold) as u64
}

/// Limits within the bounds, round numbers first: people set them.
pub(super) fn likely_limits(at_least: u64, below: u64) -> Vec<u64> {
    let mut limits = Vec::new();
    let mut unit = 1024 * MIB;
    while unit >= 2 * MIB && limits.len() < 4 {
        if let Some(limit) = at_least.checked_next_multiple_of(unit)
            && limit < below
            && !limits.contains(&limit)
        {
            limits.push(limit);
        }
        unit /= 2;
    }
    if !limits.contains(&at_least) {
        limits.push(at_least);
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_limits_are_tried_first() {
        const GIB: u64 = 1 << 30;
        assert_eq!(likely_limits(6_438_256_640, 6_444_548_096)[0], 6 * GIB);
        assert_eq!(likely_limits(5 * GIB + 3 * MIB, 5 * GIB + 5 * MIB), [5 * GIB + 4 * MIB, 5 * GIB + 3 * MIB]);
        assert_eq!(likely_limits(GIB + 1, GIB + 2), [GIB + 1]);
    }
}
