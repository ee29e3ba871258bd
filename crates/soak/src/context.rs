//! The context of a program.

use crate::counts::{Counts, Kinds};
use crate::rng::Rng;
use crate::steps::Steps;

/// The context of a program: its random numbers, its counts and its log.
pub struct Context {
    pub seed: u64,
    pub rng: Rng,
    pub counts: Counts,
    pub kinds: Kinds,
    pub steps: Steps,
    /// Steps that are left out, to find out what a violation needs.
    pub skip: Vec<String>,
    /// The allocator under test is one that returns memory twice, to test the campaign itself.
    pub broken: bool,
}

impl Context {
    pub fn new(seed: u64, steps: Steps, skip: &[String], broken: bool) -> Self {
        let (counts, kinds) = (Counts::default(), Kinds::new());
        Self { seed, rng: Rng::new(seed), counts, kinds, steps, skip: skip.to_vec(), broken }
    }

    /// Whether a kind of steps is left out.
    pub fn skips(&self, kind: &str) -> bool {
        self.skip.iter().any(|skipped| skipped == kind)
    }

    /// Counts something that a test expects programs to do.
    pub fn made(&mut self, kind: &'static str) {
        self.made_many(kind, 1);
    }

    pub fn made_many(&mut self, kind: &'static str, times: u64) {
        *self.kinds.entry(kind).or_default() += times;
    }

    /// Logs a step.
    pub fn step(&self, step: impl Into<String>) {
        self.steps.push(step.into());
    }
}
