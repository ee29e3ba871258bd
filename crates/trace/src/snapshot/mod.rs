//! Memory snapshots of PyTorch: built from the values of a pickle, and written.

mod accounts;
mod annotations;
mod builder;
mod convert;
mod entries;
mod fields;
mod invalid;
mod lists;
mod renumber;
pub(crate) mod schema;
mod segments;
mod settings;
mod stacks;
mod texts;
mod write;

pub(crate) use builder::Builder;
pub use fields::RecordedFields;
pub(crate) use invalid::Invalid;
pub use write::write_snapshot;
