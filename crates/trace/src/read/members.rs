//! The files of an archive, and which of them is the recording, decided by content and not by name.

use std::fmt;

use super::archive::Archive;
use super::compression::Compression;
use super::error::{Checked, ReadError};
use super::rmm;
use crate::pickle::opcode;
use crate::printable::shortened;

/// What a file of an archive is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Member {
    Recording,
    /// Compressed, or an archive: what is in it is not looked at, so that nothing is decompressed twice.
    Packed,
    Other,
}

impl Member {
    /// What a file that starts with these bytes is.
    pub fn of(first: &[u8]) -> Self {
        if matches!(first, [opcode::PROTO, 2..=5, ..]) || rmm::is_log(first) {
            Self::Recording
        } else if Compression::of(first).is_some() || Archive::of(first).is_some() {
            Self::Packed
        } else {
            Self::Other
        }
    }
}

/// The files of an archive that could be the recording.
pub(super) struct Members {
    archive: Archive,
    recordings: Names,
    packed: Names,
}

impl Members {
    pub fn new(archive: Archive) -> Self {
        Self { archive, recordings: Names::default(), packed: Names::default() }
    }

    pub fn add(&mut self, member: Member, name: &[u8]) {
        match member {
            Member::Recording => self.recordings.add(name),
            Member::Packed => self.packed.add(name),
            Member::Other => {}
        }
    }

    /// Fails unless there is exactly one recording.
    pub fn check(&self) -> Checked<()> {
        let archive = self.archive;
        let what = match (self.recordings.count, self.packed.count) {
            (1, _) => return Ok(()),
            (0, 0) => "no file in it is a recording".to_owned(),
            (0, _) => format!("its files are compressed once more ({}): extract it and give the files", self.packed),
            (count, _) => {
                format!("it has {count} recordings ({}): extract it, and give the folder or the files", self.recordings)
            }
        };
        Err(Box::new(ReadError::Archive { archive, what }))
    }
}

/// Some names, and how many there are.
#[derive(Default)]
struct Names {
    some: Vec<String>,
    count: u64,
}

impl Names {
    fn add(&mut self, name: &[u8]) {
        /// A reader needs no more, and an archive can have any number.
        const SHOWN: usize = 8;
        self.count += 1;
        if self.some.len() < SHOWN {
            self.some.push(member_name(name));
        }
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.some.join(", "))?;
        if self.count > self.some.len() as u64 { f.write_str(", …") } else { Ok(()) }
    }
}

/// The name of a file in an archive, for messages.
pub(super) fn member_name(name: &[u8]) -> String {
    shortened(&String::from_utf8_lossy(name))
}
