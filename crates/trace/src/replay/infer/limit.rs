//! Why memory was released to the driver, and which memory limit the recorded program ran under. A recording contains
//! neither. Memory is released by the program (`empty_cache`), with a private pool, or by the allocator because the
//! limit was reached. In the last case one limit must explain all releases: no request that succeeded was above it, and
//! every request that failed was.

use warpool::memory::report::SegmentKind;

use super::heap::SegmentId;
use super::observe::{DriverAllocation, NextRequest, Observations, Release};
use super::pools::{DEFAULT_POOL, InferredPools, PoolIndex};
use super::rules::{MIB, RecordedRules};
use crate::bytes_text::text;
use crate::steps;

/// Why memory was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::replay) enum ReleaseCause {
    /// The allocator waited for all events and released everything cached, to retry the next request.
    Retry,
    /// The allocator released a part of it for the next request, without waiting for events.
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
    /// The memory that a full device had for the program at the failed requests: the least and the most.
    pub device_had: Option<(u64, u64)>,
    /// Values to try, the likeliest first.
    pub candidates: Vec<u64>,
}

impl LimitBounds {
    /// `device_had` is the memory that a full device had for the program at each failure, in their order; empty if a
    /// limit was set. `card` is the memory of the card, if known.
    pub(super) fn new(at_least: u64, below: u64, device_had: &[u64], card: impl FnOnce() -> Option<u64>) -> Self {
        let least = device_had.iter().copied().min();
        let candidates = match least {
            Some(_) => limits_of_full_device(at_least, below, device_had),
            None => likely_limits(at_least, below, card()),
        };
        let device_had = least.zip(device_had.iter().copied().max());
        Self { at_least, below, device_full: device_had.is_some(), device_had, candidates }
    }

    /// A remark if the memory that others use of a full device varies.
    fn remark(&self) -> Option<String> {
        let (least, most) = self.device_had.filter(|(least, most)| most - least >= MIB)?;
        Some(format!(
            "at the requests that failed the device had {} to {} for the program: others use it too, now more and now \
             less",
            text(least),
            text(most)
        ))
    }
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
    // The memory that a full device had for the program, at each failure.
    let mut device_had = Vec::new();
    let mut unexplained = 0_u64;
    for failure in &observed.failed_requests {
        let bytes = failure.bytes_reserved.saturating_add(failure.segment_bytes);
        if bytes > at_least {
            below = below.min(bytes);
            failures += 1;
            device_had.extend(failure.device_had());
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
            // If both causes are possible, use the limit that allows both.
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
        // If an unused segment stayed cached, the threshold was not reached.
        let kept = observed.driver_allocations.iter().filter(|allocation| allocation.had_unused_segment);
        let kept = kept.map(|allocation| limit_at_threshold(allocation.bytes_reserved_before, threshold));
        at_least = kept.filter(|&bytes| bytes < below).fold(at_least, u64::max);
    }
    let limit = (below < u64::MAX && at_least < below)
        .then(|| LimitBounds::new(at_least, below, &device_had, || observed.device_memory(at_least).bytes_total));
    remarks.extend(limit.as_ref().and_then(LimitBounds::remark));
    // A failed request was retried too.
    let failed = failures_without_release(observed, failures);
    let possible = observed.releases.iter().filter(|release| release.next_request.is_some()).count() as u64;
    let retries = match limit {
        Some(_) => RetryBounds { least: retries + failed, most: possible + failed },
        None => RetryBounds::default(),
    };
    ReleaseCauses { causes, limit, retries, remarks }
}

/// The peak of reserved memory, as a limit counts it. The limit was at least this.
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

/// Whether the releases show that there was a limit. A single release that could have either cause is attributed to the
/// program, unless it came directly before the request.
fn shows_limit(releases: &[PossibleCauses]) -> bool {
    let retries: Vec<&PossibleCauses> = releases.iter().filter(|release| release.retry_below.is_some()).collect();
    let trims = releases.iter().filter(|release| release.must_be_trim).count();
    releases.iter().any(|release| release.must_be_retry)
        || retries.len() > 1
        || releases.iter().any(|release| release.garbage_below.is_some())
        || (retries.len() == 1 && trims == 0 && retries[0].immediate)
}

/// Failed requests without a release before them: nothing was cached, but they were retried anyway.
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
        // If the program had emptied the cache before the request, a free block would have served the request.
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

/// The candidates for a full device: the memory that it had for the program at the last failure, then the least of all
/// failures, both within the bounds. An expandable segment grows by whole chunks, so a request may fail for the rest of
/// a chunk.
fn limits_of_full_device(at_least: u64, below: u64, device_had: &[u64]) -> Vec<u64> {
    let last = device_had.last().copied();
    let least = device_had.iter().copied().filter(|had| (at_least..below).contains(had)).min();
    let mut limits = Vec::new();
    for limit in [last, least, Some(at_least)].into_iter().flatten() {
        let limit = limit.clamp(at_least, below - 1);
        if !limits.contains(&limit) {
            limits.push(limit);
        }
    }
    limits
}

/// Limits within the bounds that people set: a fraction of the card in steps of a twentieth, a round number, a
/// fraction in steps of a hundredth.
fn likely_limits(at_least: u64, below: u64, card: Option<u64>) -> Vec<u64> {
    const LIMITS_MAX: usize = 6;
    let mut limits = Vec::new();
    let mut add = |limit: u64| {
        if (at_least..below).contains(&limit) && !limits.contains(&limit) && limits.len() < LIMITS_MAX {
            limits.push(limit);
        }
    };
    let hundredths = |step: usize| (1..100).rev().filter(move |percent| percent % step == 0);
    let fractions = |step: usize| {
        card.into_iter().flat_map(move |total| hundredths(step).map(move |percent| fraction(total, percent)))
    };
    fractions(5).for_each(&mut add);
    let mut unit = 1024 * MIB;
    while unit >= 2 * MIB {
        at_least.checked_next_multiple_of(unit).into_iter().for_each(&mut add);
        unit /= 2;
    }
    fractions(1).for_each(&mut add);
    if !limits.contains(&at_least) {
        limits.push(at_least);
    }
    limits
}

/// A part of a card's memory, as PyTorch computes it.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "as the allocator computes it"
)]
fn fraction(total: u64, percent: usize) -> u64 {
    (total as f64 * (percent as f64 / 100.0)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn round_limits_are_tried_first() {
        assert_eq!(likely_limits(6_438_256_640, 6_444_548_096, None)[0], 6 * GIB);
        assert_eq!(likely_limits(5 * GIB + 3 * MIB, 5 * GIB + 5 * MIB, None), [5 * GIB + 4 * MIB, 5 * GIB + 3 * MIB]);
        assert_eq!(likely_limits(GIB + 1, GIB + 2, None), [GIB + 1]);
    }

    #[test]
    fn fraction_of_a_known_card_is_likelier_than_a_round_number() {
        let total = 24_081 * MIB;
        let (nine_tenths, a_third) = (fraction(total, 90), fraction(total, 33));
        assert_eq!(likely_limits(nine_tenths - GIB, nine_tenths + MIB, Some(total))[0], nine_tenths);
        assert!(!likely_limits(nine_tenths - GIB, nine_tenths + MIB, None).contains(&nine_tenths));
        let limits = likely_limits(a_third - MIB, a_third + MIB, Some(total));
        assert!(limits.contains(&a_third), "{limits:?}");
    }

    #[test]
    fn full_device_is_limited_to_what_it_had() {
        let (at_least, below) = (22 * GIB, 24 * GIB);
        let bounds = |had: &[u64]| LimitBounds::new(at_least, below, had, || None);
        assert_eq!(bounds(&[23 * GIB + 7]).candidates, [23 * GIB + 7, at_least]);
        assert_eq!(bounds(&[23 * GIB + 7]).remark(), None);
        // The memory used by others varied: the last value, then the least one that explains the recording.
        let several = bounds(&[21 * GIB, 22 * GIB + 5, 23 * GIB]);
        assert_eq!(several.candidates, [23 * GIB, 22 * GIB + 5, at_least]);
        assert_eq!((several.device_full, several.device_had), (true, Some((21 * GIB, 23 * GIB))));
        assert!(several.remark().expect("it changed").contains("21 GiB to 23 GiB"));
        // For the rest of a chunk.
        assert_eq!(bounds(&[24 * GIB + MIB]).candidates, [24 * GIB - 1, at_least]);
        assert!(!bounds(&[]).device_full);
    }
}
