//! Compression formats, recognized by content, and their decompressors. xz and zstd have two: `c.rs` where there is a C
//! compiler, else `rust.rs`. gzip and bzip2 are Rust everywhere.

#[cfg(all(feature = "c-libraries", not(target_family = "wasm")))]
mod c;
#[cfg(any(test, not(all(feature = "c-libraries", not(target_family = "wasm")))))]
mod rust;

use std::fmt;
use std::io::{self, Read};

use crate::budget::{Budget, Exceeded};

#[cfg(all(feature = "c-libraries", not(target_family = "wasm")))]
use c as library;
#[cfg(not(all(feature = "c-libraries", not(target_family = "wasm"))))]
use rust as library;

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
                library::xz(raw, memory_max)?
            }
            Self::Gzip => Box::new(flate2::read::MultiGzDecoder::new(raw)),
            Self::Zstd => {
                let (window_log, bytes) = library::zstd_window(memory_max);
                budget.take(bytes).map_err(refused)?;
                library::zstd(raw, window_log)?
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

/// Whether a decompressor needs more memory than it may take.
pub(super) fn exceeds_memory(error: &io::Error) -> bool {
    library::exceeds_memory(error)
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
