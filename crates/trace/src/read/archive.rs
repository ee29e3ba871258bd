//! Archive formats, recognized by content.

use std::fmt;

/// How much of a file is looked at to recognize it: the mark of a tar archive is at 257.
pub(super) const PEEK_BYTES: u64 = 512;

/// The kind of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Archive {
    /// zip, which `torch.save` writes too.
    Zip,
    /// tar.
    Tar,
}

impl Archive {
    /// The kind of archive that starts with these bytes.
    pub(super) fn of(first: &[u8]) -> Option<Self> {
        if first.starts_with(b"PK\x03\x04") || first.starts_with(b"PK\x05\x06") {
            Some(Self::Zip)
        } else if first.get(257..262) == Some(b"ustar") {
            Some(Self::Tar)
        } else {
            None
        }
    }
}

impl fmt::Display for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zip => "zip",
            Self::Tar => "tar",
        })
    }
}
