//! Reads recordings: PyTorch's memory snapshots and RMM's logs.
//! Formats, compressions and archives are recognized by content, not by the name of the file.

mod archive;
mod compression;
mod error;
mod input;
mod interpreter;
mod members;
mod parent;
mod rmm;
mod source;
mod stack;
mod tar;
mod zip;

use std::fs::File;
use std::io::{Read, Seek as _};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use warpool::memory::report::Snapshot;

pub use archive::Archive;
pub use compression::Compression;
pub use error::ReadError;
pub use input::Progress;

use crate::budget::{Budget, Exceeded};
use crate::pickle::opcode;
use crate::snapshot::{Builder, RecordedFields};
use error::Checked;
use input::Input;
use interpreter::Interpreter;
use source::Source;
use zip::ZippedRecording;

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
    let mut file = File::open(path.as_ref()).map_err(open_error)?;
    let metadata = file.metadata().map_err(open_error)?;
    if !metadata.is_file() {
        return read_sized(file, None, options);
    }
    let mut first = Vec::new();
    file.by_ref().take(4).read_to_end(&mut first).and_then(|_| file.rewind()).map_err(open_error)?;
    if Archive::of(&first) != Some(Archive::Zip) {
        return read_sized(file, Some(metadata.len()), options);
    }
    // Files of any size, since they need not be copied to memory.
    let budget = Budget::new(options.memory_limit);
    let read = |file: File| read_zip(&zip::in_file(file)?, options, &budget);
    read(file).map_err(|error| *error)
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
    read_source(reader, bytes, options, &budget).map_err(|error| *error)
}

fn read_source(
    reader: impl Read,
    bytes: Option<u64>,
    options: &ReadOptions<'_>,
    budget: &Budget,
) -> Checked<Recording> {
    let mut source = Source::open(reader, budget)?;
    let counter = (Rc::clone(&source.bytes_read), bytes);
    let compression = source.compression;
    let read = |reader: Box<dyn Read + '_>| {
        let mut input = Input::open(reader, counter.clone(), options.progress, budget)?;
        read_input(&mut input, options, budget)
    };
    let recording = match Archive::of(source.peek()) {
        Some(Archive::Tar) => tar::read(&mut source, |file| read(Box::new(file)))?,
        Some(Archive::Zip) => read_zip(&zip::in_memory(&mut source, budget)?, options, budget)?,
        None => read(Box::new(source))?,
    };
    Ok(Recording { compression, ..recording })
}

fn read_zip<R: rawzip::ReaderAt>(
    archive: &rawzip::ZipArchive<R>,
    options: &ReadOptions<'_>,
    budget: &Budget,
) -> Checked<Recording> {
    let ZippedRecording { reader, name, bytes, bytes_read } = ZippedRecording::find(archive, budget)?;
    let read = || {
        let mut input = Input::open(reader, (bytes_read, Some(bytes)), options.progress, budget)?;
        read_input(&mut input, options, budget)
    };
    read().map_err(|error| error.within(Archive::Zip, &name))
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
        compression: None,
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
    if let Some(inner) = Compression::of(first) {
        format!("it is {inner} data that was compressed again; decompress it once")
    } else if first.starts_with(b"(dp0\n") || first.starts_with(b"}q\0(") {
        "it is a pickle of protocol 0 or 1, which is too old".to_owned()
    } else if shown.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()) {
        format!("it is text that starts with {:?}", String::from_utf8_lossy(shown))
    } else {
        format!("it starts with the bytes {:02x?}", &shown[..shown.len().min(8)])
    }
}
