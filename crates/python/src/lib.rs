//! Answers about recordings for Python: `libwarpool_answers.so`, which `python/warpool/_library.py` loads with ctypes.
//! No CUDA and no Python in it, so one build serves every Python of a platform.
//!
//! A caller makes a *call* ([`abi`]), runs it with a request, reads the answer and frees it. The request is JSON: a
//! command (`explain`, `replay`, `tune`, `diff`, `view`) and its options, named as those of the command line;
//! recordings are paths, or bytes in memory. The answer is JSON with the same objects as the command's `--json`, and
//! for pages also HTML.
//!
//! # Guarantees to callers
//! - A call may be run on any thread, and many at once. While it runs, other threads may ask for its progress, or stop
//!   it; nothing calls back into Python.
//! - No panic crosses the boundary: it becomes an error, as everything that is wrong with a request or a recording.
//! - There is no global state and no thread that outlives a call, so a process may fork between calls.

pub mod abi;
mod answer;
mod call;
mod command;
mod error;
mod input;
mod options;
mod work;

pub use call::Call;
pub use error::Error;
pub use input::Source;
pub use work::{Stage, Work};
