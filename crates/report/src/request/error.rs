//! Why there is no answer: a kind, which selects the exception in Python, and a sentence.

use std::io;
use std::path::PathBuf;

use serde_json::{Value, json};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why there is no answer.
#[derive(Debug)]
pub enum Error {
    /// An option is wrong.
    Option(String),
    /// The recording cannot be read, or cannot be analysed.
    Input(String),
    /// The system cannot open or read the file.
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The caller stopped it.
    Stopped,
    /// A bug of ours.
    Internal(String),
}

impl Error {
    /// The error as an object.
    #[must_use]
    pub fn object(&self) -> Value {
        match self {
            Self::Option(message) => json!({ "kind": "option", "message": message }),
            Self::Input(message) => json!({ "kind": "input", "message": message }),
            Self::File { path, source } => json!({
                "kind": "file",
                "message": source.to_string(),
                "code": source.raw_os_error(),
                "path": path.to_string_lossy(),
            }),
            Self::Stopped => json!({ "kind": "stopped", "message": "stopped" }),
            Self::Internal(message) => json!({ "kind": "internal", "message": message }),
        }
    }
}
