//! Graphs: work that is captured once and launched many times.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::driver::{Copies, Pattern};
//! use warpool::graph::{CaptureOptions, Graph, GraphOptions};
//! use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, Settings};
//!
//! # fn main() -> warpool::Result<()> {
//! let sim = Arc::new(SimDriver::new(SimConfig::default()));
//! let instance = Instance::new(sim.clone())?;
//! let device = instance.device(0)?;
//! let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let stream = device.lease_stream()?; // any but the default stream
//! let input = Arc::new(allocator.allocate(1024, &stream)?);
//!
//! let mut graph = Graph::new(&allocator, &device, GraphOptions::default())?;
//! let output = graph.capture(&stream, CaptureOptions::default(), |capture| {
//!     let stream = capture.stream().clone(); // also the thread's current stream
//!     let input = capture.share(Arc::clone(&input))?; // from outside: the graph holds on to it
//!     let between = capture.allocate(1024)?; // from the graph's own pool
//!     let output = capture.allocate(1024)?;
//!     capture.copy(between, input, 1024, &stream)?;
//!     let side = capture.fork()?; // a second stream, side by side with the first
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
//! - [`Graph`] has three stages: new, capturing, captured. [`Graph::reset`] and a failed capture lead back to new.
//! - [`Graph::capture`] is the way to capture: a scope, [`Capture`], that cannot be left half done.
//!   [`Graph::capture_begin`] and [`Graph::capture_end`] are the bare pair for callers from other languages;
//!   [`Graph::scope`] gives them the same scope in between.
//! - Memory: what is asked for on streams of a capture comes from the graph's pool, be it by the scope, a library or
//!   the program's own allocations. What the *scope* gives or takes ([`Capture::allocate`], [`Capture::keep`],
//!   [`Capture::share`]) the graph owns until it is reset or dropped, and lends by [`BufferKey`]. Blocks that are
//!   allocated past the scope are their owner's: freed in the capture, their memory serves the rest of it; freed later,
//!   it stays in the pool.
//! - Pinned host memory: [`Capture::allocate_host`], [`Capture::keep_host`] and [`Capture::share_host`] give it to the
//!   graph, by [`HostKey`], for copies and kernels. A pinned block that is used in a capture past the scope, and says
//!   so ([`HostBlock::record_use`](crate::memory::HostBlock::record_use)), is the graph's from there on too.
//! - [`Capture::if_node`] and [`Capture::while_node`]: bodies that run depending on a [`Flag`] in device memory.
//! - [`Instance::polling`](crate::Instance::polling): for threads that ask about events while others capture.
//! - [`GraphedCallable`]: a function with one graph per shape, and a way without one.
//!
//! # Life of a capture
//! 1. Everything is checked that can be. What dropped graphs left on the driver is cleared up.
//! 2. The pool is made or retained; requests for the stream are routed to it; the allocator and the registry count the
//!    capture. From here on nobody marks the stream.
//! 3. Pollers are waited for; then the driver's capture begins, is asked for its id, and routing goes by that: streams
//!    that join the capture get the pool too.
//! 4. Work is put into streams. Libraries and generators find the graph by the stream's capture, and leave there what
//!    it will need.
//! 5. The driver's capture ends. Routing, counts and the registry's entry end with it, whatever the driver said.
//! 6. If all went well, the template is made ready, and kept or destroyed. If not, everything that the capture had
//!    goes, and the graph is as new.
//!
//! # Where it differs from PyTorch
//! - A graph that was captured can be captured again after a reset, and so can one whose capture failed, at once.
//! - A graph owns what its scope was given. PyTorch leaves it to the program to keep inputs and outputs alive.
//! - Replays on several streams, and graphs that go while they run, are safe for the memory that a graph owns and for
//!   its own pool, with growing segments too: the allocator is told of each stream at the first replay there.
//! - Waiting for threads that poll, which PyTorch once had, is here, with guards instead of counters, and can be given
//!   up.
//! - Dropping a graph calls no driver; what is left is destroyed by the next capture or reset on the device.
//! - Random numbers in the body of a conditional node are an error when they are drawn, not when the body ends.
//! - `graph_capture_record_stream_reuse` and conditional nodes can be used together.

mod begin;
mod buffers;
mod callable;
mod capture;
mod conditional;
mod end;
#[expect(clippy::module_inception, reason = "the graph is what the module is about")]
mod graph;
mod graphed;
mod host;
mod options;
mod replay;
mod shelf;

pub use crate::capture::Polling;
pub use crate::error::GraphError;
pub use buffers::{BufferAt, BufferKey, GeneratorSlot, GraphArg};
pub use callable::{Answer, Call, Callable, Fallback, Input};
pub use capture::{Capture, Fork};
pub use conditional::Flag;
pub use graph::Graph;
pub use graphed::{GraphReport, GraphedCallable, GraphedOptions};
pub use host::{HostAt, HostKey, Place};
pub use options::{CaptureOptions, GraphOptions, capture_mode};
pub(crate) use shelf::GraphShelf;
