//! Replaying recordings of real programs and of random ones.

#[path = "../common/mod.rs"]
mod common;

mod devices;
mod implausible;
mod inferences;
mod paged;
mod program;
mod random;
mod recordings;
mod rounds;
mod steady;
mod stop;
mod what_ifs;
