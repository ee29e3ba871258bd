//! Memory snapshots of PyTorch: read from the pickle machine's values, and written.

mod build;
mod convert;
mod finish;
mod record;
pub(crate) mod schema;
mod stacks;
mod texts;
mod write;

pub(crate) use build::{Builder, Wrong};
pub(crate) use schema::Word;
pub use write::write_snapshot;
