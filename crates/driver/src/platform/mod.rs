//! What targets have and others lack: a clock, anonymous memory mappings, file descriptors, process ids, `fork`. The
//! rest of the crates compiles for every target without conditions, a browser (`wasm32-unknown-unknown`) included.
//!
//! Where something is missing, this module has the nearest thing that keeps the promise of its documentation; nothing
//! here panics.

mod clock;
#[doc(hidden)]
pub mod descriptor;
mod mapping;
mod process;

pub use clock::Instant;
pub use descriptor::OwnedFd;
pub(crate) use descriptor::{contents, descriptor_of};
pub(crate) use mapping::Mapping;
pub(crate) use process::{id as process_id, in_forked_child};
