//! Stream captures: the capture status of streams, the active captures, and the objects that each has used.
//!
//! This module is below memory, generators and graphs, which all use it, and depends on none of them. Beginning and
//! ending a capture is in [`graph`](crate::graph).

mod capture_safe;
mod pollers;
mod polling;
mod registry;
mod relaxed;

pub(crate) use crate::capture_status::CaptureStatus;
pub(crate) use crate::sync::{FrozenCaptures, FrozenForCall};
pub(crate) use capture_safe::CaptureSafe;
pub use polling::Polling;
pub(crate) use polling::guards_of_thread;
pub(crate) use registry::{CaptureRecord, CaptureSlots, StreamCapture};
pub(crate) use relaxed::RelaxedMode;
