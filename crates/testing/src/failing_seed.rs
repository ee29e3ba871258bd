//! Prints the seed and the steps of a random program when its test panics.

/// What to print.
#[derive(Debug)]
pub struct FailingSeed {
    seed: u64,
    steps: Vec<String>,
    is_expected: fn() -> bool,
}

impl FailingSeed {
    /// For a program with that seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::unless(seed, || false)
    }

    /// The same, but nothing is printed if the panic is expected.
    #[must_use]
    pub fn unless(seed: u64, is_expected: fn() -> bool) -> Self {
        Self { seed, steps: Vec::new(), is_expected }
    }

    /// Adds a step.
    pub fn push(&mut self, step: String) {
        self.steps.push(step);
    }
}

impl Drop for FailingSeed {
    fn drop(&mut self) {
        if std::thread::panicking() && !(self.is_expected)() {
            for (at, step) in self.steps.iter().enumerate() {
                eprintln!("{at:4} {step}");
            }
            eprintln!("WARPOOL_SWARM_SEED={}", self.seed);
        }
    }
}
