//! Work: what streams and graphs do, when it runs, and its effect.
//!
//! `Streams` keeps the queues and the order between them, `Scheduler` the virtual time at which work ends, `execute`
//! the effect of work on memory. An operation takes effect when the virtual time reaches its end.

mod event;
mod exec_graph;
mod execute;
mod host_code;
mod item;
mod launch;
mod scheduler;
mod stream;
mod streams;
mod timelines;

pub use event::{Event, EventState};
pub use exec_graph::ExecGraph;
pub use execute::execute;
pub use host_code::{in_host_code, run_host_code};
pub use item::{KernelWork, Template, TemplateNode, Work, frees, topology};
pub use launch::{Launch, ReplacedKernel, ReplacedKernels};
pub use scheduler::{DueWork, ReturnedCallback, Scheduler, Step};
pub use stream::{StreamKind, StreamPoint};
pub use streams::AwaitedStream;
