//! The bytes of a file, decompressed and counted, before it is known what they are.

use std::cell::Cell;
use std::io::{self, Cursor, Read};
use std::rc::Rc;

use super::archive::PEEK_BYTES;
use super::compression::{Compression, exceeds_memory};
use super::error::{Checked, ReadError};
use crate::budget::{Budget, Exceeded};

/// Compressed data may be this many times the memory limit. It is not all kept, but reading it takes time.
const DECOMPRESSED_PER_LIMIT: u64 = 16;

/// The decompressed bytes of a file. A failure is an [`io::Error`] that contains a [`ReadError`].
pub(super) struct Source<'a> {
    reader: Bounded<Box<dyn Read + 'a>>,
    /// The first bytes, and how many of them were read again.
    first: Cursor<Vec<u8>>,
    pub compression: Option<Compression>,
    /// Bytes of the file that have been read, before decompression.
    pub bytes_read: Rc<Cell<u64>>,
}

impl<'a> Source<'a> {
    /// Recognizes the compression by the first bytes.
    pub fn open(mut reader: impl Read + 'a, budget: &Budget) -> Checked<Self> {
        let mut first = Vec::with_capacity(16);
        reader.by_ref().take(16).read_to_end(&mut first).map_err(|source| ReadError::Io { offset: 0, source })?;
        if first.is_empty() {
            return Err(Box::new(ReadError::Empty));
        }
        let compression = Compression::of(&first);
        let bytes_read = Rc::new(Cell::new(0));
        let raw = Counted { reader: Cursor::new(first).chain(reader), bytes: Rc::clone(&bytes_read) };
        let reader = match compression {
            Some(compression) => compression.decompress(raw, budget).map_err(|source| match budget.check() {
                Ok(()) => Box::new(ReadError::Io { offset: 0, source }),
                Err(Exceeded) => ReadError::memory_limit(budget, 0),
            })?,
            None => Box::new(raw),
        };
        let mut reader = Bounded::new(reader, Layer::of(compression), budget);
        let mut first = Vec::new();
        let peeked = reader.by_ref().take(PEEK_BYTES).read_to_end(&mut first);
        peeked.map_err(|error| ReadError::of_io(error, 0))?;
        Ok(Self { reader, first: Cursor::new(first), compression, bytes_read })
    }

    /// The first bytes.
    pub fn peek(&self) -> &[u8] {
        self.first.get_ref()
    }
}

impl Read for Source<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.first.read(into)? {
            0 => self.reader.read(into),
            bytes => Ok(bytes),
        }
    }
}

/// Where bytes come from, for the error if that fails.
#[derive(Clone, Copy)]
pub(super) enum Layer {
    File,
    Compressed(Compression),
    /// A file of a zip archive.
    Zip,
}

impl Layer {
    fn of(compression: Option<Compression>) -> Self {
        compression.map_or(Self::File, Self::Compressed)
    }
}

/// A reader whose errors say where they come from. Decompressed data must not be out of proportion to the memory limit.
pub(super) struct Bounded<R> {
    reader: R,
    layer: Layer,
    offset: u64,
    budget: Budget,
}

impl<R: Read> Bounded<R> {
    pub fn new(reader: R, layer: Layer, budget: &Budget) -> Self {
        Self { reader, layer, offset: 0, budget: budget.clone() }
    }

    fn error(&self, source: io::Error) -> ReadError {
        let offset = self.offset;
        match self.layer {
            Layer::File => ReadError::Io { offset, source },
            Layer::Compressed(_) if exceeds_memory(&source) => {
                ReadError::MemoryLimit { limit: self.budget.limit(), offset }
            }
            Layer::Compressed(compression) => ReadError::Compressed { compression, offset, source },
            Layer::Zip => ReadError::damaged_zip(&source),
        }
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.reader.read(into) {
            Ok(bytes) => {
                self.offset += bytes as u64;
                let is_too_large = self.offset / DECOMPRESSED_PER_LIMIT > self.budget.limit();
                if is_too_large && !matches!(self.layer, Layer::File) {
                    return Err(io::Error::other(*ReadError::memory_limit(&self.budget, self.offset)));
                }
                Ok(bytes)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => Err(io::Error::other(self.error(error))),
        }
    }
}

/// A reader that counts its bytes.
pub(super) struct Counted<R> {
    pub reader: R,
    pub bytes: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bytes = self.reader.read(into)?;
        self.bytes.set(self.bytes.get() + bytes as u64);
        Ok(bytes)
    }
}
