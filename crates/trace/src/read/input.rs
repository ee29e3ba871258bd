//! The bytes of a recording: buffered and counted.
//! No length in the file is trusted: memory is allocated as bytes arrive.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;
use std::time::Duration;

use warpool::driver::platform::Instant;

use super::error::{Checked, ReadError};
use crate::budget::{Budget, Exceeded};

/// How much is decompressed at a time: refills take no measurable time, and it fits into a CPU cache.
const BUFFER_BYTES: usize = 128 << 10;

/// How much is buffered, if the input has as much, before its format is recognized.
const PEEK_BYTES: usize = 256;

/// The progress of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the file that have been read, before decompression.
    pub bytes_read: u64,
    /// Bytes of the file, if known.
    pub bytes_total: Option<u64>,
}

/// The decompressed bytes of a recording, and the position in them.
pub(super) struct Input<'a> {
    reader: Box<dyn Read + 'a>,
    buffer: Box<[u8]>,
    next: usize,
    end: usize,
    /// The offset of the buffer's end.
    offset_end: u64,
    bytes_read: Rc<Cell<u64>>,
    bytes_total: Option<u64>,
    bytes_skipped: u64,
    progress: Option<&'a dyn Fn(Progress)>,
    input_time: Duration,
    budget: Budget,
}

impl<'a> Input<'a> {
    /// Fills the buffer. `bytes_read` counts the bytes of the file, of which there are `bytes_total`.
    pub(super) fn open(
        reader: Box<dyn Read + 'a>,
        (bytes_read, bytes_total): (Rc<Cell<u64>>, Option<u64>),
        progress: Option<&'a dyn Fn(Progress)>,
        budget: &Budget,
    ) -> Checked<Self> {
        let mut input = Self {
            reader,
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            next: 0,
            end: 0,
            offset_end: 0,
            bytes_read,
            bytes_total,
            bytes_skipped: 0,
            progress,
            input_time: Duration::ZERO,
            budget: budget.clone(),
        };
        while input.end < PEEK_BYTES && input.fill(input.end)? > 0 {}
        if input.end == 0 {
            return Err(Box::new(ReadError::Empty));
        }
        Ok(input)
    }

    /// The offset of the next byte.
    #[inline]
    pub(super) fn offset(&self) -> u64 {
        self.offset_end - (self.end - self.next) as u64
    }

    /// Bytes of the file that have been read, before decompression.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read.get()
    }

    /// Bytes that were skipped, after decompression.
    pub(super) fn bytes_skipped(&self) -> u64 {
        self.bytes_skipped
    }

    /// The time spent in the reader and in decompression.
    pub(super) fn input_time(&self) -> Duration {
        self.input_time
    }

    /// The rest of the buffer; at the start, enough to recognize the format.
    pub(super) fn peek(&self) -> &[u8] {
        &self.buffer[self.next..self.end]
    }

    /// The next byte.
    #[inline]
    pub(super) fn byte(&mut self, within: &'static str) -> Checked<u8> {
        if self.next == self.end && self.refill()? == 0 {
            return Err(self.truncated(within));
        }
        let byte = self.buffer[self.next];
        self.next += 1;
        Ok(byte)
    }

    /// The next `N` bytes.
    #[inline]
    pub(super) fn array<const N: usize>(&mut self, within: &'static str) -> Checked<[u8; N]> {
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

    /// The next `length` bytes, copied to `scratch` if they are not all in the buffer.
    #[inline]
    pub(super) fn bytes<'s>(
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
            let step = (length - scratch.len()).min(BUFFER_BYTES);
            self.budget
                .reserve(scratch, step)
                .map_err(|Exceeded| ReadError::memory_limit(&self.budget, self.offset()))?;
            if self.next == self.end && self.refill()? == 0 {
                return Err(self.truncated(within));
            }
            let step = (length - scratch.len()).min(self.end - self.next);
            scratch.extend_from_slice(&self.buffer[self.next..self.next + step]);
            self.next += step;
        }
        Ok(scratch)
    }

    /// Skips the next `length` bytes.
    pub(super) fn skip(&mut self, length: u64, within: &'static str) -> Checked<()> {
        let mut left = length;
        while left > 0 {
            if self.next == self.end && self.refill()? == 0 {
                return Err(self.truncated(within));
            }
            let step = left.min((self.end - self.next) as u64);
            self.next += step as usize;
            self.bytes_skipped += step;
            left -= step;
        }
        Ok(())
    }

    /// The next line without its end, into `line`; false at the end of the input. At most `max` bytes of it are kept.
    pub(super) fn line(&mut self, line: &mut Vec<u8>, max: usize) -> Checked<bool> {
        line.clear();
        let mut any = false;
        loop {
            if self.next == self.end && self.refill()? == 0 {
                return Ok(any);
            }
            any = true;
            let rest = &self.buffer[self.next..self.end];
            let (step, complete) = match rest.iter().position(|&byte| byte == b'\n') {
                Some(end) => (end, true),
                None => (rest.len(), false),
            };
            line.extend_from_slice(&rest[..step.min(max.saturating_sub(line.len()))]);
            self.next += step + usize::from(complete);
            if complete {
                return Ok(true);
            }
        }
    }

    /// Whether nothing is left. Reads to the end of compressed data, where the checksum is.
    pub(super) fn is_at_end(&mut self) -> Checked<bool> {
        Ok(self.next == self.end && self.refill()? == 0)
    }

    fn truncated(&self, within: &'static str) -> Box<ReadError> {
        Box::new(ReadError::Truncated { offset: self.offset(), within })
    }

    /// Fills the empty buffer. Returns its length; 0 at the end of the input.
    #[cold]
    fn refill(&mut self) -> Checked<usize> {
        assert_eq!(self.next, self.end, "the buffer is empty");
        (self.next, self.end) = (0, 0);
        self.fill(0)
    }

    /// Reads once, into the buffer from `from` on, where its content ends. Returns the bytes read.
    fn fill(&mut self, from: usize) -> Checked<usize> {
        let start = Instant::now();
        let bytes = loop {
            match self.reader.read(&mut self.buffer[from..]) {
                Ok(bytes) => break bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ReadError::of_io(error, self.offset_end)),
            }
        };
        self.input_time += start.elapsed();
        self.end = from + bytes;
        self.offset_end += bytes as u64;
        self.budget.set_bytes_needed(self.offset_end - self.bytes_skipped);
        if let Some(progress) = self.progress {
            progress(Progress { bytes_read: self.bytes_read.get(), bytes_total: self.bytes_total });
        }
        Ok(bytes)
    }
}
