//! The simulated GPU: a driver without hardware that implements the contract and detects hazards.
//!
//! - **Memory** has addresses and contents. Terabytes can be reserved and whole devices allocated; a page costs memory
//!   once it is written.
//! - **Work completes later.** A stream is a queue; each operation has a duration, from the cost model and the seed,
//!   and takes effect when the virtual time reaches its end. Virtual time passes only in calls: each takes time, and a
//!   wait advances it. Nothing happens between calls, so a program that waits for a host callback must wait through
//!   the driver.
//! - **Host code.** A host callback runs on the thread in whose call it becomes due; it must not wait for anything that
//!   this thread does later. A panic in the host implementation of a kernel is a failed assertion of the device: it
//!   breaks the device, and later calls return the error. A panic in a host callback ends that callback only.
//! - **Order** is tracked with vector clocks, independently of time. Streams, events, default-stream rules, graphs and
//!   waits of the host order operations; all others are unordered, even if virtual time happened to separate them.
//! - **The hazard log** lists accesses that no order protects ([`SimDriver::hazards`]). Each access is compared with
//!   the last write to its bytes and the reads since, so one of several conflicts over the same bytes may hide another:
//!   fix it, run again, and the next is reported. All host threads count as one: what one has waited for is ordered for
//!   all. So missing synchronization between host threads is not detected, but nothing is reported that is ordered.
//! - **Captures and graphs** follow CUDA's rules, as measured on an H200; replays have their effects.
//! - **Replays** can choose addresses ([`SimDriver::place_next_alloc`]) and when work completes
//!   ([`SimDriver::pause_stream`]).
//! - The same seed and the same calls give the same run.
//!
//! ```
//! use warpool_driver::sim::{HazardKind, SimConfig, SimDriver};
//! use warpool_driver::*;
//!
//! # fn main() -> Result<()> {
//! let gpu = SimDriver::new(SimConfig::default());
//! let device = DeviceId(0);
//! let one = gpu.stream_create(device, StreamOptions::default())?;
//! let two = gpu.stream_create(device, StreamOptions::default())?;
//! let memory = gpu.mem_alloc(device, 1 << 20)?;
//! gpu.fill(memory, Pattern::U8(1), 1 << 20, one)?;
//! gpu.fill(memory, Pattern::U8(2), 1 << 20, two)?; // without waiting for the first
//! gpu.device_synchronize(device)?;
//! assert_eq!(gpu.hazards()[0].kind, HazardKind::Race);
//! # Ok(())
//! # }
//! ```
//!
//! Devices, times and latencies are settings, and what happened can be asked:
//! ```
//! use warpool_driver::sim::{
//!     HazardRange, Latencies, Latency, LibraryCall, ObjectCounts, RangeBase, RemapCounts, SimConfig, SimDevice,
//!     SimDriver, Timing,
//! };
//! use warpool_driver::*;
//!
//! # fn main() -> warpool_driver::Result<()> {
//! let mut config = SimConfig::default().with_seed(7).with_timing(Timing::Model);
//! let by_size = Latency::BySize(vec![(0, 2_000), (1 << 30, 90_000)]); // nanoseconds
//! config.latencies = Latencies::flat(1_000).with(Call::MemAlloc, by_size);
//! let first: &mut SimDevice = &mut config.devices[0];
//! first.bytes_context = 1 << 20;
//! let gpu = SimDriver::new(config);
//! let device = DeviceId(0);
//!
//! let memory = gpu.mem_alloc(device, 1 << 20)?;
//! let blas = gpu.library_create(Library::Blas, device)?;
//! let made: Vec<LibraryCall> = gpu.library_calls(blas);
//! assert!(matches!(made[..], [LibraryCall::Created { .. }]));
//! let counts: ObjectCounts = gpu.object_counts();
//! assert_eq!((counts.allocations, counts.handles), (1, 1));
//! let remapped: RemapCounts = gpu.remap_counts(); // of physical memory that was mapped again
//! assert_eq!(remapped.mappings, 0);
//!
//! let stream = gpu.stream_create(device, StreamOptions::default())?;
//! gpu.fill(memory, Pattern::U8(1), 64, stream)?;
//! gpu.fill(memory, Pattern::U8(2), 64, gpu.stream_create(device, StreamOptions::default())?)?;
//! gpu.device_synchronize(device)?;
//! let hazards = gpu.hazards();
//! let range: &HazardRange = hazards[0].range.as_ref().expect("it was an access");
//! assert_eq!((range.base, range.bytes), (RangeBase::Address, 64));
//! # Ok(())
//! # }
//! ```
//!
//! Inside, imports go one way: `api` (the contract's traits) uses `driver` (the lock, waits) and `state`; these use
//! `objects` (captures, graphs, modules, handles), `work` (streams, scheduling, execution), `memory` and `order`.

mod api;
mod config;
mod cost;
mod driver;
mod memory;
mod object_counts;
mod objects;
mod order;
mod refuse;
mod rng;
mod state;
mod steps;
mod table;
mod work;

pub use config::{SimConfig, SimDevice, Timing};
pub use cost::{Latencies, Latency, WorkCosts};
pub use driver::SimDriver;
pub use memory::RemapCounts;
pub use object_counts::ObjectCounts;
pub use objects::LibraryCall;
pub use order::{Hazard, HazardKind, HazardRange, RangeBase};
#[doc(hidden)]
pub use steps::steps_taken;
