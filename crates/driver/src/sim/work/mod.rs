//! Work: what streams and graphs do, when it runs, and what it does then.

mod exec_graph;
mod execute;
mod item;
mod launch;
mod scheduler;
pub mod sgemm;

pub use exec_graph::{ExecGraph, Template, TemplateNode, topology};
pub use execute::Scene;
pub use item::{CapturedCallbacks, KernelWork, Op, Work};
pub use launch::{Kernels, Launch, NewKernel};
pub use scheduler::{Callback, Due, Lane, Runner};
