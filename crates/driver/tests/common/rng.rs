//! Random numbers from a seed, and how many rounds a test runs.

/// `fastrand` with the draws that random test programs need. The same seed gives the same program.
pub struct Rng(fastrand::Rng);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    #[allow(dead_code, reason = "used by one of the test binaries")]
    pub fn u64(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end)
    }
}

/// The number in an environment variable, if it is set.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

/// `count`, times `WARPOOL_TEST_SCALE`. Tests are sized for a quick run; the full size is a scale of 10.
pub fn scaled(count: u64) -> u64 {
    count * number("WARPOOL_TEST_SCALE").unwrap_or(1)
}
