//! Luck with a seed, and which seeds to try.
// Not `expect`: what is unused differs from one test binary to the next.
#![allow(clippy::allow_attributes, dead_code, reason = "each test binary uses its own part of this")]

/// A small generator (SplitMix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `sides`.
    pub fn roll(&mut self, sides: usize) -> usize {
        usize::try_from(self.next() >> 33).expect("31 bits") % sides
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.roll(of.len())]
    }

    /// True once in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.roll(n) == 0
    }

    /// 32 bits.
    pub fn word(&mut self) -> u32 {
        (self.next() >> 32) as u32
    }

    /// The size of a request: of every kind that the rules tell apart, and often just at an edge.
    pub fn bytes(&mut self) -> u64 {
        const KIB: u64 = 1 << 10;
        const MIB: u64 = 1 << 20;
        let below = |dice: &mut Self, most: u64| 1 + dice.next() % most;
        match self.roll(12) {
            0..3 => below(self, 4 * KIB),
            3..6 => below(self, MIB),
            6..8 => MIB + below(self, 9 * MIB),
            8..10 => 10 * MIB + below(self, 30 * MIB),
            10 => self.pick(&[512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB]),
            _ => self.pick(&[MIB, 4 * MIB, 12 * MIB, 20 * MIB]),
        }
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

/// The seeds to try: `default` many, or as the environment says.
pub fn seeds(default: u64) -> std::ops::Range<u64> {
    match number("WARPOOL_SWARM_SEED") {
        Some(seed) => seed..seed + 1,
        None => {
            let first = number("WARPOOL_SWARM_FIRST").unwrap_or(0);
            first..first + number("WARPOOL_SWARM_COUNT").unwrap_or(default)
        }
    }
}
