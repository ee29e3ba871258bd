//! Answers about recordings for Python: `libwarpool_answers.so`, which `python/warpool/_library.py` loads with ctypes.
//! No CUDA and no Python in it, so one build serves every Python of a platform.
//!
//! A caller makes a *call* ([`abi`]), runs it with a request, reads the answer and frees it. Requests and answers are
//! JSON, those of [`warpool_report::request`]; recordings are paths, or bytes in memory.
//!
//! # Guarantees to callers
//! - A call may be run on any thread, and many at once. While it runs, other threads may ask for its progress, or stop
//!   it; nothing calls back into Python.
//! - No panic crosses the boundary: it becomes an error, as everything that is wrong with a request or a recording.
//! - There is no global state and no thread that outlives a call, so a process may fork between calls.

pub mod abi;
