//! Random numbers from a seed, and which seeds a test runs.

use std::ops::{Range, RangeInclusive};

/// `fastrand` with the draws that random programs are made of. The same seed gives the same program.
pub struct Rng(fastrand::Rng);

impl Rng {
    /// The generator of a program.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Any number.
    pub fn u32(&mut self) -> u32 {
        self.0.u32(..)
    }

    /// Any number.
    pub fn u64(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end)
    }

    /// A number below `end`.
    pub fn u64_below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    /// A number in `range`.
    pub fn u64_in(&mut self, range: RangeInclusive<u64>) -> u64 {
        self.0.u64(range)
    }

    /// One of `items`.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// True with probability 1 / `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// The size of a request: every range that the size rules distinguish, and often exactly at a limit.
    pub fn request_bytes(&mut self) -> u64 {
        const KIB: u64 = 1 << 10;
        const MIB: u64 = 1 << 20;
        match self.below(13) {
            0..3 => self.u64_in(1..=4 * KIB),
            3..6 => self.u64_in(1..=MIB),
            6..8 => self.u64_in(MIB + 1..=10 * MIB),
            8..10 => self.u64_in(10 * MIB + 1..=40 * MIB),
            10 => {
                self.pick(&[1, 512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB])
            }
            11 => self.u64_in(40 * MIB..=700 * MIB),
            _ => self.pick(&[MIB, 4 * MIB, 12 * MIB, 20 * MIB]),
        }
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

/// `count`, times `WARPOOL_TEST_SCALE`. Tests are sized for a quick run; the full size is a scale of 10.
#[must_use]
pub fn scaled(count: u64) -> u64 {
    count * number("WARPOOL_TEST_SCALE").unwrap_or(1)
}

/// The seeds to run: `count` of them, scaled; `WARPOOL_SWARM_SEED`, `WARPOOL_SWARM_COUNT` and `WARPOOL_SWARM_FIRST`
/// choose others.
#[must_use]
pub fn seeds(count: u64) -> Range<u64> {
    match number("WARPOOL_SWARM_SEED") {
        Some(seed) => seed..seed + 1,
        None => {
            let first = number("WARPOOL_SWARM_FIRST").unwrap_or(0);
            first..first + number("WARPOOL_SWARM_COUNT").unwrap_or_else(|| scaled(count))
        }
    }
}
