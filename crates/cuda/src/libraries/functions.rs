//! The functions of NVIDIA's libraries with handles.
//!
//! A library is loaded when its first handle is created. The signatures are written here: a status is a plain number
//! and a handle an untyped pointer, so that one struct serves for all libraries. With the feature `check-bindings` the
//! compiler compares them with cudarc's, as `api.rs` always does: the bindings of five libraries take minutes to build.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use warpool_driver::{ErrorCode, Library, Result};

use crate::error::CallSite;
use crate::shared_library::{MissingLibrary, MissingSymbol, SharedLibrary, toolkit_candidates};

pub(crate) type RawLibraryHandle = *mut c_void;

/// A library's name without version, for errors, and its file names, the newest first.
pub(crate) struct Files {
    pub(crate) library: &'static str,
    pub(crate) names: &'static [&'static str],
}

/// The file names of a library.
pub(crate) const fn files(library: Library) -> Files {
    let (library, names): (_, &[&str]) = match library {
        Library::Blas => ("libcublas", &["libcublas.so.13", "libcublas.so.12", "libcublas.so"]),
        Library::BlasLt => ("libcublasLt", &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"]),
        Library::Dnn => ("libcudnn", &["libcudnn.so.9", "libcudnn.so.8", "libcudnn.so"]),
        Library::Sparse => ("libcusparse", &["libcusparse.so.12", "libcusparse.so"]),
        Library::Solver => ("libcusolver", &["libcusolver.so.12", "libcusolver.so.11", "libcusolver.so"]),
    };
    Files { library, names }
}

pub(crate) struct LibraryFunctions {
    /// Creates a handle.
    pub(crate) create: unsafe extern "C" fn(*mut RawLibraryHandle) -> u32,
    /// Destroys it.
    pub(crate) destroy: unsafe extern "C" fn(RawLibraryHandle) -> u32,
    /// Sets its stream; cuBLASLt's have none.
    pub(crate) set_stream: Option<unsafe extern "C" fn(RawLibraryHandle, CUstream) -> u32>,
    /// The functions of cuBLAS.
    pub(crate) blas: Option<CublasFunctions>,
}

/// The functions that only cuBLAS has.
pub(crate) struct CublasFunctions {
    pub(crate) set_workspace: unsafe extern "C" fn(RawLibraryHandle, *mut c_void, usize) -> u32,
    /// Takes a `cublasMath_t`.
    pub(crate) set_math: unsafe extern "C" fn(RawLibraryHandle, u32) -> u32,
    /// Takes a `cublasAtomicsMode_t`.
    pub(crate) set_atomics: unsafe extern "C" fn(RawLibraryHandle, u32) -> u32,
    /// Takes two `cublasOperation_t`, after the handle.
    pub(crate) sgemm: GemmFunction,
}

/// `cublasSgemm_v2`.
pub(crate) type GemmFunction = unsafe extern "C" fn(
    RawLibraryHandle,
    u32,
    u32,
    c_int,
    c_int,
    c_int,
    *const f32,
    *const f32,
    c_int,
    *const f32,
    c_int,
    *const f32,
    *mut f32,
    c_int,
) -> u32;

/// Compares the signatures with cudarc's. Never called; it only has to compile. Handles and streams are pointers, and
/// the enums have the size of the numbers used here.
#[cfg(feature = "check-bindings")]
const _: () = {
    use cudarc::{cublas, cublaslt, cudnn, cusolver, cusparse};
    macro_rules! check {
        ($library:ident, $status:ident, $handle:ident: $create:ident $destroy:ident $($set_stream:ident)?) => {
            let _: unsafe fn(*mut *mut $library::sys::$handle) -> $library::sys::$status = $library::sys::$create;
            let _: unsafe fn(*mut $library::sys::$handle) -> $library::sys::$status = $library::sys::$destroy;
            $(let _: unsafe fn(*mut $library::sys::$handle, *mut $library::sys::CUstream_st) -> $library::sys::$status =
                $library::sys::$set_stream;)?
            assert!(size_of::<$library::sys::$status>() == 4);
        };
    }
    check!(cublas, cublasStatus_t, cublasContext: cublasCreate_v2 cublasDestroy_v2 cublasSetStream_v2);
    check!(cublaslt, cublasStatus_t, cublasLtContext: cublasLtCreate cublasLtDestroy);
    check!(cudnn, cudnnStatus_t, cudnnContext: cudnnCreate cudnnDestroy cudnnSetStream);
    check!(cusparse, cusparseStatus_t, cusparseContext: cusparseCreate cusparseDestroy cusparseSetStream);
    check!(cusolver, cusolverStatus_t, cusolverDnContext: cusolverDnCreate cusolverDnDestroy cusolverDnSetStream);

    use cublas::sys::{cublasAtomicsMode_t, cublasHandle_t, cublasMath_t, cublasOperation_t, cublasStatus_t};
    let _: unsafe fn(cublasHandle_t, *mut c_void, usize) -> cublasStatus_t = cublas::sys::cublasSetWorkspace_v2;
    let _: unsafe fn(cublasHandle_t, cublasMath_t) -> cublasStatus_t = cublas::sys::cublasSetMathMode;
    let _: unsafe fn(cublasHandle_t, cublasAtomicsMode_t) -> cublasStatus_t = cublas::sys::cublasSetAtomicsMode;
    let _: unsafe fn(
        cublasHandle_t,
        cublasOperation_t,
        cublasOperation_t,
        c_int,
        c_int,
        c_int,
        *const f32,
        *const f32,
        c_int,
        *const f32,
        c_int,
        *const f32,
        *mut f32,
        c_int,
    ) -> cublasStatus_t = cublas::sys::cublasSgemm_v2;
    assert!(size_of::<cublasMath_t>() == 4 && size_of::<cublasAtomicsMode_t>() == 4);
    assert!(size_of::<cublasOperation_t>() == 4);
};

/// Why a library cannot be used.
enum Unavailable {
    Library(MissingLibrary),
    Symbol(MissingSymbol),
}

impl LibraryFunctions {
    fn load(library: Library) -> std::result::Result<Self, Unavailable> {
        let files = files(library);
        let loaded =
            SharedLibrary::open(files.library, &toolkit_candidates(files.names)).map_err(Unavailable::Library)?;
        Self::resolve(library, &loaded).map_err(Unavailable::Symbol)
    }

    fn resolve(library: Library, loaded: &SharedLibrary) -> std::result::Result<Self, MissingSymbol> {
        let (create, destroy, set_stream) = match library {
            Library::Blas => ("cublasCreate_v2", "cublasDestroy_v2", Some("cublasSetStream_v2")),
            Library::BlasLt => ("cublasLtCreate", "cublasLtDestroy", None),
            Library::Dnn => ("cudnnCreate", "cudnnDestroy", Some("cudnnSetStream")),
            Library::Sparse => ("cusparseCreate", "cusparseDestroy", Some("cusparseSetStream")),
            Library::Solver => ("cusolverDnCreate", "cusolverDnDestroy", Some("cusolverDnSetStream")),
        };
        Ok(Self {
            // SAFETY: every such function has this signature, which `check-bindings` compares.
            create: unsafe { loaded.require(create) }?,
            // SAFETY: every such function has this signature, which `check-bindings` compares.
            destroy: unsafe { loaded.require(destroy) }?,
            set_stream: match set_stream {
                // SAFETY: every such function has this signature, which `check-bindings` compares.
                Some(symbol) => Some(unsafe { loaded.require(symbol) }?),
                None => None,
            },
            blas: if library == Library::Blas { Some(CublasFunctions::resolve(loaded)?) } else { None },
        })
    }
}

impl CublasFunctions {
    fn resolve(loaded: &SharedLibrary) -> std::result::Result<Self, MissingSymbol> {
        Ok(Self {
            // SAFETY: this function's signature, which `check-bindings` compares.
            set_workspace: unsafe { loaded.require("cublasSetWorkspace_v2") }?,
            // SAFETY: this function's signature, which `check-bindings` compares.
            set_math: unsafe { loaded.require("cublasSetMathMode") }?,
            // SAFETY: this function's signature, which `check-bindings` compares.
            set_atomics: unsafe { loaded.require("cublasSetAtomicsMode") }?,
            // SAFETY: this function's signature, which `check-bindings` compares.
            sgemm: unsafe { loaded.require("cublasSgemm_v2") }?,
        })
    }
}

/// The libraries that were loaded so far.
#[derive(Default)]
pub(crate) struct LoadedLibraries([OnceLock<LibraryFunctions>; Library::ALL.len()]);

impl LoadedLibraries {
    /// The library, loaded at its first use.
    pub(crate) fn get(&self, site: CallSite<'_>, library: Library) -> Result<&LibraryFunctions> {
        let functions = &self.0[library as usize];
        if let Some(loaded) = functions.get() {
            return Ok(loaded);
        }
        // A failure is not remembered: the library may be installed later.
        match LibraryFunctions::load(library) {
            Ok(loaded) => Ok(functions.get_or_init(|| loaded)),
            Err(Unavailable::Library(missing)) => {
                Err(site.explain(ErrorCode::SharedObjectInitFailed, missing.to_string()))
            }
            Err(Unavailable::Symbol(missing)) => {
                Err(site.explain(ErrorCode::SharedObjectSymbolNotFound, missing.to_string()))
            }
        }
    }

    /// Sets the functions of a library, for tests.
    #[cfg(test)]
    pub(crate) fn set_fake(&self, library: Library, functions: LibraryFunctions) {
        assert!(self.0[library as usize].set(functions).is_ok(), "{library} is loaded already");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_numbered_in_order() {
        for (index, library) in Library::ALL.into_iter().enumerate() {
            assert_eq!(library as usize, index);
        }
    }

    #[test]
    fn another_library_is_refused_with_the_first_missing_symbol() {
        let Ok(other) = SharedLibrary::open("libc", &["libc.so.6".to_owned()]) else { return };
        let first_symbols = ["cublasCreate_v2", "cublasLtCreate", "cudnnCreate", "cusparseCreate", "cusolverDnCreate"];
        for (library, symbol) in Library::ALL.into_iter().zip(first_symbols) {
            let missing = LibraryFunctions::resolve(library, &other).err().expect("the C library is another");
            assert_eq!(missing.to_string(), format!("libc.so.6 has no symbol {symbol}"));
        }
    }
}
