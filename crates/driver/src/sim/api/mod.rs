//! The contract's traits on the simulated machine, one file per subject, and what replays can set besides.

mod alloc;
mod capture;
mod copy;
mod device;
mod event;
mod graph;
mod host;
mod kernel;
mod library;
mod pause;
mod placement;
mod pool;
mod stream;
mod virtual_memory;

pub use alloc::GRAIN;
pub use library::{Handle, LibraryCall, LibraryLog};
pub use placement::Placements;
pub use virtual_memory::PAGE;
