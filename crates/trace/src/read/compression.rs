//! Compression formats, recognized by content, and their decompressors.

use std::fmt;
use std::io::{self, Read};

use crate::budget::{Budget, Exceeded};

/// The maximum memory for decompression. The file decides how much is needed: xz's largest preset needs 65 MiB and
/// zstd's 128 MiB, but a header can ask for 4 GiB.
const MEMORY_MAX: u64 = 512 << 20;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// xz.
    Xz,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
    /// bzip2.
    Bzip2,
}

impl Compression {
    /// The format of data that starts with these bytes.
    pub(super) fn of(first: &[u8]) -> Option<Self> {
        const MAGIC: [(&[u8], Compression); 4] = [
            (b"\xfd7zXZ\0", Compression::Xz),
            (b"\x1f\x8b", Compression::Gzip),
            (b"\x28\xb5\x2f\xfd", Compression::Zstd),
            (b"BZh", Compression::Bzip2),
        ];
        MAGIC.into_iter().find(|(magic, _)| first.starts_with(magic)).map(|(_, compression)| compression)
    }

    /// A reader of the decompressed bytes. It takes up to half of the budget.
    pub(super) fn decompress<'a>(self, raw: impl Read + 'a, budget: &Budget) -> io::Result<Box<dyn Read + 'a>> {
        let memory_max = (budget.limit() / 2).min(MEMORY_MAX);
        let refused = |Exceeded| io::Error::from(io::ErrorKind::OutOfMemory);
        Ok(match self {
            Self::Xz => {
                budget.take(memory_max).map_err(refused)?;
                let stream = liblzma::stream::Stream::new_stream_decoder(memory_max, liblzma::stream::CONCATENATED)?;
                Box::new(liblzma::read::XzDecoder::new_stream(raw, stream))
            }
            Self::Gzip => Box::new(flate2::read::MultiGzDecoder::new(raw)),
            Self::Zstd => {
                // The window, the output beside it, and what does not depend on the file.
                const WINDOW_LOG_MAX: u32 = 27;
                const FIXED: u64 = 1 << 20;
                let window_log = memory_max.saturating_sub(FIXED).max(1).ilog2().clamp(10, WINDOW_LOG_MAX);
                budget.take((1 << window_log) + FIXED).map_err(refused)?;
                let mut decoder = zstd::Decoder::new(raw)?;
                decoder.window_log_max(window_log)?;
                Box::new(decoder)
            }
            Self::Bzip2 => {
                // A block of 900 kB, which takes four bytes each, and tables.
                const FIXED: u64 = 4 << 20;
                budget.take(FIXED).map_err(refused)?;
                Box::new(bzip2::read::MultiBzDecoder::new(raw))
            }
        })
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Xz => "xz",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Bzip2 => "bzip2",
        })
    }
}
