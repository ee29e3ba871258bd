//! Random numbers from a seed, with the draws that programs are made of.

/// The random generator of a program. The same seed gives the same program.
pub struct Rng(fastrand::Rng);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub fn u64(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end)
    }

    pub fn u64_in(&mut self, range: std::ops::RangeInclusive<u64>) -> u64 {
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

/// The seed of one program: a hash, so that neighbours have nothing in common.
pub fn program_seed(seed: u64, campaign: u64, program: u64) -> u64 {
    let mut z = seed
        .wrapping_add(campaign.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(program.wrapping_mul(0x8cb9_2ba7_2f3d_8dd7))
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    // The finaliser of SplitMix64.
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
