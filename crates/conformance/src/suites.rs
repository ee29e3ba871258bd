//! The registry: every suite of this crate, in the order in which they run.

use crate::check::{Level, Suite};
use crate::{driver, resources};

/// Every suite of this crate. The destructive one is the last.
pub const SUITES: &[Suite] = &[
    Suite::new("devices", Level::Driver, driver::devices::CHECKS),
    Suite::new("streams", Level::Driver, driver::streams::CHECKS),
    Suite::new("events", Level::Driver, driver::events::CHECKS),
    Suite::new("memory", Level::Driver, driver::memory::CHECKS),
    Suite::new("virtual_memory", Level::Driver, driver::virtual_memory::CHECKS),
    Suite::new("pools", Level::Driver, driver::pools::CHECKS),
    Suite::new("host_memory", Level::Driver, driver::host_memory::CHECKS),
    Suite::new("copies", Level::Driver, driver::copies::CHECKS),
    Suite::new("capture", Level::Driver, driver::capture::CHECKS),
    Suite::new("capture_rules", Level::Driver, driver::capture_rules::CHECKS),
    Suite::new("graphs", Level::Driver, driver::graphs::CHECKS),
    Suite::new("conditionals", Level::Driver, driver::conditionals::CHECKS),
    Suite::new("kernels", Level::Driver, driver::kernels::CHECKS),
    Suite::new("libraries", Level::Driver, driver::libraries::CHECKS),
    Suite::new("current", Level::Resources, resources::current::CHECKS),
    Suite::new("stream_pool", Level::Resources, resources::streams::CHECKS),
    Suite::new("event_pool", Level::Resources, resources::events::CHECKS),
    Suite::new("allocator", Level::Resources, resources::allocator::CHECKS),
    Suite::new("paged", Level::Resources, resources::paged::CHECKS),
    Suite::new("elastic", Level::Resources, resources::elastic::CHECKS),
    Suite::new("share", Level::Resources, resources::share::CHECKS),
    Suite::new("sleep", Level::Resources, resources::sleep::CHECKS),
    Suite::new("stable", Level::Resources, resources::stable::CHECKS),
    Suite::new("contents", Level::Resources, resources::contents::CHECKS),
    Suite::new("external", Level::Resources, resources::external::CHECKS),
    Suite::new("generator", Level::Resources, resources::generator::CHECKS),
    Suite::new("handles", Level::Resources, resources::handles::CHECKS),
    Suite::new("blas", Level::Resources, resources::blas::CHECKS),
    Suite::new("graph", Level::Resources, resources::graph::CHECKS),
    Suite::new("pinned", Level::Resources, resources::pinned::CHECKS),
    Suite::destructive("errors", Level::Driver, driver::errors::CHECKS),
];

/// The suites of this crate and `extra` ones of a caller, in the order in which they run: destructive ones last.
pub fn suites(extra: &[Suite]) -> impl Iterator<Item = &Suite> {
    let (harmless, destructive): (Vec<_>, Vec<_>) = SUITES.iter().chain(extra).partition(|suite| !suite.destructive);
    harmless.into_iter().chain(destructive)
}
