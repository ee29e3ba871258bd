//! Code shared by Warpool's tests and the programs of `warpool soak`: random draws from a seed ([`Rng`]), which seeds a
//! test runs ([`seeds`]), and tags in simulated memory ([`Tags`]).

mod rng;
mod tags;

pub use rng::{Rng, scaled, seeds};
pub use tags::Tags;
