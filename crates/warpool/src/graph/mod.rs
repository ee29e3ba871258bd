//! CUDA graphs: work that is captured once and launched many times.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::driver::{Copies, Pattern};
//! use warpool::graph::{CaptureOptions, Graph, GraphOptions};
//! use warpool::memory::{Allocate, CachingAllocator, Settings};
//!
//! # fn main() -> warpool::Result<()> {
//! let sim = Arc::new(SimDriver::new(SimConfig::default()));
//! let instance = Instance::new(sim.clone())?;
//! let device = instance.device(0)?;
//! let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let stream = device.lease_stream()?; // any but the default stream
//! let input = Arc::new(allocator.allocate(1024, &stream)?);
//!
//! let mut graph = Graph::new(&allocator, &device, GraphOptions::default())?;
//! let output = graph.capture(&stream, CaptureOptions::default(), |capture| {
//!     let stream = capture.stream().clone(); // also the thread's current stream
//!     let input = capture.share(Arc::clone(&input))?; // allocated outside: the graph keeps it alive
//!     let between = capture.allocate(1024)?; // from the graph's own pool
//!     let output = capture.allocate(1024)?;
//!     capture.copy(between, input, 1024, &stream)?;
//!     let side = capture.fork()?; // a second stream, in parallel with the first
//!     capture.copy(output, between, 512, &side)?;
//!     capture.copy(output.at(512), between.at(512), 512, &stream)?;
//!     capture.join(side)?;
//!     Ok(output)
//! })?;
//!
//! for round in 1..=3 {
//!     sim.fill(input.ptr(), Pattern::U8(round), 1024, stream.id())?;
//!     graph.replay(&stream)?; // one driver call
//!     stream.synchronize()?;
//!     let mut bytes = [0; 1024];
//!     sim.download(device.id(), graph.buffer(output)?.ptr(), &mut bytes)?;
//!     assert_eq!(bytes, [round; 1024]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::driver::Pattern;
//! use warpool::graph::{Call, CallOutcome, Callable, CaptureOptions, Fallback, Flag, Graph, GraphArg, GraphOptions};
//! use warpool::graph::{GraphReport, GraphedCallable, GraphedOptions, HostKey, Input, Polling};
//! use warpool::memory::DeviceBlock;
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! // A body that runs if a byte is not 0, and pinned memory in a graph.
//! let host = HostAllocator::new(&instance, Settings::default().pinned);
//! let mut graph = Graph::new(&allocator, &device, GraphOptions::default())?;
//! graph.capture(&stream, CaptureOptions::default(), |capture| {
//!     let flag = capture.allocate(1)?;
//!     let pinned: HostKey = capture.allocate_host(&host, 64)?;
//!     let stream = capture.stream().clone();
//!     capture.fill(flag, Pattern::U8(1), 1, &stream)?;
//!     let arguments = [GraphArg::from(flag), GraphArg::from(pinned), GraphArg::from(1_u32)]; // for `Capture::launch`
//!     assert_eq!(arguments.len(), 3);
//!     capture.if_node(Flag::byte(flag), |body| {
//!         let stream = body.stream().clone();
//!         body.fill(flag, Pattern::U8(0), 1, &stream)
//!     })
//! })?;
//! graph.replay(&stream)?;
//!
//! // One graph per shape, and calls without one if none fits.
//! struct Zeros;
//!
//! impl Callable for Zeros {
//!     type Shape = u64;
//!
//!     fn input_bytes(&self, shape: &u64) -> Vec<u64> {
//!         vec![*shape]
//!     }
//!
//!     fn run(&self, call: &Call<'_, u64>) -> warpool::Result<Vec<DeviceBlock>> {
//!         let output = call.allocator().allocate(*call.shape(), call.stream())?;
//!         call.stream().instance().driver().fill(output.ptr(), Pattern::U8(0), output.bytes(), call.stream().id())?;
//!         Ok(vec![output])
//!     }
//! }
//!
//! let mut zeros = GraphedCallable::new(&allocator, &device, Zeros, [256, 1024], GraphedOptions::default())?;
//! let reports: &[GraphReport<u64>] = zeros.reports();
//! assert!(reports.iter().all(|report| report.failed.is_none()));
//! let input = allocator.allocate(256, &stream)?;
//! # instance.driver().fill(input.ptr(), Pattern::U8(1), 256, stream.id())?;
//! assert_eq!(zeros.call(&256, &[Input::from(&input)], &stream)?.replayed(), Some(&256));
//! let larger = allocator.allocate(300, &stream)?;
//! let outcome: CallOutcome<'_, u64> = zeros.call(&300, &[Input::from(&larger)], &stream)?;
//! assert_eq!(outcome.fallback(), Some(&Fallback::NoSuchShape));
//!
//! // A thread that queries events while others capture says so.
//! let polling: Polling = instance.polling();
//! # Ok(())
//! # }
//! ```
//!
//! - A [`Graph`] has three stages: new, capturing, captured. [`Graph::reset`] and a failed capture make it new again.
//! - [`Graph::capture`] captures in a scope, [`Capture`], that cannot be left incomplete. [`Graph::capture_begin`] and
//!   [`Graph::capture_end`] are for callers from other languages; [`Graph::scope`] gives these the same scope in
//!   between.
//! - Memory that is requested on streams of a capture comes from the graph's pool, whether by the scope, a library or
//!   the program's own allocations. The graph owns what the *scope* allocates or takes ([`Capture::allocate`],
//!   [`Capture::keep`], [`Capture::share`]) until it is reset or dropped; it is accessed by [`BufferKey`]. Blocks that
//!   are allocated without the scope belong to the program: if they are freed in the capture, their memory is reused in
//!   it; if they are freed later, it stays in the pool.
//! - Pinned host memory: [`Capture::allocate_host`], [`Capture::keep_host`] and [`Capture::share_host`] give it to the
//!   graph, by [`HostKey`], for copies and kernels. A pinned block that is used in a capture without the scope, and
//!   whose use is recorded ([`HostBlock::record_use`](crate::memory::HostBlock::record_use)), is kept by the graph too.
//! - [`Capture::if_node`] and [`Capture::while_node`]: bodies that run depending on a [`Flag`] in device memory.
//! - [`Instance::polling`](crate::Instance::polling): for threads that query events while others capture.
//! - [`GraphedCallable`]: a function with one graph per shape, and a fallback without one.
//!
//! # Life of a capture
//! 1. Everything that can be checked is checked. Driver objects of dropped graphs are destroyed.
//! 2. The pool is created or retained; requests for the stream are routed to it; the allocator and the `Instance` count
//!    the capture. From now on no allocator records an event in the stream.
//! 3. The call waits for polling guards; then the driver's capture begins, and requests are routed by its id: requests
//!    of streams that join the capture go to the pool too.
//! 4. Work is enqueued in streams. Libraries and generators look up the capture of a stream, and store objects that the
//!    graph needs there.
//! 5. The driver's capture ends. Routing, counts and the registry's entry end with it, even if the driver failed.
//! 6. On success, the template is instantiated, and kept or destroyed. On failure, everything that the capture held is
//!    freed, and the graph is as new.
//!
//! # Differences from PyTorch
//! - A captured graph can be captured again after a reset; after a failed capture, no reset is needed.
//! - A graph owns the memory that its scope was given. In PyTorch the program must keep inputs and outputs alive.
//! - Replays on several streams, and graphs that are dropped while they run, are safe for the memory that a graph owns
//!   and for its own pool, including expandable segments: a graph records the streams on which its replays may be under
//!   way, and its memory waits for them when it is dropped.
//! - A capture waits for threads that poll, as PyTorch once did, but with guards instead of counters, and with a
//!   timeout.
//! - Dropping a graph makes no driver call; its driver objects are destroyed by the next capture or reset on the
//!   device.
//! - Random numbers in the body of a conditional node are an error when they are drawn, not when the body ends.
//! - `graph_capture_record_stream_reuse` and conditional nodes can be used together.

mod args;
mod begin;
mod buffers;
mod call_outcome;
mod callable;
mod capture;
mod capture_host;
mod captured;
mod conditional;
mod end;
#[expect(clippy::module_inception, reason = "the type that the module is about")]
mod graph;
mod graphed_callable;
mod keys;
mod open_capture;
mod options;
mod registration;
mod replay;
mod replay_streams;
mod retired;
mod step;

pub use crate::capture::Polling;
pub use crate::error::GraphError;
pub use crate::generator::GeneratorSlot;
pub use args::GraphArg;
pub use call_outcome::{CallOutcome, Fallback};
pub use callable::{Call, Callable, Input};
pub use capture::{Capture, Fork};
pub use conditional::Flag;
pub use graph::Graph;
pub use graphed_callable::{GraphReport, GraphedCallable, GraphedOptions};
pub use keys::{BufferKey, BufferOffset, CopyEndpoint, HostKey, HostOffset};
pub use options::{CaptureOptions, GraphOptions, capture_mode};
pub use step::Step;
