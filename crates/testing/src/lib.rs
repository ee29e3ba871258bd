//! Code shared by Warpool's tests and the programs of `warpool soak`: random draws from a seed ([`Rng`]), which seeds a
//! test runs ([`seeds`]), a report of the one that fails ([`FailingSeed`]), and tags in simulated memory ([`Tags`]).

mod failing_seed;
mod rng;
mod tags;

pub use failing_seed::FailingSeed;
pub use rng::{Rng, scaled, seeds};
pub use tags::Tags;
