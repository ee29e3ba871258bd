//! Code shared by Warpool's tests and the programs of `warpool soak`: random draws from a seed ([`Rng`]), which seeds a
//! test runs ([`seeds`]), a loop over all cores ([`in_parallel`]), and tags in simulated memory ([`Tags`]).

mod parallel;
mod rng;
mod tags;

pub use parallel::in_parallel;
pub use rng::{Rng, scaled, seeds};
pub use tags::Tags;
