//! Random numbers of a check, from its generator.

use super::TestContext;

impl TestContext {
    /// A random number.
    pub fn random(&self) -> u64 {
        self.rng().u64(..)
    }

    /// A random number below `end`.
    pub(crate) fn random_below(&self, end: u64) -> u64 {
        self.rng().u64(..end)
    }

    pub(crate) fn random_bytes(&self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        self.rng().fill(&mut bytes);
        bytes
    }

    pub(crate) fn random_words(&self, n: usize) -> Vec<u32> {
        let mut rng = self.rng();
        (0..n).map(|_| rng.u32(..)).collect()
    }
}
