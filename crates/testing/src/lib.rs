//! Code shared by Warpool's tests and the programs of `warpool soak`: random draws from a seed ([`Rng`]), which seeds a
//! test runs ([`seeds`]), a loop over all cores ([`in_parallel`]), tags in simulated memory ([`Tags`]), and
//! registrations that follow it ([`Registered`]).

mod parallel;
mod registered;
mod rng;
mod tags;

pub use parallel::in_parallel;
pub use registered::Registered;
pub use rng::{Rng, scaled, seeds};
pub use tags::Tags;
