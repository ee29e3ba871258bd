//! Conformance checks: what every Warpool driver must do, and what Warpool's resources must do on every driver.
//!
//! A check is a small program on a real driver. It does real work on real streams and compares the results exactly.
//! The same checks run on CUDA and on the simulated GPU; that both pass is the reason to trust the simulated one.
//! `warpool selftest` runs them on any machine, without a Rust toolchain.
//!
//! The checks of one subject are a suite ([`Suite`]). Suites are of two levels:
//! - [`Level::Driver`]: the driver contract, one suite per subject. A check uses nothing but the contract.
//! - [`Level::Resources`]: streams, events, allocators, handles, generators and graphs of the crate `warpool`. Each
//!   check has an [`Instance`](warpool::Instance) of its own, and must leave no object of that instance in use.
//!
//! # Run the checks on a driver
//! Every implementation of [`Driver`](warpool_driver::Driver) is tested the same way, including a decorator around
//! another driver:
//!
//! ```
//! use std::sync::Arc;
//! use warpool_conformance::{Options, Outcome};
//! use warpool_driver::Driver;
//! use warpool_driver::sim::{SimConfig, SimDriver};
//!
//! let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimConfig::default()));
//! let options = Options { suites: vec!["events".to_owned()], seed: 7, ..Options::default() };
//! let summary = warpool_conformance::run(&driver, &options, &mut |report| {
//!     if let Outcome::Failed(text) = &report.outcome {
//!         println!("{}.{}: {text}", report.suite, report.check);
//!     }
//! });
//! assert_eq!(summary.failed, 0);
//! ```
//!
//! # Write a check
//! A check is a function over a [`TestContext`]. Objects that it creates through the context are destroyed after it,
//! even if it fails, and no stream is left capturing. Its name, listed with [`checks!`], is the statement that it
//! checks:
//!
//! ```
//! use warpool_conformance::expect::expect;
//! use warpool_conformance::{CheckResult, Level, Options, Suite, TestContext, checks};
//!
//! const SUITE: Suite = Suite::new("example", Level::Driver, checks![recorded_event_waits_for_earlier_work,]);
//!
//! fn recorded_event_waits_for_earlier_work(context: &TestContext) -> CheckResult {
//!     let (stream, event) = (context.stream()?, context.event()?);
//!     context.keep_busy(stream)?;
//!     context.record(event, stream)?;
//!     expect(!context.driver.event_query(event)?, "an event behind running work is not complete")?;
//!     context.driver.event_synchronize(event)?;
//!     expect(context.driver.event_query(event)?, "a synchronized event is complete")
//! }
//! # use std::sync::Arc;
//! # use warpool_driver::sim::{SimConfig, SimDriver};
//! # let driver: Arc<dyn warpool_driver::Driver> = Arc::new(SimDriver::new(SimConfig::default()));
//! # let options = Options { extra: &[SUITE], suites: vec!["example".to_owned()], ..Options::default() };
//! # assert_eq!(warpool_conformance::run(&driver, &options, &mut |_| ()).passed, 1);
//! ```
//!
//! - It states what it expects with the functions of [`expect`]; a failure names the expected and the actual value, the
//!   source line and the seed.
//! - It skips ([`expect::require`], [`expect::skip`]) only where the device lacks something, and names that.
//! - It does not depend on real time. Where one thing must still run while another finishes, it waits for the other and
//!   then queries the first.
//! - Random sizes and contents come from the context's generator: the same seed gives the same check, alone or among
//!   others.
//!
//! # Put an allocator through the checks
//! `resources/allocator.rs` runs each check on every kind of device allocator, `resources/pinned.rs` on every kind of
//! pinned allocator, `resources/external.rs` on external ones. A new allocator is one more line in the function that
//! lists them, such as `on_caching`.
//!
//! Not here: how results are printed. [`run`] passes a [`Report`] of each check to a closure.

#![deny(unsafe_code)]

mod check;
mod context;
mod driver;
pub mod expect;
mod resources;
mod runner;
mod suites;
mod sync;

pub use check::{Check, Level, Suite};
pub use context::{TestContext, VmContext};
pub use expect::{CheckError, CheckResult};
pub use runner::{Options, Outcome, Report, Summary, run};
pub use suites::{SUITES, suites};
