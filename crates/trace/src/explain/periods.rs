//! Iterations of a program, and whether it holds more from one to the next.
//!
//! A program in a loop makes the same allocations again and again. The search is for a kind of allocation, of one size
//! and call stack, that occurs at regular distances over most of the history. Each occurrence begins a period.

use rustc_hash::FxHashMap;
use warpool::memory::report::{Action, StackId, TraceEntry};

/// The least number of periods.
const PERIODS_MIN: usize = 4;
/// Kinds of allocations that are examined.
const KINDS_MAX: usize = 4096;

/// The events at which periods begin, ascending; empty if none are found.
pub(super) fn find(events: &[TraceEntry]) -> Vec<usize> {
    // Distances are counted in allocations: other events depend on the allocator's state.
    let allocations = || events.iter().enumerate().filter(|(_, event)| event.action == Action::Alloc);
    let mut kinds: FxHashMap<(u64, Option<StackId>), Kind> = FxHashMap::default();
    let mut count = 0_usize;
    for (_, event) in allocations() {
        let kind = (event.size, event.stack);
        let examined = kinds.len() < KINDS_MAX;
        match kinds.get_mut(&kind) {
            Some(kind) => kind.add(count),
            None if examined => drop(kinds.insert(kind, Kind::new(count))),
            None => {}
        }
        count += 1;
    }
    let best = kinds.iter().filter_map(|(kind, found)| Some((found.irregularity(count)?, found.first, kind)));
    // The most regular one; the first of equals.
    let best = best.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(b.2)));
    let Some((_, _, &(size, stack))) = best else { return Vec::new() };
    allocations().filter(|(_, event)| (event.size, event.stack) == (size, stack)).map(|(at, _)| at).collect()
}

/// The occurrences of one kind of allocation.
struct Kind {
    first: usize,
    last: usize,
    count: usize,
    /// The sum of the squared distances.
    squares: f64,
}

impl Kind {
    fn new(at: usize) -> Self {
        Self { first: at, last: at, count: 1, squares: 0.0 }
    }

    #[expect(clippy::cast_precision_loss, reason = "a distance, for a measure of regularity")]
    fn add(&mut self, at: usize) {
        let distance = (at - self.last) as f64;
        self.squares += distance * distance;
        self.last = at;
        self.count += 1;
    }

    /// How irregular the distances are, as standard deviation over mean; `None` if these are no periods: too few, too
    /// short, or over less than half of the history.
    #[expect(clippy::cast_precision_loss, reason = "a measure of regularity")]
    fn irregularity(&self, allocations: usize) -> Option<f64> {
        const DISTANCE_MIN: f64 = 2.0;
        const IRREGULARITY_MAX: f64 = 0.3;
        let span = (self.last - self.first) as f64;
        let distances = self.count.checked_sub(1)? as f64;
        let mean = span / distances;
        if self.count < PERIODS_MIN || mean < DISTANCE_MIN || span * 2.0 < allocations as f64 {
            return None;
        }
        let variance = (self.squares / distances - mean * mean).max(0.0);
        Some(variance.sqrt() / mean).filter(|&irregularity| irregularity <= IRREGULARITY_MAX)
    }
}

/// Growth from period to period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Growth {
    /// The first period that counts: what comes before is warm-up.
    pub first: usize,
    /// The last period.
    pub last: usize,
    /// How much more is allocated at its beginning.
    pub bytes: u64,
}

/// Whether the allocated bytes at the beginnings of the periods grow steadily: over the last two thirds, in nearly
/// every period, and in the second half not much less than in the first.
pub(super) fn growth(bytes_at: &[u64]) -> Option<Growth> {
    const BYTES_MIN: u64 = 1 << 20;
    if bytes_at.len() < PERIODS_MIN {
        return None;
    }
    let (first, last) = (bytes_at.len() / 3, bytes_at.len() - 1);
    let bytes = bytes_at[last].checked_sub(bytes_at[first])?;
    let half = first.midpoint(last);
    let later = bytes_at[last].saturating_sub(bytes_at[half]);
    let steps = last - first;
    let rising = bytes_at[first..].windows(2).filter(|pair| pair[1] > pair[0]).count();
    let falls = bytes_at[first..].windows(2).map(|pair| pair[0].saturating_sub(pair[1])).fold(0, u64::saturating_add);
    let is_steady = rising * 2 >= steps && later >= bytes / 4 && falls <= bytes / 4;
    let is_large = bytes >= BYTES_MIN && bytes >= bytes_at[last] / 50;
    (is_steady && is_large).then_some(Growth { first, last, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn allocations(sizes: &[u64]) -> Vec<TraceEntry> {
        sizes.iter().map(|&size| TraceEntry::new(Action::Alloc, 0x1000, size, 0, 0)).collect()
    }

    #[test]
    fn loop_is_found() {
        let sizes: Vec<u64> = (0..10).flat_map(|step| [7, 3, 3, 100 + step, 5]).collect();
        let events = allocations(&sizes);
        assert_eq!(find(&events), (0..10).map(|step| step * 5).collect::<Vec<_>>());
    }

    #[test]
    fn what_does_not_repeat_has_no_periods() {
        let squares: Vec<u64> = (0..100).map(|at| at * at).collect();
        assert_eq!(find(&allocations(&squares)), [0; 0]);
        assert_eq!(find(&allocations(&[5, 6, 5, 6, 5])), [0; 0], "three periods are too few");
        assert_eq!(find(&[]), [0; 0]);
    }

    #[test]
    fn steady_growth_is_told_from_warm_up_and_noise() {
        let steady: Vec<u64> = (0..12).map(|step| (100 + 10 * step) * MIB).collect();
        assert_eq!(growth(&steady), Some(Growth { first: 4, last: 11, bytes: 70 * MIB }));
        let warm_up: Vec<u64> = (0..12).map(|step: u64| (100 + 10 * step.min(5)) * MIB).collect();
        assert_eq!(growth(&warm_up), None);
        let noise: Vec<u64> = (0..12).map(|step| (100 + step % 3) * MIB).collect();
        assert_eq!(growth(&noise), None);
        assert_eq!(growth(&[MIB, 2 * MIB, 3 * MIB]), None);
        let falling: Vec<u64> = (0..12).map(|step| (500 - 10 * step) * MIB).collect();
        assert_eq!(growth(&falling), None);
    }
}
