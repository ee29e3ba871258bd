//! Recordings of GPU memory: what a program allocated and freed, and what its allocator did about it.
//!
//! Read are memory snapshots of PyTorch (`torch.cuda.memory._dump_snapshot`), plain or compressed with xz, gzip or
//! zstd, and logs of RMM. What a file is, its content says, not its name. Both become a [`Snapshot`].
//! [`write_snapshot`] writes one, for Python and for PyTorch's viewer.
//!
//! ```
//! use warpool::memory::{Action, MemPoolId, Snapshot, TraceEntry};
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
//! - A file is data. Pickles can run programs when Python loads them; this reader knows no opcode that could, and
//!   refuses all that snapshots do not need, by name and offset.
//! - It reads a stream. Memory grows with events, not with bytes: each event is distilled as soon as it is complete.
//! - All or nothing: what is cut off, damaged or malicious is an error that says where, and no partial result.
//! - Unknown keys are ignored; missing ones have the meaning of the version that leaves them out, and [`Known`] tells.

#![deny(unsafe_code)]

mod error;
mod input;
mod pickle;
pub mod replay;
mod rmm;
mod snapshot;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use warpool::memory::Snapshot;

pub use error::ReadError;
pub use input::{Compression, Progress};
pub use snapshot::write_snapshot;

/// How to read.
#[derive(Clone, Copy, Default)]
pub struct ReadOptions<'a> {
    /// Whether call stacks are kept. They are the larger part of most recordings; left out, they cost nothing.
    pub stacks: bool,
    /// Called now and then with how far reading is.
    pub progress: Option<&'a dyn Fn(Progress)>,
}

/// What was read.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The content.
    pub snapshot: Snapshot,
    /// What kind of file it was.
    pub source: SourceFormat,
    /// How it was compressed.
    pub compression: Option<Compression>,
    /// Bytes of the file.
    pub bytes_read: u64,
    /// Bytes after decompression.
    pub bytes_decompressed: u64,
    /// The time that reading the file and decompressing it took; the rest of the time was spent on its content.
    pub input_time: Duration,
    /// What the file tells.
    pub known: Known,
}

/// Kinds of recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFormat {
    /// A memory snapshot of PyTorch.
    TorchSnapshot,
    /// A log of RMM's `logging_resource_adaptor`.
    RmmLog,
}

/// What a recording tells, and what only looks as if: older versions leave keys out, and a value that stands in for a
/// missing one is no evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// There is a history at all.
    pub traces: bool,
    /// Every entry of the devices' history names its pool. PyTorch 2.11 does not.
    pub trace_pools: bool,
    /// Every entry has a time; else those without have 0.
    pub times: bool,
    /// Every segment names its pool; else those without count as of the default pool.
    pub segment_pools: bool,
    /// Every block says what was asked for; else its history does, or all of it counts as asked for.
    pub requested_sizes: bool,
    /// Every block has an address; else it follows the one before.
    pub block_addresses: bool,
}

impl Known {
    const EVERYTHING: Self = Self {
        traces: true,
        trace_pools: true,
        times: true,
        segment_pools: true,
        requested_sizes: true,
        block_addresses: true,
    };
}

/// Reads a recording from a file.
///
/// # Errors
/// If the file cannot be read, or is not a whole recording: see [`ReadError`].
pub fn read_file(path: impl AsRef<Path>, options: &ReadOptions<'_>) -> Result<Recording, ReadError> {
    let open = |source| ReadError::Open { path: path.as_ref().to_owned(), source };
    let file = File::open(path.as_ref()).map_err(open)?;
    let about = file.metadata().map_err(open)?;
    read_sized(file, about.is_file().then_some(about.len()), options)
}

/// Reads a recording from any reader, to its end.
///
/// # Errors
/// If it cannot be read, or is not a whole recording: see [`ReadError`].
pub fn read(reader: impl Read, options: &ReadOptions<'_>) -> Result<Recording, ReadError> {
    read_sized(reader, None, options)
}

fn read_sized(reader: impl Read, bytes: Option<u64>, options: &ReadOptions<'_>) -> Result<Recording, ReadError> {
    let mut input = input::Input::open(reader, bytes, options.progress).map_err(|error| *error)?;
    recording(&mut input, options).map_err(|error| *error)
}

fn recording(input: &mut input::Input<'_>, options: &ReadOptions<'_>) -> error::Checked<Recording> {
    let (snapshot, source, known) = if input.peek()[0] == pickle::opcode::PROTO {
        let (builder, whole) = pickle::Machine::new(input, snapshot::Builder::new(options.stacks)).run()?;
        let (snapshot, known) = builder.finish(whole).map_err(|wrong| {
            let at =
                if wrong.inside.is_empty() { "the whole" } else { wrong.inside.trim_start_matches('.') }.to_owned();
            Box::new(ReadError::Content { offset: input.offset(), at, what: wrong.what })
        })?;
        (snapshot, SourceFormat::TorchSnapshot, known)
    } else if rmm::looks_like_log(input.peek()) {
        let known = Known { trace_pools: false, ..Known::EVERYTHING };
        (rmm::read(input)?, SourceFormat::RmmLog, known)
    } else {
        return Err(Box::new(ReadError::NotARecording { found: describe(input.peek()) }));
    };
    Ok(Recording {
        snapshot,
        source,
        compression: input.compression(),
        bytes_read: input.bytes_read(),
        bytes_decompressed: input.offset(),
        input_time: input.input_time(),
        known,
    })
}

/// What the first bytes look like.
fn describe(first: &[u8]) -> String {
    let shown = &first[..first.len().min(24)];
    if first.starts_with(b"PK\x03\x04") {
        "it is a zip archive, as torch.save makes them".to_owned()
    } else if let Some(inner) = Compression::of(first) {
        format!("it is {inner} data that was compressed again; unpack it once")
    } else if first.starts_with(b"(dp0\n") || first.starts_with(b"}q\0(") {
        "it is a pickle of protocol 0 or 1, which is too old".to_owned()
    } else if shown.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()) {
        format!("it is text that starts with {:?}", String::from_utf8_lossy(shown))
    } else {
        format!("it starts with the bytes {:02x?}", &shown[..shown.len().min(8)])
    }
}
