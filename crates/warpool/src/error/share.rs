//! Errors of pages that processes share.

/// Why a page cannot be made, or the folder of pages not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// The folder cannot be used.
    #[error("the folder of the pages, {path}, cannot be used: {why}")]
    Folder {
        /// The folder.
        path: String,
        /// The reason.
        why: String,
    },
    /// The page of this process cannot be made.
    #[error("the page of this process, {file}, cannot be made: {why}")]
    Page {
        /// Its file.
        file: String,
        /// The reason.
        why: String,
    },
}
