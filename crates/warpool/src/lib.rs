//! GPU resources over any Warpool driver: device memory, pinned memory, streams, events, library handles, random number
//! generators and CUDA graphs, with the behaviour of PyTorch's and without its global state. Runs on CUDA or on the
//! simulated GPU of [`driver::sim`].
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
//! let producer = device.lease_stream()?; // exclusive until dropped
//! let consumer = device.pool_stream()?; // shared, round-robin
//!
//! let mut done = instance.event(); // created at its first record, reused after its drop
//! done.record(&producer)?;
//! done.wait(&consumer)?; // the consumer's later work waits for the producer's
//!
//! {
//!     let _guard = consumer.enter(); // the current stream of this thread, in this scope
//!     assert_eq!(instance.current_stream()?, consumer);
//! }
//! consumer.synchronize()?;
//! assert!(done.query()?);
//! # Ok(())
//! # }
//! ```
//!
//! - [`Instance`] and [`Device`]: the root objects. A program needs one `Instance` per driver.
//! - [`Stream`]: shared ones come from [`Device::pool_stream`], exclusive ones from [`Device::lease_stream`], streams
//!   of other libraries from [`Stream::external`].
//! - [`Event`]: a point in a stream. [`PooledEvent`]: without options, for allocators.
//! - Current device and stream are per thread: [`Device::enter`], [`Stream::enter`], [`MultiStreamGuard`].
//! - [`prelude`]: the names that most programs use.
//! - [`memory`]: allocators, pools, settings. [`handle`] and [`blas`]: library handles, and cuBLAS with its workspaces.
//!   [`generator`]: random numbers. [`graph`]: captures and replays. [`share`]: what other processes see of this one.
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::{Endpoint, EventPool, MultiStreamGuard, PRIORITIES_MAX, STREAMS_PER_POOL};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! let streams = [device.pool_stream()?, device.high_priority_stream()?]; // of 32 each
//! assert_eq!((STREAMS_PER_POOL, PRIORITIES_MAX), (32, 4));
//! {
//!     let _guard = MultiStreamGuard::enter(&streams[..1]); // one for each of several devices
//!     assert_eq!(device.current_stream()?, streams[0]);
//! }
//!
//! let pool: EventPool = device.event_pool();
//! pool.reserve(2)?;
//! let mut event = pool.take()?;
//! event.record(&streams[1])?;
//! event.synchronize()?;
//!
//! let (mut start, end) = (instance.timing_event(), instance.timing_event());
//! start.record(&streams[0])?;
//! let error = start.elapsed_ms(&end).unwrap_err();
//! assert_eq!(error, warpool::Error::ElapsedNotRecorded { which: Endpoint::End });
//! # Ok(())
//! # }
//! ```
//!
//! # No driver calls in destructors
//! **Dropping a value of this crate makes no driver call.** While a process exits, the driver may be unloaded already,
//! and a call into it can crash or hang; a destructor cannot detect that (thread-local variables of the main thread are
//! destroyed at that time). So dropping a stream does nothing, dropping a lease or an event returns it to its pool,
//! dropping a guard changes a thread-local variable or a counter, and dropping the last handle of an [`Instance`]
//! leaves streams and events to the driver, which frees them with the device's context. To destroy them earlier there
//! are [`EventPool::trim`] and [`Instance::close`].
//!
//! What a destructor may still do:
//! - It reads the driver's clock if a history is recorded, and reports freed blocks to a driver that tracks
//!   suballocations. `warpool-cuda` makes no CUDA call for either.
//! - It runs user code: observers, decorators, the destructor of an upstream. These may make driver calls, and so may
//!   the driver's own destructor.
//! - One private guard calls the driver: it restores the thread's capture mode. It exists only inside a call, on the
//!   stack.
//!
//! # Differences from PyTorch
//! Streams and events behave like PyTorch's, except:
//! - A stream's id is the driver's, and does not encode its kind; PyTorch packs priority and index into it.
//! - The 32 streams of a priority are created at the first use of that priority, not of the device.
//! - An external event depends on the stream that records it or waits for it, not on the current one.
//! - Exporting an event names its device, instead of using the current one. Events are not ordered by `<`.
//! - The current device and stream are stored here; the driver's current device is not changed
//!   ([`Device::bind_to_thread`]).
//! - Error messages say what to do, and differ from PyTorch's.
//!
//! # Threads
//! Everything except the guards can be sent and shared between threads. The locks of streams and events are leaves:
//! none is held during a driver call, except while the streams of a pool are created at its first use.

#![deny(unsafe_code)]

pub mod blas;
mod capture;
mod capture_status;
mod defect;
mod error;
pub mod generator;
pub mod graph;
pub mod handle;
mod instance;
mod kernels;
mod launch;
mod ledger;
pub mod memory;
mod pool_id;
pub mod share;
mod steps;
mod sync;
pub mod typed;
mod unwind;

/// The names that most programs use.
///
/// ```
/// use std::sync::Arc;
/// use warpool::driver::sim::{SimConfig, SimDriver};
/// use warpool::prelude::*;
///
/// # fn main() -> warpool::Result<()> {
/// let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
/// let stream = instance.device(0)?.lease_stream()?;
/// let values = DeviceVec::from_slice(&allocator, &[1, 2, 3], &stream)?;
/// assert_eq!(values.to_vec(&stream)?, [1, 2, 3]);
/// # Ok(())
/// # }
/// ```
pub mod prelude {
    pub use crate::memory::{Allocate, CachingAllocator, DeviceAllocator, HostAllocator, Settings};
    pub use crate::{Device, DeviceVec, Instance, PinnedVec, Stream};
}

pub use warpool_driver as driver;

#[doc(hidden)]
pub use steps::steps_taken;

pub use error::{Endpoint, Error, Result};
pub use instance::{
    Device, DeviceGuard, Event, EventOptions, EventPool, Instance, MultiStreamGuard, PRIORITIES_MAX, PooledEvent,
    STREAMS_PER_POOL, Stream, StreamGuard, StreamLease,
};
pub(crate) use sync::lock;
pub use typed::{DeviceVec, ElasticVec, PinnedVec};

/// Compiles and runs the example of the package's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct PackageReadme;

/// The same for the repository's README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct ReadmeExamples;

/// The same for `docs/rust.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/rust.md")]
struct RustExamples;

/// The same for `docs/registered.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/registered.md")]
struct RegisteredExamples;

/// The same for `docs/sharing.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/sharing.md")]
struct SharingExamples;

/// The same for `docs/simulated-gpu.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/simulated-gpu.md")]
struct SimulatedGpuExamples;
