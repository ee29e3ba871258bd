//! Bytes of a recording: told by content, decompressed, buffered, counted.
//! Nothing here trusts a length: memory is taken as bytes arrive.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Cursor, Read};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::error::{Checked, ReadError};

/// How much is decompressed at a time. Large enough that refills do not show, small enough for a cache.
const BUFFER_BYTES: usize = 128 << 10;

/// How much is there, if the input has as much, before it is decided what it is.
const PEEK_BYTES: usize = 256;

/// What xz may take to decompress. Its largest preset needs 65 MiB; a header can ask for 4 GiB.
const XZ_MEMORY_MAX: u64 = 512 << 20;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// xz.
    Xz,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// The one that starts with these bytes.
    pub(crate) fn of(first: &[u8]) -> Option<Self> {
        const MAGIC: [(&[u8], Compression); 3] = [
            (b"\xfd7zXZ\0", Compression::Xz),
            (b"\x1f\x8b", Compression::Gzip),
            (b"\x28\xb5\x2f\xfd", Compression::Zstd),
        ];
        MAGIC.into_iter().find(|(magic, _)| first.starts_with(magic)).map(|(_, compression)| compression)
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Xz => "xz",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        })
    }
}

/// How far reading is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the file that have been read, before decompression.
    pub bytes_read: u64,
    /// Bytes of the file, where that is known.
    pub bytes_total: Option<u64>,
}

/// The decompressed bytes of a recording, with the place in them.
pub(crate) struct Input<'a> {
    reader: Box<dyn Read + 'a>,
    compression: Option<Compression>,
    buffer: Box<[u8]>,
    next: usize,
    end: usize,
    /// The offset of the buffer's end.
    offset_end: u64,
    bytes_read: Rc<Cell<u64>>,
    bytes_total: Option<u64>,
    progress: Option<&'a dyn Fn(Progress)>,
    input_time: Duration,
}

impl<'a> Input<'a> {
    /// Looks at the first bytes and sets up decompression.
    pub(crate) fn open(
        mut reader: impl Read + 'a,
        bytes_total: Option<u64>,
        progress: Option<&'a dyn Fn(Progress)>,
    ) -> Checked<Self> {
        let mut first = Vec::with_capacity(16);
        reader.by_ref().take(16).read_to_end(&mut first).map_err(|source| ReadError::Io { offset: 0, source })?;
        if first.is_empty() {
            return Err(Box::new(ReadError::Empty));
        }
        let compression = Compression::of(&first);
        let bytes_read = Rc::new(Cell::new(0));
        let raw = Counted { reader: Cursor::new(first).chain(reader), bytes: Rc::clone(&bytes_read) };
        let reader = decompressed(raw, compression).map_err(|source| ReadError::Io { offset: 0, source })?;
        let mut input = Self {
            reader,
            compression,
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            next: 0,
            end: 0,
            offset_end: 0,
            bytes_read,
            bytes_total,
            progress,
            input_time: Duration::ZERO,
        };
        while input.end < PEEK_BYTES && input.fill(input.end)? > 0 {}
        if input.end == 0 {
            return Err(Box::new(ReadError::Empty));
        }
        Ok(input)
    }

    pub(crate) fn compression(&self) -> Option<Compression> {
        self.compression
    }

    /// The place of the next byte.
    #[inline]
    pub(crate) fn offset(&self) -> u64 {
        self.offset_end - (self.end - self.next) as u64
    }

    /// Bytes of the file that have been read, before decompression.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.bytes_read.get()
    }

    /// The time spent in the reader and in decompression.
    pub(crate) fn input_time(&self) -> Duration {
        self.input_time
    }

    /// What is in the buffer and not yet taken; at the start, enough to tell one format from another.
    pub(crate) fn peek(&self) -> &[u8] {
        &self.buffer[self.next..self.end]
    }

    /// The next byte.
    #[inline]
    pub(crate) fn byte(&mut self, within: &'static str) -> Checked<u8> {
        if self.next == self.end && self.refill()? == 0 {
            return Err(self.truncated(within));
        }
        let byte = self.buffer[self.next];
        self.next += 1;
        Ok(byte)
    }

    /// The next `N` bytes.
    #[inline]
    pub(crate) fn array<const N: usize>(&mut self, within: &'static str) -> Checked<[u8; N]> {
        if let Some(bytes) = self.buffer[self.next..self.end].first_chunk::<N>() {
            self.next += N;
            return Ok(*bytes);
        }
        let mut bytes = [0; N];
        for byte in &mut bytes {
            *byte = self.byte(within)?;
        }
        Ok(bytes)
    }

    /// The next `length` bytes, through `scratch` if they are not all in the buffer.
    #[inline]
    pub(crate) fn bytes<'s>(
        &'s mut self,
        length: usize,
        scratch: &'s mut Vec<u8>,
        within: &'static str,
    ) -> Checked<&'s [u8]> {
        if self.end - self.next >= length {
            self.next += length;
            return Ok(&self.buffer[self.next - length..self.next]);
        }
        scratch.clear();
        while scratch.len() < length {
            if self.next == self.end && self.refill()? == 0 {
                return Err(self.truncated(within));
            }
            let step = (length - scratch.len()).min(self.end - self.next);
            scratch.extend_from_slice(&self.buffer[self.next..self.next + step]);
            self.next += step;
        }
        Ok(scratch)
    }

    /// The next line without its end, into `line`; false at the end of the input. At most `max` bytes of it are kept.
    pub(crate) fn line(&mut self, line: &mut Vec<u8>, max: usize) -> Checked<bool> {
        line.clear();
        let mut any = false;
        loop {
            if self.next == self.end && self.refill()? == 0 {
                return Ok(any);
            }
            any = true;
            let rest = &self.buffer[self.next..self.end];
            let (step, complete) = match rest.iter().position(|&byte| byte == b'\n') {
                Some(place) => (place, true),
                None => (rest.len(), false),
            };
            line.extend_from_slice(&rest[..step.min(max.saturating_sub(line.len()))]);
            self.next += step + usize::from(complete);
            if complete {
                return Ok(true);
            }
        }
    }

    /// Reads to the end, where checksums are, and says whether nothing was left.
    pub(crate) fn is_at_end(&mut self) -> Checked<bool> {
        Ok(self.next == self.end && self.refill()? == 0)
    }

    fn truncated(&self, within: &'static str) -> Box<ReadError> {
        Box::new(ReadError::Truncated { offset: self.offset(), within })
    }

    /// Fills the empty buffer. Returns how much is in it; 0 at the end of the input.
    #[cold]
    fn refill(&mut self) -> Checked<usize> {
        assert_eq!(self.next, self.end, "a refill throws nothing away");
        (self.next, self.end) = (0, 0);
        self.fill(0)
    }

    /// Reads once, to the buffer's place `from` on, where its content ends. Returns how much came.
    fn fill(&mut self, from: usize) -> Checked<usize> {
        let start = Instant::now();
        let bytes = loop {
            match self.reader.read(&mut self.buffer[from..]) {
                Ok(bytes) => break bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.failed(source)),
            }
        };
        self.input_time += start.elapsed();
        self.end = from + bytes;
        self.offset_end += bytes as u64;
        if let Some(progress) = self.progress {
            progress(Progress { bytes_read: self.bytes_read.get(), bytes_total: self.bytes_total });
        }
        Ok(bytes)
    }

    fn failed(&self, source: io::Error) -> Box<ReadError> {
        let offset = self.offset_end;
        Box::new(match self.compression {
            Some(compression) => ReadError::Compressed { compression, offset, source },
            None => ReadError::Io { offset, source },
        })
    }
}

fn decompressed<'a>(raw: impl Read + 'a, compression: Option<Compression>) -> io::Result<Box<dyn Read + 'a>> {
    Ok(match compression {
        None => Box::new(raw),
        Some(Compression::Xz) => {
            let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_MAX, liblzma::stream::CONCATENATED)?;
            Box::new(liblzma::read::XzDecoder::new_stream(raw, stream))
        }
        Some(Compression::Gzip) => Box::new(flate2::read::MultiGzDecoder::new(raw)),
        Some(Compression::Zstd) => Box::new(zstd::Decoder::new(raw)?),
    })
}

/// A reader that counts.
struct Counted<R> {
    reader: R,
    bytes: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bytes = self.reader.read(into)?;
        self.bytes.set(self.bytes.get() + bytes as u64);
        Ok(bytes)
    }
}
