//! Why a shared object cannot be loaded as an external allocator.

use std::path::PathBuf;

/// Why a shared object cannot be loaded as an external allocator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file does not exist.
    #[error("cannot load external allocator: there is no file {}; check the path", path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
    },

    /// The dynamic loader refuses the file.
    #[error("cannot load external allocator {}: {why}", path.display())]
    NotLoaded {
        /// The path.
        path: PathBuf,
        /// The loader's message.
        why: String,
    },

    /// The shared object lacks a function.
    #[error(
        "cannot load external allocator {}: it has no symbol {symbol:?}, which was named for {role}; \
         C++ functions need extern \"C\"",
        path.display()
    )]
    NoSymbol {
        /// The path.
        path: PathBuf,
        /// The missing symbol.
        symbol: String,
        /// The function that it was named for.
        role: &'static str,
    },
}
