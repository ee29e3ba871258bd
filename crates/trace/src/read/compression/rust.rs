//! xz and zstd in Rust, for targets without a C compiler. Slower than the C libraries, with the same results: checksums
//! are checked, and several streams or frames are read one after another.

use std::io::{self, BufReader, Read};

use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// zstd's largest window that is read.
const WINDOW_LOG_MAX: u32 = 27;
/// What zstd takes beside its window, and the output.
const FIXED: u64 = 1 << 20;
/// Both read some bytes at a time from their source.
const BUFFER_BYTES: usize = 64 << 10;

/// A reader of xz data, of several streams too, that takes at most `memory_max`.
pub(super) fn xz<'a>(raw: impl Read + 'a, memory_max: u64) -> io::Result<Box<dyn Read + 'a>> {
    let kib = u32::try_from(memory_max >> 10).unwrap_or(u32::MAX);
    Ok(Box::new(XzReader::new_mem_limit(BufReader::with_capacity(BUFFER_BYTES, raw), true, kib)))
}

/// The base-2 logarithm of the largest window that `memory_max` has room for, and the memory that this takes: a buffer
/// that is up to twice as large, and while it grows the smaller one.
pub(super) fn zstd_window(memory_max: u64) -> (u32, u64) {
    let log = (memory_max.saturating_sub(FIXED) / 3).max(1).ilog2().clamp(10, WINDOW_LOG_MAX);
    (log, (3 << log) + FIXED)
}

/// A reader of zstd data, of several frames too, with windows of at most `1 << window_log`.
pub(super) fn zstd<'a>(raw: impl Read + 'a, window_log: u32) -> io::Result<Box<dyn Read + 'a>> {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(1 << window_log);
    let raw = BufReader::with_capacity(BUFFER_BYTES, raw);
    Ok(Box::new(ZstdReader { raw, decoder, is_in_frame: false }))
}

/// Whether a decompressor needs more memory than it may take.
pub(super) fn exceeds_memory(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::OutOfMemory
}

struct ZstdReader<R> {
    raw: R,
    decoder: FrameDecoder,
    is_in_frame: bool,
}

impl<R: Read> ZstdReader<R> {
    /// Begins the next frame that has data. False at the end of the input.
    fn begin_frame(&mut self) -> io::Result<bool> {
        loop {
            let mut first = [0];
            if self.raw.read(&mut first)? == 0 {
                return Ok(false);
            }
            match self.decoder.reset(first.as_slice().chain(&mut self.raw)) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let length = u64::from(length);
                    if io::copy(&mut self.raw.by_ref().take(length), &mut io::sink())? < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error @ FrameDecoderError::WindowSizeTooBig { .. }) => {
                    return Err(io::Error::new(io::ErrorKind::OutOfMemory, error));
                }
                Err(error) => return Err(invalid(error)),
            }
        }
    }

    /// Ends a frame whose bytes were all read.
    fn end_frame(&mut self) -> io::Result<()> {
        self.is_in_frame = false;
        let stored = self.decoder.get_checksum_from_data();
        if stored.is_some() && stored != self.decoder.get_calculated_checksum() {
            return Err(invalid("the checksum is wrong"));
        }
        Ok(())
    }
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.is_in_frame {
                if !self.begin_frame()? {
                    return Ok(0);
                }
                self.is_in_frame = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder.decode_blocks(&mut self.raw, BlockDecodingStrategy::UptoBlocks(1)).map_err(invalid)?;
            }
            let bytes = self.decoder.read(into)?;
            if bytes > 0 {
                return Ok(bytes);
            }
            self.end_frame()?;
        }
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    const XZ: &[u8] = include_bytes!("../../../tests/data/snapshot.pickle.xz");
    const ZSTD: &[u8] = include_bytes!("../../../tests/data/snapshot.pickle.zst");
    const PLAIN: &[u8] = include_bytes!("../../../tests/data/snapshot.p4.pickle");
    /// A frame that decoders skip, with three bytes.
    const SKIPPED: &[u8] = b"\x50\x2a\x4d\x18\x03\0\0\0abc";

    fn all(reader: io::Result<Box<dyn Read + '_>>) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        reader?.read_to_end(&mut bytes).map(|_| bytes)
    }

    fn from_xz(raw: &[u8]) -> io::Result<Vec<u8>> {
        all(xz(raw, 1 << 30))
    }

    fn from_zstd(raw: &[u8]) -> io::Result<Vec<u8>> {
        all(zstd(raw, WINDOW_LOG_MAX))
    }

    #[test]
    fn streams_and_frames_are_read_one_after_another() {
        let twice = PLAIN.repeat(2);
        assert_eq!(from_xz(XZ).expect("a whole file"), PLAIN);
        assert_eq!(from_xz(&[XZ, &[0; 8], XZ].concat()).expect("two streams"), twice);
        assert_eq!(from_zstd(ZSTD).expect("a whole file"), PLAIN);
        assert_eq!(from_zstd(&[SKIPPED, ZSTD, SKIPPED, ZSTD, SKIPPED].concat()).expect("frames"), twice);
    }

    #[test]
    fn file_that_is_cut_or_changed_anywhere_is_an_error_or_unchanged() {
        for (raw, read) in [(XZ, from_xz as fn(&[u8]) -> _), (ZSTD, from_zstd)] {
            for end in 1..raw.len() {
                assert!(read(&raw[..end]).is_err(), "cut at {end} of {}", raw.len());
            }
            for at in 0..raw.len() {
                let mut changed = raw.to_vec();
                changed[at] ^= 0x10;
                // A few bits of a header say nothing about the content.
                assert!(read(&changed).map_or(true, |bytes| bytes == PLAIN), "byte {at} of {}", raw.len());
            }
        }
        let cut_in_skipped = [ZSTD, &SKIPPED[..9]].concat();
        assert_eq!(from_zstd(&cut_in_skipped).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn memory_is_limited() {
        let refused = all(xz(XZ, 64 << 10)).unwrap_err();
        assert!(exceeds_memory(&refused), "{refused}");
        // A frame with a window of 256 MiB.
        let refused = from_zstd(b"\x28\xb5\x2f\xfd\x00\x90\x01\0\0").unwrap_err();
        assert!(exceeds_memory(&refused), "{refused}");
        for memory in [0, 1 << 20, 128 << 20, 512 << 20, u64::MAX] {
            let (log, bytes) = zstd_window(memory);
            assert!((10..=WINDOW_LOG_MAX).contains(&log) && (bytes <= memory || log == 10), "{memory}");
        }
    }
}
