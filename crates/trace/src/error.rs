//! What can be wrong with a recording, and what to do about it.
//! Offsets count the bytes of the decompressed stream, so they fit what other tools say about the same pickle.

use std::io;
use std::path::PathBuf;

use crate::Compression;

/// Why a recording could not be read. Nothing of it is returned then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file cannot be opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Reading failed in the middle.
    #[error("reading failed after {offset} bytes: {source}")]
    Io {
        /// How much had been read.
        offset: u64,
        /// What the system says.
        source: io::Error,
    },
    /// There is nothing in it.
    #[error("the input is empty: was the recording written to the end?")]
    Empty,
    /// It is something else.
    #[error(
        "not a recording: {found}; expected a PyTorch memory snapshot (a pickle of protocol 2 to 5, plain or in xz, gzip \
         or zstd) or an RMM log that starts with `Thread,Time,Action,Pointer,Size,Stream`"
    )]
    NotARecording {
        /// What it looks like.
        found: String,
    },
    /// The compressed data is damaged or ends early.
    #[error(
        "the {compression} data is damaged or cut off after {offset} decompressed bytes ({source}): copy the file again"
    )]
    Compressed {
        /// How it is compressed.
        compression: Compression,
        /// How many bytes came out before.
        offset: u64,
        /// What the decompressor says.
        source: io::Error,
    },
    /// It ends early.
    #[error("cut off at byte {offset}, in the middle of {within}: copy the file again, or record again")]
    Truncated {
        /// Where it ends.
        offset: u64,
        /// What was being read.
        within: &'static str,
    },
    /// The pickle wants something that no snapshot needs. Such a pickle may run programs when Python loads it.
    #[error(
        "refused at byte {offset}: the pickle opcode {opcode} is not needed by memory snapshots; take the snapshot with \
         torch.cuda.memory._dump_snapshot, or pickle only its plain dict"
    )]
    Opcode {
        /// Where the opcode is.
        offset: u64,
        /// Its name.
        opcode: String,
    },
    /// The pickle is not well formed.
    #[error("damaged pickle at byte {offset}: {what}")]
    Pickle {
        /// Where the opcode is that cannot be carried out.
        offset: u64,
        /// Why not.
        what: String,
    },
    /// The pickle is well formed, but not a snapshot.
    #[error("not a valid snapshot: {at}: {what} (byte {offset})")]
    Content {
        /// Where the opcode is that showed it.
        offset: u64,
        /// The place in the snapshot, as in `device_traces[0][17]`.
        at: String,
        /// What is wrong there.
        what: String,
    },
    /// A line of a log is not as it should be.
    #[error("line {line} of the log: {what}")]
    Line {
        /// Its number; the header is 1.
        line: u64,
        /// What is wrong with it.
        what: String,
    },
}

/// A result inside this crate: the error is boxed, since the innermost loops hand it through.
pub(crate) type Checked<T> = Result<T, Box<ReadError>>;

/// A text of a recording for messages: not longer than a line, and without line ends or orders to the terminal.
pub(crate) fn short(text: &str) -> String {
    const CHARS_MAX: usize = 60;
    let mut short = String::new();
    for c in text.chars().take(CHARS_MAX) {
        if c.is_control() { short.extend(c.escape_default()) } else { short.push(c) }
    }
    if text.chars().nth(CHARS_MAX).is_some() {
        short.push('…');
    }
    short
}
