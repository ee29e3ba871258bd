//! Devices, streams, events, memory, library handles, generators and graphs over any Warpool driver.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//!
//! # fn main() -> warpool::Result<()> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! let device = instance.device(0)?;
//!
//! let producer = device.lease_stream()?; // nobody else has it
//! let consumer = device.pool_stream()?; // shared, handed out in turn
//!
//! let mut done = instance.event(); // made at its first record, reused after its drop
//! done.record(&producer)?;
//! done.wait(&consumer)?; // the consumer's next work waits for the producer's
//!
//! {
//!     let _guard = consumer.enter(); // the current stream of this thread, until the brace
//!     assert_eq!(instance.current_stream()?, consumer);
//! }
//! consumer.synchronize()?;
//! assert!(done.query()?);
//! # Ok(())
//! # }
//! ```
//!
//! - [`Instance`] and [`Device`]: the root. One `Instance` per driver is what a program wants.
//! - [`Stream`]: a name for a queue. Shared ones come from [`Device::pool_stream`], exclusive ones from
//!   [`Device::lease_stream`], foreign ones from [`Stream::external`].
//! - [`Event`]: a mark in a stream. [`PooledEvent`]: the bare kind, for allocators.
//! - What is current is per thread: [`Device::enter`], [`Stream::enter`], [`MultiStreamGuard`].
//! - [`memory`]: allocators, pools, settings. [`handle`] and [`blas`]: handles of libraries, and cuBLAS with its
//!   workspaces. [`generator`]: random numbers. [`graph`]: captures and replays.
//!
//! # Nothing at exit
//! **No destructor in this crate calls the driver.** While a process exits, the driver may be gone already, and a
//! call into it can crash or hang; Rust cannot tell a destructor that this is the moment (thread-local variables of
//! the main thread are dropped right then). So dropping a stream does nothing, dropping a lease or an event puts it
//! back on a shelf, dropping a guard changes this thread's notes, and dropping the last handle of a [`Instance`] leaves
//! streams and events to the driver, which frees them with the device's context. Two calls give things back earlier,
//! by hand: [`EventPool::trim`] and [`Instance::close`]. What a driver does when it is dropped itself is its own affair.
//!
//! # Where it differs from PyTorch
//! The behaviour is that of PyTorch's streams and events, but for this:
//! - A stream's id is the driver's, and says nothing about its kind; PyTorch packs priority and index into it.
//! - The 32 streams of a priority are made at the first use of that priority, not of the device.
//! - An external event follows the stream that it is recorded on or waited for by, not the current one.
//! - Exporting an event names its device, instead of taking the current one. Events have no order of their own.
//! - What is current lives here; the driver's own current device is left alone ([`Device::bind_to_thread`]).
//! - Errors say what to do, in other words than PyTorch's.
//!
//! # Threads
//! Everything but the guards can be sent and shared. Locks here are leaves, and none is held during a driver call,
//! but for the making of a pool's streams at its first use.

#![deny(unsafe_code)]

pub mod blas;
mod capture;
mod error;
pub mod generator;
pub mod graph;
pub mod handle;
mod instance;
mod kernels;
mod launch;
pub mod memory;
mod pool_id;
mod sync;

pub use warpool_driver as driver;

pub use error::{Endpoint, Error, Result};
pub use instance::{
    Device, DeviceGuard, Event, EventOptions, EventPool, Instance, MultiStreamGuard, PRIORITIES_MAX, PooledEvent,
    STREAMS_PER_POOL, Stream, StreamGuard, StreamLease,
};
pub(crate) use sync::lock;

/// Compiles and runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct ReadmeExamples;
