//! Driver objects besides streams, events and memory: captures, graphs, modules, library handles.

mod call;
mod captured_callbacks;
mod captures;
mod graphs;
mod libraries;
mod modules;
pub mod sgemm;
mod signature;

pub use call::CurrentCall;
pub use captures::{Captures, Conditional};
pub use graphs::{Exec, Graphs};
pub use libraries::{Handle, Libraries, LibraryCall};
pub use modules::Modules;
