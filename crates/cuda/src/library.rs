//! Opening NVIDIA's shared libraries at run time.
//! What is tried, in which order, and what an error says about it. No symbols are called here.

use std::env;
use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::Library;

/// A shared library that is open, and stays open until the process ends.
///
/// It is never closed: threads of the driver, functions that we hold and handlers that run at exit may all still be in
/// it.
pub(crate) struct Loaded {
    library: &'static Library,
    name: String,
}

/// A library that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{library} could not be loaded; tried {}; the loader says: {reason}", Tried(.tried))]
#[non_exhaustive]
pub struct MissingLibrary {
    /// The library, without version.
    pub library: &'static str,
    /// The names and paths that were tried, in order.
    pub tried: Vec<String>,
    /// What the loader said about the first of them, the one that is expected to work.
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

/// A list of names for people.
struct Tried<'a>(&'a [String]);

impl fmt::Display for Tried<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

impl Loaded {
    /// Opens the first of `candidates` that the loader takes.
    pub(crate) fn open(library: &'static str, candidates: &[String]) -> Result<Self, MissingLibrary> {
        let mut reason = None;
        for name in candidates {
            // SAFETY: the candidates are NVIDIA's libraries, whose initialisers may run on any thread.
            match unsafe { Library::new(name) } {
                Ok(loaded) => return Ok(Self { library: Box::leak(Box::new(loaded)), name: name.clone() }),
                Err(error) => _ = reason.get_or_insert_with(|| said(&error)),
            }
        }
        let reason = reason.unwrap_or_else(|| "nothing to try".to_owned());
        Err(MissingLibrary { library, tried: candidates.to_vec(), reason })
    }

    /// The name or path that it was opened under.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The function of that name, if the library has it.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to that very function.
    pub(crate) unsafe fn find<F: Copy>(&self, symbol: &'static str) -> Option<F> {
        // SAFETY: the caller vouches for the type; the library stays open, so the pointer stays good.
        unsafe { self.library.get::<F>(symbol) }.ok().map(|found| *found)
    }

    /// The function of that name, or an error that names it.
    ///
    /// # Safety
    /// As [`find`](Self::find).
    pub(crate) unsafe fn require<F: Copy>(&self, symbol: &'static str) -> Result<F, MissingSymbol> {
        // SAFETY: passed on to the caller.
        unsafe { self.find(symbol) }.ok_or_else(|| MissingSymbol { symbol, library: self.name.clone() })
    }
}

/// What the loader said, which libloading keeps one level down.
fn said(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The names under which the CUDA driver may be found. It comes with the display driver, not with the toolkit, so the
/// loader knows it.
pub(crate) fn driver_candidates() -> Vec<String> {
    ["libcuda.so.1", "libcuda.so"].map(str::to_owned).to_vec()
}

/// Where a library of the CUDA toolkit may be found: each of `names` as the loader knows it, then in the toolkit's
/// folders.
pub(crate) fn toolkit_candidates(names: &[&str]) -> Vec<String> {
    let folders = toolkit_folders(
        env::var_os("CUDA_HOME").as_deref().map(Path::new),
        env::var_os("CUDA_PATH").as_deref().map(Path::new),
    );
    let plain = names.iter().map(|&name| name.to_owned());
    let placed =
        folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name).to_string_lossy().into_owned()));
    plain.chain(placed).collect()
}

/// Where a toolkit for several architectures keeps this one's libraries.
const TARGET_FOLDER: &str =
    if cfg!(target_arch = "aarch64") { "targets/sbsa-linux/lib" } else { "targets/x86_64-linux/lib" };

/// The folders that a toolkit keeps its libraries in.
fn toolkit_folders(home: Option<&Path>, path: Option<&Path>) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let usual = Path::new("/usr/local/cuda");
    for root in [home, path, Some(usual)].into_iter().flatten() {
        for inner in ["lib64", TARGET_FOLDER] {
            let folder = root.join(inner);
            if !root.as_os_str().is_empty() && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toolkit_is_looked_for_where_the_environment_says_before_the_usual_place() {
        let folders = toolkit_folders(Some(Path::new("/opt/a")), Some(Path::new("/opt/b")));
        let roots: Vec<_> = folders.iter().map(|folder| folder.to_str().expect("plain text")).collect();
        assert_eq!(roots.len(), 6);
        assert!(roots[0].starts_with("/opt/a/lib64") && roots[2].starts_with("/opt/b/lib64"));
        assert!(roots[4..].iter().all(|folder| folder.starts_with("/usr/local/cuda/")));
    }

    #[test]
    fn no_folder_is_tried_twice_and_an_empty_variable_is_none() {
        let usual = toolkit_folders(None, None);
        assert_eq!(toolkit_folders(Some(Path::new("/usr/local/cuda")), Some(Path::new(""))), usual);
    }

    #[test]
    fn plain_names_come_first() {
        let candidates = toolkit_candidates(&["libx.so.2", "libx.so.1"]);
        assert_eq!(&candidates[..2], ["libx.so.2", "libx.so.1"]);
        assert!(candidates[2..].iter().all(|path| path.starts_with('/') || path.contains("/libx.so.")));
        assert_eq!(driver_candidates(), ["libcuda.so.1", "libcuda.so"]);
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_it_and_what_was_tried() {
        let candidates = ["libno-such-thing.so.1".to_owned(), "libno-such-thing.so".to_owned()];
        let error = Loaded::open("libno-such-thing", &candidates).err().expect("there is no such library");
        assert_eq!(error.tried, candidates);
        let text = error.to_string();
        assert!(
            text.starts_with("libno-such-thing could not be loaded; tried libno-such-thing.so.1, libno-such-thing.so")
        );
    }
}
