//! Opening NVIDIA's shared libraries at run time: which names are tried, in which order, and what an error reports.
//! No function is called here.

use std::env;
use std::error::Error;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::Library;

/// A shared library that stays open until the process ends.
///
/// It is never closed: threads of the driver, function pointers in use and exit handlers may still need it.
pub(crate) struct SharedLibrary {
    library: ManuallyDrop<Library>,
    name: String,
}

/// A library that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{library} could not be loaded; tried {}; the loader reports: {reason}", .tried.join(", "))]
#[non_exhaustive]
pub struct MissingLibrary {
    /// The library, without version.
    pub library: &'static str,
    /// The names and paths that were tried, in order.
    pub tried: Vec<String>,
    /// What the loader reported for the first of them, the one that is expected to work.
    pub reason: String,
}

/// A library that is there but lacks a symbol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{library} has no symbol {symbol}")]
#[non_exhaustive]
pub struct MissingSymbol {
    /// The symbol.
    pub symbol: &'static str,
    /// The name or path that the library was opened under.
    pub library: String,
}

impl SharedLibrary {
    /// Opens the first of `candidates` that the loader takes.
    pub(crate) fn open(library: &'static str, candidates: &[String]) -> Result<Self, MissingLibrary> {
        let mut reason = None;
        for name in candidates {
            // SAFETY: the candidates are NVIDIA's libraries, whose initialisers may run on any thread.
            match unsafe { Library::new(name) } {
                Ok(loaded) => return Ok(Self { library: ManuallyDrop::new(loaded), name: name.clone() }),
                Err(error) => _ = reason.get_or_insert_with(|| message(&error)),
            }
        }
        let reason = reason.unwrap_or_else(|| "no names to try".to_owned());
        Err(MissingLibrary { library, tried: candidates.to_vec(), reason })
    }

    /// The name or path that it was opened under.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The function of that name, if the library has it.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to that function.
    pub(crate) unsafe fn find<F: Copy>(&self, symbol: &'static str) -> Option<F> {
        // SAFETY: the caller promises the type; the library stays open, so the pointer stays valid.
        unsafe { self.library.get::<F>(symbol) }.ok().map(|found| *found)
    }

    /// The function of that name, or an error that names it.
    ///
    /// # Safety
    /// As [`find`](Self::find).
    pub(crate) unsafe fn require<F: Copy>(&self, symbol: &'static str) -> Result<F, MissingSymbol> {
        // SAFETY: the caller promises the type.
        unsafe { self.find(symbol) }.ok_or_else(|| MissingSymbol { symbol, library: self.name.clone() })
    }
}

/// The loader's message, which libloading keeps as the source.
fn message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The names of the CUDA driver's library. It is installed with the display driver, not with the toolkit, so the loader
/// finds it.
pub(crate) fn driver_candidates() -> Vec<String> {
    ["libcuda.so.1", "libcuda.so"].map(str::to_owned).to_vec()
}

/// The paths of a library of the CUDA toolkit: each of `names` for the loader's search path, then in the toolkit's
/// directories.
pub(crate) fn toolkit_candidates(names: &[&str]) -> Vec<String> {
    let directories = toolkit_directories(
        env::var_os("CUDA_HOME").as_deref().map(Path::new),
        env::var_os("CUDA_PATH").as_deref().map(Path::new),
    );
    let plain = names.iter().map(|&name| name.to_owned());
    let placed = directories
        .iter()
        .flat_map(|directory| names.iter().map(|name| directory.join(name).to_string_lossy().into_owned()));
    plain.chain(placed).collect()
}

/// Where a toolkit for several architectures has the libraries of this one.
const TARGET_DIRECTORY: &str =
    if cfg!(target_arch = "aarch64") { "targets/sbsa-linux/lib" } else { "targets/x86_64-linux/lib" };

/// The directories of a toolkit's libraries.
fn toolkit_directories(home: Option<&Path>, path: Option<&Path>) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    let usual = Path::new("/usr/local/cuda");
    for root in [home, path, Some(usual)].into_iter().flatten() {
        for inner in ["lib64", TARGET_DIRECTORY] {
            let directory = root.join(inner);
            if !root.as_os_str().is_empty() && !directories.contains(&directory) {
                directories.push(directory);
            }
        }
    }
    directories
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_comes_before_the_default_directory() {
        let directories = toolkit_directories(Some(Path::new("/opt/a")), Some(Path::new("/opt/b")));
        let roots: Vec<_> = directories.iter().map(|directory| directory.to_str().expect("plain text")).collect();
        assert_eq!(roots.len(), 6);
        assert!(roots[0].starts_with("/opt/a/lib64") && roots[2].starts_with("/opt/b/lib64"));
        assert!(roots[4..].iter().all(|directory| directory.starts_with("/usr/local/cuda/")));
    }

    #[test]
    fn no_directory_is_tried_twice_and_an_empty_variable_is_ignored() {
        let usual = toolkit_directories(None, None);
        assert_eq!(toolkit_directories(Some(Path::new("/usr/local/cuda")), Some(Path::new(""))), usual);
    }

    #[test]
    fn names_without_directory_come_first() {
        let candidates = toolkit_candidates(&["libx.so.2", "libx.so.1"]);
        assert_eq!(&candidates[..2], ["libx.so.2", "libx.so.1"]);
        assert!(candidates[2..].iter().all(|path| path.starts_with('/') || path.contains("/libx.so.")));
        assert_eq!(driver_candidates(), ["libcuda.so.1", "libcuda.so"]);
    }

    #[test]
    fn a_missing_library_is_named_with_what_was_tried() {
        let candidates = ["libno-such-thing.so.1".to_owned(), "libno-such-thing.so".to_owned()];
        let error = SharedLibrary::open("libno-such-thing", &candidates).err().expect("no such library");
        assert_eq!(error.tried, candidates);
        let text = error.to_string();
        assert!(
            text.starts_with("libno-such-thing could not be loaded; tried libno-such-thing.so.1, libno-such-thing.so")
        );
    }
}
