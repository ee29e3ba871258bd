//! The contract between Warpool and a GPU driver, and a simulated GPU that implements it.
//!
//! - [`contract`]: the traits, one file per subject, combined in [`Driver`]. Ids and plain numbers, no handles.
//! - [`sim`]: the simulated GPU: memory with contents, streams whose work completes later, captures, graphs, and a log
//!   of every hazard.
//! - [`fork`]: whether this process was forked after a driver was opened.
//! - [`source_line`]: the line of the program that a call is made for.
//! - [`platform`]: what the target has of a clock, memory mappings, file descriptors and processes.
//! - [`decorate`]: decorators around a driver that count calls, record them, or make them fail.
//!
//! No CUDA here: that backend is the crate `warpool-cuda`.

pub mod contract;
pub mod decorate;
mod error;
pub mod fork;
mod id;
mod pages;
mod panic;
pub mod platform;
#[cfg(feature = "sim")]
pub mod sim;
pub mod source_line;

pub use contract::*;
pub use error::{DriverError, ErrorCode, Result};
pub use id::{
    Address, CaptureId, ConditionalId, DeviceId, DevicePtr, EventId, ForeignStream, FunctionId, GraphExecId, GraphId,
    HandleId, HostPtr, ModuleId, NodeId, PhysicalId, PoolId, RawHandle, RegistrationId, StreamId,
};
pub use pages::{ClaimedRange, HostPages, HostRange};
#[doc(hidden)]
pub use panic::discard_panic;

/// Compiles and runs the example of the package's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct PackageReadme;
