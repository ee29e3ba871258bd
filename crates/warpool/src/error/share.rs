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
    /// Another process of this GPU cannot be understood, so that its memory is not known.
    #[error("the page of another process, {file}, cannot be read: {why}; nothing is shared")]
    Other {
        /// Its file.
        file: String,
        /// The reason.
        why: String,
    },
    /// More would be guaranteed to processes than the GPU has.
    #[error(
        "with this process, {guaranteed} bytes would be guaranteed on a GPU of {bytes_total} bytes: lower \
         share_guaranteed; nothing is shared"
    )]
    Guarantees {
        /// The sum of all guarantees.
        guaranteed: u64,
        /// The memory of the GPU.
        bytes_total: u64,
    },
}
