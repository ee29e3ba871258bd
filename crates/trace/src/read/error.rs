//! Why a recording cannot be read.
//! Offsets count decompressed bytes, as other tools do for the same pickle.

use std::io;
use std::path::PathBuf;

use super::archive::Archive;
use super::compression::Compression;
use crate::budget::Budget;
use crate::snapshot::Invalid;

/// Why a recording could not be read. No partial recording is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file cannot be opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Reading failed.
    #[error("reading failed after {offset} bytes: {source}")]
    Io {
        /// How much had been read.
        offset: u64,
        /// The error of the system.
        source: io::Error,
    },
    /// The input has no bytes.
    #[error("the input is empty: check that the recording was written completely")]
    Empty,
    /// The input is not a recording.
    #[error(
        "not a recording: {found}; expected a PyTorch memory snapshot (a pickle of protocol 2 to 5) or an RMM log that \
         starts with `Thread,Time,Action,Pointer,Size,Stream`, plain, compressed with xz, gzip, zstd or bzip2, or in a \
         zip or tar archive"
    )]
    NotARecording {
        /// What it seems to be.
        found: String,
    },
    /// The compressed data is damaged or ends early.
    #[error(
        "the {compression} data is damaged or cut off after {offset} decompressed bytes ({source}): copy the file again"
    )]
    Compressed {
        /// How it is compressed.
        compression: Compression,
        /// The decompressed bytes before the damage.
        offset: u64,
        /// The error of the decompressor.
        source: io::Error,
    },
    /// The archive is damaged, or not exactly one of its files is a recording.
    #[error("the {archive} archive cannot be read: {what}")]
    Archive {
        /// The kind of archive.
        archive: Archive,
        /// What is wrong, and what to do.
        what: String,
    },
    /// The recording in an archive could not be read.
    #[error("`{name}` in the {archive} archive: {source}")]
    Member {
        /// The kind of archive.
        archive: Archive,
        /// The name of the file in it.
        name: String,
        /// What is wrong with it.
        source: Box<ReadError>,
    },
    /// The data ends early.
    #[error("cut off at byte {offset}, in the middle of {within}: copy the file again, or record again")]
    Truncated {
        /// Where it ends.
        offset: u64,
        /// What was being read.
        within: &'static str,
    },
    /// The pickle has an opcode that snapshots do not use. Such a pickle may run programs when Python loads it.
    #[error(
        "refused at byte {offset}: the pickle opcode {opcode} is not used by memory snapshots; take the snapshot with \
         torch.cuda.memory._dump_snapshot, or pickle only its plain dict"
    )]
    Opcode {
        /// The offset of the opcode.
        offset: u64,
        /// Its name.
        opcode: String,
    },
    /// The pickle is not well formed.
    #[error("damaged pickle at byte {offset}: {what}")]
    Pickle {
        /// The offset of the opcode that fails.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// The pickle is well formed, but not a snapshot.
    #[error("not a valid snapshot: {at}: {what} (byte {offset})")]
    Content {
        /// The offset at which it showed.
        offset: u64,
        /// The position in the snapshot, as in `device_traces[0][17]`.
        at: String,
        /// What is wrong there.
        what: String,
    },
    /// Reading needs more memory than allowed: see [`ReadOptions::memory_limit`](crate::ReadOptions::memory_limit).
    #[error(
        "more than {limit} bytes of memory are needed at byte {offset}: if you trust the file, read it with a higher \
         memory limit"
    )]
    MemoryLimit {
        /// The limit.
        limit: u64,
        /// The decompressed bytes that had been read.
        offset: u64,
    },
    /// A line of a log is malformed.
    #[error("line {line} of the log: {what}")]
    Line {
        /// Its number; the header is 1.
        line: u64,
        /// What is wrong.
        what: String,
    },
}

impl ReadError {
    /// The error that the budget is used up.
    pub(super) fn memory_limit(budget: &Budget, offset: u64) -> Box<Self> {
        Box::new(Self::MemoryLimit { limit: budget.limit(), offset })
    }

    /// The error of a reader: the [`ReadError`] in it, or else a failure after `offset` bytes.
    pub(super) fn of_io(error: io::Error, offset: u64) -> Box<Self> {
        Box::new(error.downcast().unwrap_or_else(|source| Self::Io { offset, source }))
    }

    pub(super) fn damaged_zip(error: &dyn std::error::Error) -> Self {
        Self::Archive {
            archive: Archive::Zip,
            what: format!("it is damaged or cut off ({error}): copy the file again"),
        }
    }

    /// The same, of a file in an archive. A memory limit applies to the whole.
    pub(super) fn within(self: Box<Self>, archive: Archive, name: &str) -> Box<Self> {
        match *self {
            Self::MemoryLimit { .. } | Self::Archive { .. } | Self::Compressed { .. } => self,
            _ => Box::new(Self::Member { archive, name: name.to_owned(), source: self }),
        }
    }

    /// The error that the container at `path` of a snapshot is wrong.
    pub(super) fn content(offset: u64, path: &str, invalid: Invalid) -> Box<Self> {
        Box::new(Self::Content { offset, at: invalid.position(path), what: invalid.into_what() })
    }
}

/// A result inside this module: the error is boxed, since the innermost loops pass it on.
pub(super) type Checked<T> = Result<T, Box<ReadError>>;
