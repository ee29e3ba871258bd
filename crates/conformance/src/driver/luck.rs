//! Where a check's random sizes, contents and programs come from: the seed of the run and the name of the check.

use std::sync::atomic::{AtomicU64, Ordering};

use super::bench::Bench;

/// A counter; what is drawn is a scrambled copy of it.
pub(super) struct Luck(AtomicU64);

impl Luck {
    /// Every check has luck of its own, so that a suite run alone does what it did among the others.
    pub(super) fn new(seed: u64, name: &[&str]) -> Self {
        let bytes = name.iter().flat_map(|part| part.bytes());
        Self(AtomicU64::new(bytes.fold(seed, |seed, byte| split_mix(seed ^ u64::from(byte)))))
    }
}

impl Bench<'_> {
    /// A number from the seed.
    pub fn random(&self) -> u64 {
        split_mix(self.luck.0.fetch_add(GOLDEN, Ordering::Relaxed))
    }

    /// A number in `0..n`.
    pub(super) fn below(&self, n: u64) -> u64 {
        self.random() % n
    }

    pub(super) fn random_bytes(&self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.random().to_le_bytes()[3]).collect()
    }

    pub(super) fn random_words(&self, n: usize) -> Vec<u32> {
        (0..n).map(|_| (self.random() >> 32) as u32).collect()
    }
}

/// The step of SplitMix64's counter.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's output function: good enough for sizes and contents, and the same everywhere.
fn split_mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
