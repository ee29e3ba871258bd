//! Why memory went back to the driver, and which limit the recorded program ran under. A recording tells neither. Given
//! back was it by the program, by the end of a pool, or by the allocator itself, because a limit was reached: then the
//! same limit must explain all of it, since nothing that succeeded was above it and everything that failed was.

use warpool::memory::SegmentKind;

use super::pools::{DEFAULT, PoolIndex, Pools};
use super::sizes::{MIB, Sizes};
use super::survey::{NextRequest, Release, Survey};

/// Why memory went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The allocator waited for everything and gave back all it had, for the request behind it.
    Retry,
    /// The allocator gave back some of it for the request behind it, and waited for nothing.
    Collected,
    /// The program asked for it.
    Trim,
    /// A pool ended.
    PoolEnded(PoolIndex),
}

/// A limit, as far as the recording tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cap {
    /// It was at least this.
    pub least: u64,
    /// And below this.
    pub below: u64,
    /// Values to try, the likeliest first.
    pub guesses: Vec<u64>,
}

/// What was concluded.
#[derive(Clone, Debug, Default)]
pub(super) struct Causes {
    /// Of each release.
    pub causes: Vec<Cause>,
    pub cap: Option<Cap>,
    /// How often everything cached was given back to try once more: at least so often, and at most.
    pub retries: (u64, u64),
    /// What stays unexplained.
    pub notes: Vec<String>,
}

/// Concludes why memory went back.
pub(super) fn conclude(survey: &Survey, pools: &Pools, sizes: &Sizes) -> Causes {
    let fetched = survey.fetches.iter().map(|fetch| fetch.bytes_before + fetch.bytes_segment).max().unwrap_or(0);
    // Expandable segments grow by whole chunks, of which only what is needed is compared with the limit.
    let grows = survey.regions.iter().any(|region| region.expandable);
    let beyond = if grows { sizes.chunk(SegmentKind::Large) } else { 0 };
    let mut least = survey.bytes_peak.saturating_sub(beyond).max(fetched);
    let mut below = u64::MAX;
    let mut notes = Vec::new();

    let mut failures = 0;
    for failure in &survey.failures {
        let bytes = failure.bytes_held + failure.bytes_segment;
        if bytes > least {
            below = below.min(bytes);
            failures += 1;
        } else {
            notes.push(format!(
                "a request failed at {} MiB although {} MiB were held at another time: the limit was not the same throughout",
                bytes / MIB,
                least / MIB
            ));
        }
    }

    let judged: Vec<Judged> =
        survey.releases.iter().map(|release| Judged::new(release, survey, pools, sizes, least)).collect();
    let candidates: Vec<&Judged> = judged.iter().filter(|judged| judged.retry.is_some()).collect();
    let trims = judged.iter().filter(|judged| judged.trim_for_sure).count();
    // One release that could be either is taken for the program's own, unless something else speaks for a limit.
    let limited = failures > 0
        || judged.iter().any(|judged| judged.retry_for_sure)
        || candidates.len() > 1
        || judged.iter().any(|judged| judged.collected.is_some())
        || (candidates.len() == 1 && trims == 0 && candidates[0].quick);

    let mut retries = 0;
    let threshold = sizes.settings().garbage_collection_threshold;
    let causes = judged
        .iter()
        .map(|judged| {
            if let Some(pool) = judged.pool {
                return Cause::PoolEnded(pool);
            }
            if !limited || (judged.retry.is_none() && judged.collected.is_none()) {
                return Cause::Trim;
            }
            // Where it can have been either, the limit that allows both.
            below = below.min(judged.retry.max(judged.collected).unwrap_or(u64::MAX));
            if judged.retry.is_some() && judged.full {
                retries += u64::from(!judged.in_part);
                Cause::Retry
            } else {
                Cause::Collected
            }
        })
        .collect();
    if threshold > 0.0 && below < u64::MAX {
        // Where garbage lay about and stayed, the threshold was not reached.
        let kept =
            survey.fetches.iter().filter(|fetch| fetch.garbage).map(|fetch| share(fetch.bytes_before, threshold));
        least = kept.filter(|&bytes| bytes < below).fold(least, u64::max);
    }
    let cap = (below < u64::MAX && least < below).then(|| Cap { least, below, guesses: guesses(least, below) });
    // A failure is a retry too: its last try.
    let failed = failures_without_release(survey, failures);
    let possible = survey.releases.iter().filter(|release| release.next.is_some()).count() as u64;
    let retries = if cap.is_some() { (retries + failed, possible + failed) } else { (0, 0) };
    Causes { causes, cap, retries, notes }
}

/// Failures with nothing left to give back show no release, but were tried once more all the same.
fn failures_without_release(survey: &Survey, failures: u64) -> u64 {
    let released =
        survey.releases.iter().filter(|release| release.next.as_ref().is_some_and(|next| next.failed)).count();
    failures.saturating_sub(released as u64)
}

/// What can be said of one release by itself.
struct Judged {
    /// It was the end of this pool.
    pool: Option<PoolIndex>,
    /// It must have made room for the next request.
    retry_for_sure: bool,
    /// It can have made room for the next request, if the limit was below this.
    retry: Option<u64>,
    /// It can have been garbage collection, if the limit was below this.
    collected: Option<u64>,
    /// Nothing that could have gone stayed.
    full: bool,
    /// Only segments went that can also go without the rest: those above the split limit, or garbage.
    in_part: bool,
    trim_for_sure: bool,
    quick: bool,
}

impl Judged {
    fn new(release: &Release, survey: &Survey, pools: &Pools, sizes: &Sizes, least: u64) -> Self {
        let settings = sizes.settings();
        let full = !release.left.iter().any(|&id| pools.of(id) == DEFAULT);
        let region = |id: u32| &survey.regions[id as usize];
        let first = release.regions.first().map(|&id| pools.of(id));
        let pool = first.filter(|&pool| pool != DEFAULT && release.regions.iter().all(|&id| pools.of(id) == pool));
        let large = release.regions.iter().all(|&id| region(id).kind == SegmentKind::Large && !region(id).expandable);
        let oversize = settings.max_split_bytes.is_some_and(|limit| {
            release.regions.iter().all(|&id| !region(id).expandable && region(id).end - region(id).base >= limit)
        });
        let next = release.next.as_ref();
        let pool_asked = |next: &NextRequest| {
            let region = survey.alloc_regions.get(next.number).filter(|_| !next.failed);
            region.map_or(DEFAULT, |&region| pools.of(region))
        };
        let needed = next.filter(|next| {
            let pool = pool_asked(next);
            !next.could_serve.iter().any(|&id| pools.of(id) == pool)
        });
        let bytes = needed.map(|next| release.bytes_before + next.bytes_segment);
        // What the program gives back itself, it gives back before it asks: then it would have been served.
        let passed_over = needed.is_some_and(|next| {
            let pool = pool_asked(next);
            !next.failed && next.could_serve_after.iter().any(|&id| pools.of(id) == pool)
        });
        let retry = bytes.filter(|&bytes| bytes > least && (full || oversize) && pool.is_none());
        let collects = settings.garbage_collection_threshold > 0.0 && large && needed.is_some() && pool.is_none();
        let threshold = settings.garbage_collection_threshold;
        let collected = collects.then(|| share(release.bytes_before, threshold)).filter(|&bytes| bytes > least);
        Self {
            pool,
            retry_for_sure: retry.is_some() && passed_over,
            retry,
            collected,
            full,
            in_part: oversize || collects,
            trim_for_sure: pool.is_none() && retry.is_none() && collected.is_none(),
            quick: release.quick,
        }
    }
}

/// What `bytes` is that share of.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bounds of a limit; a byte more or less is tried"
)]
fn share(bytes: u64, threshold: f64) -> u64 {
    (bytes as f64 / threshold) as u64
}

/// Round numbers first: limits are set by people.
fn guesses(least: u64, below: u64) -> Vec<u64> {
    let mut guesses = Vec::new();
    let mut unit = 1024 * MIB;
    while unit >= 2 * MIB && guesses.len() < 4 {
        let guess = least.next_multiple_of(unit);
        if guess < below && !guesses.contains(&guess) {
            guesses.push(guess);
        }
        unit /= 2;
    }
    if !guesses.contains(&least) {
        guesses.push(least);
    }
    guesses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_guessed_round() {
        const GIB: u64 = 1 << 30;
        assert_eq!(guesses(6_438_256_640, 6_444_548_096)[0], 6 * GIB);
        assert_eq!(guesses(5 * GIB + 3 * MIB, 5 * GIB + 5 * MIB), [5 * GIB + 4 * MIB, 5 * GIB + 3 * MIB]);
        assert_eq!(guesses(GIB + 1, GIB + 2), [GIB + 1]);
    }
}
