//! The contract between Warpool and a GPU driver, and a simulated GPU that keeps it.
//!
//! - [`contract`]: the traits, one file per subject, joined in [`Driver`]. Ids, plain numbers, no handles.
//! - [`sim`]: the simulated GPU. Memory with contents, streams that complete later, captures, graphs, and a log of
//!   every hazard.
//! - [`decorate`]: drivers around drivers, which count, record, or fail.
//!
//! Nothing here knows CUDA's libraries: the backend for them is the crate `warpool-cuda`.

pub mod contract;
pub mod decorate;
mod error;
mod id;
mod pages;
pub mod sim;

pub use contract::*;
pub use error::{DriverError, ErrorCode, Result};
pub use id::{
    Address, CaptureId, ConditionalId, DeviceId, DevicePtr, EventId, ForeignStream, FunctionId, GraphExecId, GraphId,
    HandleId, HostPtr, ModuleId, NodeId, PhysicalId, PoolId, RawHandle, StreamId,
};
pub use pages::{ClaimedRange, HostPages, HostRange};
