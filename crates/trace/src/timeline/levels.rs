//! Allocated and cached memory and fragmentation over time, at several levels of detail: a drawing on a thousand pixels
//! reads about a thousand buckets at any zoom, however many positions there are.

use warpool::memory::report::BlockState;

use crate::category::CategoryBytes;
use crate::replay::{HeapState, Totals};

/// How much coarser each level is than the one before.
const FACTOR: usize = 8;

/// Levels end with the first that has no more buckets than this.
const BUCKETS_MIN: usize = 2048;

/// The memory of a device at one position. What is reserved and in none of the parts is fragmentation: free, between
/// allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// How many events came before.
    pub position: u64,
    /// Microseconds since the first event.
    pub time_us: u64,
    /// Requested bytes of allocated blocks.
    pub allocated: u64,
    /// Rounding: bytes of allocated blocks beyond their requests.
    pub rounding: u64,
    /// Pending free: waiting for streams.
    pub waiting: u64,
    /// Free, and could go back to the driver at once: segments without allocations, and whole chunks of expandable
    /// segments.
    pub cached: u64,
    /// All that the allocator has from the driver.
    pub reserved: u64,
    /// The requested bytes by category; they add up to `allocated`.
    pub categories: CategoryBytes,
}

impl Sample {
    /// Allocated blocks, with rounding.
    #[must_use]
    pub const fn live(&self) -> u64 {
        self.allocated.saturating_add(self.rounding)
    }

    /// Free, but between allocations.
    #[must_use]
    pub const fn fragmentation(&self) -> u64 {
        self.reserved.saturating_sub(self.live()).saturating_sub(self.waiting).saturating_sub(self.cached)
    }

    pub(super) fn of_totals(position: u64, time_us: u64, totals: &Totals, categories: CategoryBytes) -> Self {
        Self {
            position,
            time_us,
            allocated: totals.bytes_requested,
            rounding: totals.bytes_allocated.saturating_sub(totals.bytes_requested),
            waiting: totals.bytes_waiting,
            cached: totals.bytes_releasable,
            reserved: totals.bytes_reserved,
            categories,
        }
    }

    /// The state at the start, or of a snapshot without a history.
    pub(super) fn of_state(state: &HeapState) -> Self {
        let mut sample = Self { reserved: state.bytes_reserved, cached: state.bytes_releasable, ..Self::default() };
        for block in &state.blocks {
            match block.state {
                BlockState::ActiveAllocated => {
                    sample.allocated = sample.allocated.saturating_add(block.requested);
                    sample.rounding = sample.rounding.saturating_add(block.bytes.saturating_sub(block.requested));
                }
                BlockState::ActivePendingFree => sample.waiting = sample.waiting.saturating_add(block.bytes),
                BlockState::Inactive => {}
            }
        }
        sample
    }
}

/// Some positions in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The one of them with the most live memory; the first of these.
    pub sample: Sample,
    /// The least live memory.
    pub live_min: u64,
    /// The most reserved memory.
    pub reserved_max: u64,
}

impl Bucket {
    const fn of(sample: Sample) -> Self {
        Self { sample, live_min: sample.live(), reserved_max: sample.reserved }
    }

    fn add(&mut self, other: &Self) {
        if other.sample.live() > self.sample.live() {
            self.sample = other.sample;
        }
        self.live_min = self.live_min.min(other.live_min);
        self.reserved_max = self.reserved_max.max(other.reserved_max);
    }
}

/// All positions in buckets of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    /// How many positions a bucket has; the last may have fewer.
    pub positions: u64,
    /// The buckets.
    pub buckets: Vec<Bucket>,
}

/// Levels while samples are added.
pub(super) struct Levels {
    positions: u64,
    seen: u64,
    finest: Vec<Bucket>,
}

impl Levels {
    /// For `samples` samples in all.
    pub fn new(samples: u64, buckets_max: usize) -> Self {
        let positions = samples.div_ceil(buckets_max.max(1) as u64).next_power_of_two();
        Self { positions, seen: 0, finest: Vec::new() }
    }

    pub fn push(&mut self, sample: Sample) {
        let bucket = Bucket::of(sample);
        match self.finest.last_mut().filter(|_| !self.seen.is_multiple_of(self.positions)) {
            Some(last) => last.add(&bucket),
            None => self.finest.push(bucket),
        }
        self.seen += 1;
    }

    pub fn finish(self) -> Vec<Level> {
        with_coarser(Level { positions: self.positions, buckets: self.finest })
    }
}

/// A level with all that are coarser.
fn with_coarser(finest: Level) -> Vec<Level> {
    let mut levels = vec![finest];
    while let Some(finer) = levels.last().filter(|level| level.buckets.len() > BUCKETS_MIN) {
        levels.push(finer.folded(FACTOR));
    }
    levels
}

/// Makes the finest level twice as coarse.
pub(super) fn coarsen(levels: &mut Vec<Level>) {
    if let Some(finest) = levels.first() {
        *levels = with_coarser(finest.folded(2));
    }
}

impl Level {
    fn folded(&self, factor: usize) -> Self {
        let fold = |buckets: &[Bucket]| {
            let mut folded = buckets[0];
            buckets[1..].iter().for_each(|bucket| folded.add(bucket));
            folded
        };
        Self { positions: self.positions * factor as u64, buckets: self.buckets.chunks(factor).map(fold).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels(samples: u64, buckets_max: usize) -> Vec<Level> {
        let mut levels = Levels::new(samples, buckets_max);
        for position in 0..samples {
            // A sawtooth with one peak.
            let allocated = if position == 777 { 1000 } else { position % 10 };
            levels.push(Sample { position, allocated, reserved: 2000 - position.min(1500), ..Sample::default() });
        }
        levels.finish()
    }

    #[test]
    fn every_level_keeps_the_peak_and_the_extremes() {
        let levels = levels(20_000, 1 << 20);
        assert_eq!(levels.iter().map(|level| level.buckets.len()).collect::<Vec<_>>(), [20_000, 2_500, 313]);
        assert_eq!(levels.iter().map(|level| level.positions).collect::<Vec<_>>(), [1, 8, 64]);
        for level in &levels {
            let bucket = &level.buckets[usize::try_from(777 / level.positions).expect("small")];
            assert_eq!((bucket.sample.position, bucket.sample.allocated), (777, 1000));
            assert_eq!(level.buckets[0].reserved_max, 2000);
            assert_eq!(level.buckets.iter().map(|bucket| bucket.live_min).min(), Some(0));
        }
    }

    #[test]
    fn the_finest_level_is_bounded() {
        let levels = levels(20_000, 5_000);
        assert_eq!((levels[0].positions, levels[0].buckets.len()), (4, 5_000));
        assert_eq!(levels[0].buckets[194].sample.position, 777);
    }
}
