//! The context of a program.

use crate::counts::Counts;
use crate::rng::Rng;
use crate::steps::Steps;

/// The context of a program: its random numbers, its counts and its log.
pub struct Context {
    pub seed: u64,
    pub rng: Rng,
    pub counts: Counts,
    pub steps: Steps,
    /// Steps that are left out, to find out what a violation needs.
    pub skip: Vec<String>,
    /// The allocator under test is one that returns memory twice, to test the campaign itself.
    pub broken: bool,
}

impl Context {
    pub fn new(seed: u64, steps: Steps, skip: &[String], broken: bool) -> Self {
        Self { seed, rng: Rng::new(seed), counts: Counts::default(), steps, skip: skip.to_vec(), broken }
    }

    /// Whether a kind of steps is left out.
    pub fn skips(&self, kind: &str) -> bool {
        self.skip.iter().any(|skipped| skipped == kind)
    }

    /// Logs a step.
    pub fn step(&self, step: impl Into<String>) {
        self.steps.push(step.into());
    }
}
