//! The contract's traits on the simulated driver, one file per subject, and the controls that replays and tests use
//! besides.

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
mod range_check;
mod registration;
mod stream;
mod suballocation;
mod virtual_memory;
