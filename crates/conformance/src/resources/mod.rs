//! Checks over Warpool's resources on any driver: one file per subject.

pub(crate) mod allocator;
pub(crate) mod blas;
pub(crate) mod contents;
pub(crate) mod current;
pub(crate) mod elastic;
pub(crate) mod events;
pub(crate) mod external;
pub(crate) mod generator;
pub(crate) mod graph;
mod graph_clients;
mod graph_failures;
pub(crate) mod handles;
mod helpers;
pub(crate) mod paged;
pub(crate) mod pinned;
pub(crate) mod share;
pub(crate) mod sleep;
pub(crate) mod stable;
pub(crate) mod streams;
