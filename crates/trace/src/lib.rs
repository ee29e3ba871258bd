//! Recordings of GPU memory: what a program allocated and freed, and what its allocator did.
//!
//! Reads memory snapshots of PyTorch (`torch.cuda.memory._dump_snapshot`) and logs of RMM, as a
//! [`Snapshot`](warpool::memory::report::Snapshot): plain, compressed with xz, gzip, zstd or bzip2, or in a zip archive
//! (which `torch.save` writes) or tar archive. [`write_snapshot`] writes one, for Python and for PyTorch's viewer.
//! [`replay`] replays a recording on the simulated GPU and answers what-if questions.
//!
//! ```
//! use warpool::memory::MemPoolId;
//! use warpool::memory::report::{Action, Snapshot, TraceEntry};
//! use warpool_trace::{ReadOptions, read, write_snapshot};
//!
//! let mut alloc = TraceEntry::new(Action::Alloc, 0x7f00_0000_0000, 4096, 0, 17);
//! alloc.pool = Some(MemPoolId::DEFAULT);
//! let snapshot = Snapshot { traces: vec![vec![alloc]], ..Snapshot::default() };
//!
//! let mut file = Vec::new();
//! write_snapshot(&snapshot, &mut file)?;
//! let recording = read(file.as_slice(), &ReadOptions::default())?;
//! assert_eq!(recording.snapshot, snapshot);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules
//! - A file is data. A pickle can run programs when Python loads it; this reader implements no opcode that could, and
//!   refuses all that snapshots do not use, by name and offset.
//! - Reading is streaming: memory grows with the number of events, not with the size of the file. Memory is limited to
//!   [`ReadOptions::memory_limit`], or else to a multiple of the bytes read ([`default_memory_limit`]); the same holds
//!   for a replay. Beyond the limit there is an error.
//! - All or nothing: a file that is cut off, damaged or malicious is an error that says where, without a partial
//!   result.
//! - Unknown keys are ignored. Missing ones have the meaning of the version that leaves them out; [`RecordedFields`]
//!   says which are there.

#![deny(unsafe_code)]

mod budget;
pub mod bytes_text;
pub mod cards;
mod category;
pub mod diff;
pub mod explain;
#[doc(hidden)]
pub mod growth;
pub mod parallel;
mod pickle;
mod printable;
pub mod ranks;
mod read;
pub mod replay;
pub mod requests;
mod snapshot;
pub mod stacks;
mod steps;
mod stop;
pub mod timeline;
pub mod tune;

pub use budget::default_memory_limit;
pub use category::{Category, CategoryBytes, Rule};
pub use read::{Archive, Compression, Progress, ReadError, ReadOptions, Recording, RecordingFormat, read, read_file};
pub use snapshot::{RecordedFields, write_snapshot};
#[doc(hidden)]
pub use steps::steps_taken;
pub use stop::Stop;
