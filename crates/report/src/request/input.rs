//! The recordings of a request: files, or bytes or streams of the caller.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::size;
use serde_json::Value;
use warpool::driver::platform::Instant;
use warpool_trace::replay::ReplayError;
use warpool_trace::{ReadError, ReadOptions, Recording, default_memory_limit, read};

use crate::request::error::{Error, Result};
use crate::request::work::{Stage, Work};

/// Where a recording is.
#[derive(Clone, Debug)]
pub enum Source<'a> {
    /// In a file.
    Path(PathBuf),
    /// In memory.
    Bytes(&'a [u8]),
    /// A stream of the caller.
    Stream(Stream<'a>),
}

/// A recording that the caller reads, such as a file that a page in the browser was given.
#[derive(Clone, Copy)]
pub struct Stream<'a> {
    /// The name of the file.
    pub name: &'a str,
    /// Its size.
    pub bytes: u64,
    /// Opens it, at its start.
    pub open: &'a (dyn Fn() -> Box<dyn Read> + Sync),
}

impl fmt::Debug for Stream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?}, {} bytes)", self.name, self.bytes)
    }
}

/// A recording that was read.
pub struct Opened {
    /// The recording.
    pub recording: Recording,
    /// The most memory that working on it may take.
    pub memory_limit: u64,
    /// Reading and decompressing it.
    pub input_seconds: f64,
    /// Parsing its content.
    pub parse_seconds: f64,
}

impl Source<'_> {
    /// Reads it.
    ///
    /// # Errors
    /// If it cannot be read, is not a complete recording, needs more memory than allowed, or the work was stopped.
    pub fn open(&self, stacks: bool, memory_limit: Option<u64>, work: &Work) -> Result<Opened> {
        let start = Instant::now();
        let options = ReadOptions { stacks, memory_limit, ..ReadOptions::default() };
        let found = match self {
            Self::Path(path) => open_file(path).and_then(|(file, bytes)| read(watched(file, bytes, work), &options)),
            Self::Bytes(bytes) => read(watched(*bytes, bytes.len() as u64, work), &options),
            Self::Stream(stream) => read(watched((stream.open)(), stream.bytes, work), &options),
        };
        if work.stop.is_stopped() {
            return Err(Error::Stopped);
        }
        let recording = found.map_err(|error| self.read_error(error))?;
        let input_seconds = recording.input_time.as_secs_f64();
        let parse_seconds = start.elapsed().as_secs_f64() - input_seconds;
        let memory_limit = memory_limit.unwrap_or_else(|| default_memory_limit(recording.bytes_needed));
        Ok(Opened { recording, memory_limit, input_seconds, parse_seconds })
    }

    /// All its bytes, for input that is not a recording.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let read = match self {
            Self::Path(path) => std::fs::read(path),
            Self::Bytes(bytes) => Ok(bytes.to_vec()),
            Self::Stream(stream) => {
                let mut bytes = Vec::new();
                (stream.open)().read_to_end(&mut bytes).map(|_| bytes)
            }
        };
        read.map_err(|source| Error::File { path: self.path().to_owned(), source })
    }

    /// A name for a title: that of the file.
    #[must_use]
    pub fn title(&self) -> String {
        let name = self.path().file_name();
        name.map_or_else(|| "snapshot".to_owned(), |name| name.to_string_lossy().into_owned())
    }

    /// The path or the name; empty if it is in memory.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Path(path) => path,
            Self::Bytes(_) => Path::new(""),
            Self::Stream(stream) => Path::new(stream.name),
        }
    }

    /// The value of the key `file` of an object: the path or the name as it was given, or null.
    #[must_use]
    pub fn file_value(&self) -> Value {
        match self {
            Self::Path(path) => Value::from(path.to_string_lossy()),
            Self::Bytes(_) => Value::Null,
            Self::Stream(stream) => Value::from(stream.name),
        }
    }

    /// Why it cannot be read.
    fn read_error(&self, error: ReadError) -> Error {
        match (error, self) {
            (ReadError::Open { path, source }, _) => Error::File { path, source },
            // Such as a folder, which can be opened but not read.
            (ReadError::Io { source, .. }, Self::Path(path)) if source.raw_os_error().is_some() => {
                Error::File { path: path.clone(), source }
            }
            (ReadError::MemoryLimit { limit, .. }, _) => self.memory_limit(limit),
            (error, _) => Error::Input(self.named(error)),
        }
    }

    /// Why it cannot be replayed.
    #[must_use]
    pub fn replay_error(&self, error: &ReplayError) -> Error {
        match error {
            ReplayError::Stopped => Error::Stopped,
            ReplayError::MemoryLimit { limit } => self.memory_limit(*limit),
            ReplayError::Changes(error) => Error::Option(error.to_string()),
            error => Error::Input(self.named(error)),
        }
    }

    fn memory_limit(&self, limit: u64) -> Error {
        let limit = size::format(limit);
        Error::Input(self.named(format!("it needs more than {limit} of memory; if you trust it, raise memory_limit")))
    }

    /// A message, with the file in front if there is one.
    #[must_use]
    pub fn named(&self, message: impl fmt::Display) -> String {
        match self {
            Self::Path(path) => format!("{}: {message}", path.display()),
            Self::Bytes(_) => message.to_string(),
            Self::Stream(stream) => format!("{}: {message}", stream.name),
        }
    }
}

/// The file, and its size if it has one.
fn open_file(path: &Path) -> std::result::Result<(File, u64), ReadError> {
    let error = |source| ReadError::Open { path: path.to_owned(), source };
    let file = File::open(path).map_err(error)?;
    let metadata = file.metadata().map_err(error)?;
    Ok((file, if metadata.is_file() { metadata.len() } else { 0 }))
}

fn watched<R: Read>(inner: R, bytes: u64, work: &Work) -> Watched<'_, R> {
    work.begin(Stage::Reading, bytes);
    Watched { inner, work, done: 0, bytes }
}

/// A reader that counts, and ends with an error when the work is to stop.
struct Watched<'a, R> {
    inner: R,
    work: &'a Work,
    done: u64,
    bytes: u64,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.work.stop.is_stopped() {
            return Err(io::Error::other("stopped"));
        }
        // A reader of bytes in memory would return all at once; in pieces, the flag is checked in between.
        const PIECE: usize = 1 << 20;
        let piece = buffer.len().min(PIECE);
        let read = self.inner.read(&mut buffer[..piece])?;
        self.done += read as u64;
        self.work.set(self.done, self.bytes);
        Ok(read)
    }
}
