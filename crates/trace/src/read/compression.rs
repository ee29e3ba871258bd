//! Compression formats, recognized by content, and their decompressors.

use std::fmt;
use std::io::{self, Read};

/// The most memory for decompressing xz. Its largest preset needs 65 MiB; a header can ask for 4 GiB.
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
    /// The format of data that starts with these bytes.
    pub(super) fn of(first: &[u8]) -> Option<Self> {
        const MAGIC: [(&[u8], Compression); 3] = [
            (b"\xfd7zXZ\0", Compression::Xz),
            (b"\x1f\x8b", Compression::Gzip),
            (b"\x28\xb5\x2f\xfd", Compression::Zstd),
        ];
        MAGIC.into_iter().find(|(magic, _)| first.starts_with(magic)).map(|(_, compression)| compression)
    }

    /// A reader of the decompressed bytes.
    pub(super) fn decompress<'a>(self, raw: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::Xz => {
                let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_MAX, liblzma::stream::CONCATENATED)?;
                Box::new(liblzma::read::XzDecoder::new_stream(raw, stream))
            }
            Self::Gzip => Box::new(flate2::read::MultiGzDecoder::new(raw)),
            Self::Zstd => Box::new(zstd::Decoder::new(raw)?),
        })
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
