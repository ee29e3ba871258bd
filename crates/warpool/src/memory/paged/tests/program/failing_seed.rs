//! Prints the seed and the steps of a random program when its test panics.

use crate::memory::paged::defect::Defect;

pub struct FailingSeed {
    seed: u64,
    steps: Vec<String>,
}

impl FailingSeed {
    pub fn new(seed: u64) -> Self {
        Self { seed, steps: Vec::new() }
    }

    pub fn push(&mut self, step: String) {
        self.steps.push(step);
    }
}

impl Drop for FailingSeed {
    fn drop(&mut self) {
        if std::thread::panicking() && !Defect::any_is_on() {
            for (at, step) in self.steps.iter().enumerate() {
                eprintln!("{at:4} {step}");
            }
            eprintln!("WARPOOL_SWARM_SEED={}", self.seed);
        }
    }
}
