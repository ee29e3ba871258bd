//! All suites on the simulated GPU, with several seeds.

mod driver;
mod expectations;
mod resources;
