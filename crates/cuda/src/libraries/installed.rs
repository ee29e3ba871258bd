//! Which of NVIDIA's libraries this machine has. The query loads them, and keeps them loaded; nothing is initialized.
//! It neither panics nor fails: what is not found is reported as missing.

use std::ffi::c_int;

use warpool_driver::Library;

use super::functions;
use super::nvrtc;
use crate::shared_library::{SharedLibrary, driver_candidates, toolkit_candidates};
use crate::{DriverVersion, version_of};

/// Whether one library is installed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryStatus {
    /// NVIDIA's name for it.
    pub name: &'static str,
    /// What does not work without it.
    pub if_missing: &'static str,
    /// The library, if it was found.
    pub found: Option<FoundLibrary>,
}

/// An installed library.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundLibrary {
    /// The name or path that it was opened under.
    pub name: String,
    /// Its version, if it reports one.
    pub version: Option<String>,
}

/// One library: its file names, and how to query its version.
struct Entry {
    name: &'static str,
    if_missing: &'static str,
    candidates: fn() -> Vec<String>,
    version: fn(&SharedLibrary) -> Option<String>,
}

const ENTRIES: &[Entry] = &[
    Entry {
        name: "CUDA driver",
        if_missing: "no GPU can be used, only the simulated one",
        candidates: driver_candidates,
        version: |library| version_of(library).ok().map(|version| version.to_string()),
    },
    Entry {
        name: "NVRTC",
        if_missing: "kernels cannot be compiled from source",
        candidates: || toolkit_candidates(nvrtc::NAMES),
        version: nvrtc_version,
    },
    Entry {
        name: Library::Blas.name(),
        if_missing: "no cuBLAS handles: no dense linear algebra",
        candidates: || toolkit_candidates(functions::files(Library::Blas).names),
        version: |library| property_version(library, "cublasGetProperty"),
    },
    Entry {
        name: Library::BlasLt.name(),
        if_missing: "no cuBLASLt handles: no matrix products with fused epilogues",
        candidates: || toolkit_candidates(functions::files(Library::BlasLt).names),
        version: |library| number_version(library, "cublasLtGetVersion", lt_version),
    },
    Entry {
        name: Library::Dnn.name(),
        if_missing: "no cuDNN handles: no convolutions or fused attention",
        candidates: || toolkit_candidates(functions::files(Library::Dnn).names),
        version: |library| number_version(library, "cudnnGetVersion", dnn_version),
    },
    Entry {
        name: Library::Sparse.name(),
        if_missing: "no cuSPARSE handles: no sparse linear algebra",
        candidates: || toolkit_candidates(functions::files(Library::Sparse).names),
        version: |library| property_version(library, "cusparseGetProperty"),
    },
    Entry {
        name: Library::Solver.name(),
        if_missing: "no cuSOLVER handles: no factorisations or solvers",
        candidates: || toolkit_candidates(functions::files(Library::Solver).names),
        version: |library| property_version(library, "cusolverGetProperty"),
    },
];

/// All libraries that Warpool can use, the driver first.
#[must_use]
pub fn libraries() -> Vec<LibraryStatus> {
    let look = |entry: &Entry| {
        let loaded = SharedLibrary::open(entry.name, &(entry.candidates)()).ok();
        let found =
            loaded.map(|library| FoundLibrary { version: (entry.version)(&library), name: library.name().to_owned() });
        LibraryStatus { name: entry.name, if_missing: entry.if_missing, found }
    };
    ENTRIES.iter().map(look).collect()
}

fn nvrtc_version(library: &SharedLibrary) -> Option<String> {
    // SAFETY: `nvrtcResult nvrtcVersion(int *major, int *minor)`.
    let get = unsafe { library.find::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> u32>("nvrtcVersion") }?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes one int each.
    let code = unsafe { get(&raw mut major, &raw mut minor) };
    let version = DriverVersion { major: major.unsigned_abs(), minor: minor.unsigned_abs() };
    (code == 0).then(|| version.to_string())
}

/// The version of a library that reports it property by property: `status xGetProperty(libraryPropertyType, int *)`.
fn property_version(library: &SharedLibrary, symbol: &'static str) -> Option<String> {
    // SAFETY: the signature that every such function has; the type of the property and the status are C enums.
    let get = unsafe { library.find::<unsafe extern "C" fn(u32, *mut c_int) -> u32>(symbol) }?;
    let part = |property: u32| {
        let mut value = 0;
        // SAFETY: writes one int.
        let code = unsafe { get(property, &raw mut value) };
        (code == 0).then_some(value)
    };
    // MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL.
    Some(format!("{}.{}.{}", part(0)?, part(1)?, part(2)?))
}

/// The version of a library that reports it as one number: `size_t xGetVersion(void)`.
fn number_version(library: &SharedLibrary, symbol: &'static str, read: fn(usize) -> String) -> Option<String> {
    // SAFETY: the signature that both such functions have.
    let get = unsafe { library.find::<unsafe extern "C" fn() -> usize>(symbol) }?;
    // SAFETY: takes nothing, initializes nothing.
    Some(read(unsafe { get() }))
}

/// cuBLASLt: 120402 is 12.4.2, and so on in 13.0.
fn lt_version(number: usize) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

/// cuDNN: 90100 is 9.1.0, but before 9 the minor version had one digit: 8902 is 8.9.2.
fn dnn_version(number: usize) -> String {
    let major_unit = if number >= 90_000 { 10_000 } else { 1_000 };
    format!("{}.{}.{}", number / major_unit, number % major_unit / 100, number % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_library_is_reported() {
        let names: Vec<_> = libraries().iter().map(|library| library.name).collect();
        assert_eq!(names, ["CUDA driver", "NVRTC", "cuBLAS", "cuBLASLt", "cuDNN", "cuSPARSE", "cuSOLVER"]);
        assert!(libraries().iter().all(|library| !library.if_missing.is_empty()));
    }

    #[test]
    fn candidates_are_shared_object_names() {
        for entry in ENTRIES {
            let candidates = (entry.candidates)();
            assert!(candidates[0].starts_with("lib") && candidates[0].contains(".so."), "{candidates:?}");
        }
    }

    #[test]
    fn version_numbers_are_decoded_for_each_library() {
        assert_eq!(lt_version(120_402), "12.4.2");
        assert_eq!(lt_version(130_000), "13.0.0");
        assert_eq!(dnn_version(90_100), "9.1.0");
        assert_eq!(dnn_version(91_302), "9.13.2");
        assert_eq!(dnn_version(8_902), "8.9.2");
    }
}
