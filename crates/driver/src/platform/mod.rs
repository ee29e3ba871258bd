//! What targets have and others lack: a clock, anonymous memory mappings, file descriptors, process ids, `fork`,
//! words that processes share. The rest of the crates compiles for every target without conditions, a browser
//! (`wasm32-unknown-unknown`) included.
//!
//! Where something is missing, this module has the nearest thing that keeps the promise of its documentation; nothing
//! here panics.

mod clock;
#[doc(hidden)]
pub mod descriptor;
mod mapping;
#[cfg(feature = "sim")]
mod nameless_file;
mod process;
mod shared_words;

pub use clock::Instant;
pub use descriptor::OwnedFd;
pub(crate) use mapping::Mapping;
#[cfg(feature = "sim")]
pub(crate) use nameless_file::{contents, descriptor_of};
#[cfg(feature = "sim")]
pub(crate) use process::id as process_id;
pub(crate) use process::in_forked_child;
pub use shared_words::{Opened, SharedWords, private_directory, shared_memory_directory, user_id};
