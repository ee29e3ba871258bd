//! Reads recordings: PyTorch's memory snapshots and RMM's logs.
//! The format and the compression are recognized by content, not by the name of the file.

mod compression;
mod error;
mod input;
mod interpreter;
mod parent;
mod rmm;
mod stack;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use warpool::memory::Snapshot;

pub use compression::Compression;
pub use error::ReadError;
pub use input::Progress;

use crate::budget::{Budget, Exceeded};
use crate::pickle::opcode;
use crate::snapshot::{Builder, RecordedFields};
use error::Checked;
use input::Input;
use interpreter::Interpreter;

/// How to read.
#[derive(Clone, Copy, Default)]
pub struct ReadOptions<'a> {
    /// Whether call stacks are read. They are the larger part of most recordings.
    pub stacks: bool,
    /// Called now and then with the progress.
    pub progress: Option<&'a dyn Fn(Progress)>,
    /// The most memory that reading may take, in bytes; `None` is [`default_memory_limit`]. Beyond it,
    /// [`ReadError::MemoryLimit`].
    ///
    /// [`default_memory_limit`]: crate::default_memory_limit
    pub memory_limit: Option<u64>,
}

/// A recording that was read.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The content.
    pub snapshot: Snapshot,
    /// The kind of file.
    pub format: RecordingFormat,
    /// How the file is compressed.
    pub compression: Option<Compression>,
    /// Bytes of the file.
    pub bytes_read: u64,
    /// Bytes after decompression.
    pub bytes_decompressed: u64,
    /// Those of them that were not skipped.
    pub bytes_needed: u64,
    /// The time for reading the file and decompressing it.
    pub input_time: Duration,
    /// The fields that the recording has.
    pub fields: RecordedFields,
}

/// Kinds of recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordingFormat {
    /// A memory snapshot of PyTorch.
    TorchSnapshot,
    /// A log of RMM's `logging_resource_adaptor`.
    RmmLog,
}

/// Reads a recording from a file.
///
/// # Errors
/// If the file cannot be read, or is not a complete recording: see [`ReadError`].
pub fn read_file(path: impl AsRef<Path>, options: &ReadOptions<'_>) -> Result<Recording, ReadError> {
    let open_error = |source| ReadError::Open { path: path.as_ref().to_owned(), source };
    let file = File::open(path.as_ref()).map_err(open_error)?;
    let metadata = file.metadata().map_err(open_error)?;
    read_sized(file, metadata.is_file().then_some(metadata.len()), options)
}

/// Reads a recording from a reader, to its end.
///
/// # Errors
/// If it cannot be read, or is not a complete recording: see [`ReadError`].
pub fn read(reader: impl Read, options: &ReadOptions<'_>) -> Result<Recording, ReadError> {
    read_sized(reader, None, options)
}

fn read_sized(reader: impl Read, bytes: Option<u64>, options: &ReadOptions<'_>) -> Result<Recording, ReadError> {
    let budget = Budget::new(options.memory_limit);
    let mut input = Input::open(reader, bytes, options.progress, &budget).map_err(|error| *error)?;
    read_input(&mut input, options, &budget).map_err(|error| *error)
}

fn read_input(input: &mut Input<'_>, options: &ReadOptions<'_>, budget: &Budget) -> Checked<Recording> {
    let (snapshot, format, fields) = if input.peek()[0] == opcode::PROTO {
        let (builder, root) = Interpreter::new(input, Builder::new(options.stacks, budget), budget).run()?;
        let finished = builder.finish(root);
        let (snapshot, fields) = finished.map_err(|invalid| match budget.check() {
            Ok(()) => ReadError::content(input.offset(), "", invalid),
            Err(Exceeded) => ReadError::memory_limit(budget, input.offset()),
        })?;
        (snapshot, RecordingFormat::TorchSnapshot, fields)
    } else if rmm::is_log(input.peek()) {
        let fields = RecordedFields { trace_pools: false, ..RecordedFields::ALL };
        (rmm::read(input, budget)?, RecordingFormat::RmmLog, fields)
    } else {
        return Err(Box::new(ReadError::NotARecording { found: describe(input.peek()) }));
    };
    Ok(Recording {
        snapshot,
        format,
        compression: input.compression(),
        bytes_read: input.bytes_read(),
        bytes_decompressed: input.offset(),
        bytes_needed: input.offset() - input.bytes_skipped(),
        input_time: input.input_time(),
        fields,
    })
}

/// What data that starts with these bytes seems to be.
fn describe(first: &[u8]) -> String {
    let shown = &first[..first.len().min(24)];
    if first.starts_with(b"PK\x03\x04") {
        "it is a zip archive, as torch.save writes them".to_owned()
    } else if let Some(inner) = Compression::of(first) {
        format!("it is {inner} data that was compressed again; decompress it once")
    } else if first.starts_with(b"(dp0\n") || first.starts_with(b"}q\0(") {
        "it is a pickle of protocol 0 or 1, which is too old".to_owned()
    } else if shown.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()) {
        format!("it is text that starts with {:?}", String::from_utf8_lossy(shown))
    } else {
        format!("it starts with the bytes {:02x?}", &shown[..shown.len().min(8)])
    }
}
