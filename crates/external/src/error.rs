//! What can be wrong with a shared object.

use std::path::PathBuf;

/// Why a shared object cannot be a plug. The process goes on as before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// There is no such file.
    #[error("no plugged allocator: there is no file {}", path.display())]
    NoFile {
        /// What was to be opened.
        path: PathBuf,
    },

    /// It is there, and the loader does not take it.
    #[error("no plugged allocator: {} cannot be loaded; the loader says: {why}", path.display())]
    NotLoaded {
        /// What was to be opened.
        path: PathBuf,
        /// In the loader's words.
        why: String,
    },

    /// It is loaded, and lacks a function.
    #[error(
        "no plugged allocator: {} has no symbol {symbol:?}, which was named for {role}; C++ functions need extern \"C\"",
        path.display()
    )]
    NoSymbol {
        /// The shared object.
        path: PathBuf,
        /// What it lacks.
        symbol: String,
        /// Which function that should be.
        role: &'static str,
    },
}
