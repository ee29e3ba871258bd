//! Random numbers from a seed, and which seeds a test runs.

pub use warpool_testing::{Rng, scaled, seeds};
