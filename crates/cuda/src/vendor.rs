//! NVIDIA's libraries with handles: what their files and functions are called.
//!
//! A library is loaded when the first handle of it is wanted. The signatures are written by hand: a status comes as a
//! plain number, and a handle is an address of nothing in particular, so that one table does for all. The feature
//! `check-bindings` has the compiler compare them with cudarc's, as `api.rs` always does: those of five libraries would
//! take minutes to build.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use warpool_driver::{ErrorCode, Library, Result};

use crate::error::Site;
use crate::library::{Loaded, MissingLibrary, MissingSymbol, toolkit_candidates};

/// A handle as its library knows it.
pub(crate) type RawLibraryHandle = *mut c_void;

/// The name of a library without version, for errors, and the names of its file, the newest first.
pub(crate) struct Files {
    pub(crate) library: &'static str,
    pub(crate) names: &'static [&'static str],
}

/// What the files of a library are called.
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

/// What every library with handles has.
pub(crate) struct Vendor {
    /// Makes a handle.
    pub(crate) create: unsafe extern "C" fn(*mut RawLibraryHandle) -> u32,
    /// Takes it away.
    pub(crate) destroy: unsafe extern "C" fn(RawLibraryHandle) -> u32,
    /// Points it at a stream; cuBLASLt's have none.
    pub(crate) set_stream: Option<unsafe extern "C" fn(RawLibraryHandle, CUstream) -> u32>,
    /// What only cuBLAS has.
    pub(crate) blas: Option<Cublas>,
}

/// cuBLAS's own functions.
pub(crate) struct Cublas {
    pub(crate) set_workspace: unsafe extern "C" fn(RawLibraryHandle, *mut c_void, usize) -> u32,
    /// Takes a `cublasMath_t`.
    pub(crate) set_math: unsafe extern "C" fn(RawLibraryHandle, u32) -> u32,
    /// Takes a `cublasAtomicsMode_t`.
    pub(crate) set_atomics: unsafe extern "C" fn(RawLibraryHandle, u32) -> u32,
    /// Takes two `cublasOperation_t`, behind the handle.
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

/// Compares the signatures with cudarc's. Never called; it only has to compile. A handle is a pointer, a stream too,
/// and the enums are as long as the numbers that stand for them here.
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

impl Vendor {
    fn load(library: Library) -> std::result::Result<Self, Unavailable> {
        let files = files(library);
        let loaded = Loaded::open(files.library, &toolkit_candidates(files.names)).map_err(Unavailable::Library)?;
        Self::resolve(library, &loaded).map_err(Unavailable::Symbol)
    }

    fn resolve(library: Library, loaded: &Loaded) -> std::result::Result<Self, MissingSymbol> {
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
            blas: if library == Library::Blas { Some(Cublas::resolve(loaded)?) } else { None },
        })
    }
}

impl Cublas {
    fn resolve(loaded: &Loaded) -> std::result::Result<Self, MissingSymbol> {
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

/// The libraries that were wanted so far.
#[derive(Default)]
pub(crate) struct Vendors([OnceLock<Vendor>; Library::ALL.len()]);

impl Vendors {
    /// The library, loaded if it is not yet.
    pub(crate) fn get(&self, site: Site<'_>, library: Library) -> Result<&Vendor> {
        let place = &self.0[library as usize];
        if let Some(loaded) = place.get() {
            return Ok(loaded);
        }
        // Not remembered when it fails: it may be installed, or found, later.
        match Vendor::load(library) {
            Ok(loaded) => Ok(place.get_or_init(|| loaded)),
            Err(Unavailable::Library(missing)) => {
                Err(site.explain(ErrorCode::SharedObjectInitFailed, missing.to_string()))
            }
            Err(Unavailable::Symbol(missing)) => {
                Err(site.explain(ErrorCode::SharedObjectSymbolNotFound, missing.to_string()))
            }
        }
    }

    /// Puts functions in a library's place, for tests.
    #[cfg(test)]
    pub(crate) fn pretend(&self, library: Library, vendor: Vendor) {
        assert!(self.0[library as usize].set(vendor).is_ok(), "{library} is loaded already");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_library_has_a_place_of_its_own() {
        for (index, library) in Library::ALL.into_iter().enumerate() {
            assert_eq!(library as usize, index);
        }
    }

    #[test]
    fn a_library_that_is_another_is_refused_by_the_first_symbol_that_it_lacks() {
        let Ok(other) = Loaded::open("libc", &["libc.so.6".to_owned()]) else { return };
        let wanted = ["cublasCreate_v2", "cublasLtCreate", "cudnnCreate", "cusparseCreate", "cusolverDnCreate"];
        for (library, symbol) in Library::ALL.into_iter().zip(wanted) {
            let missing = Vendor::resolve(library, &other).err().expect("the C library is none of them");
            assert_eq!(missing.to_string(), format!("libc.so.6 has no symbol {symbol}"));
        }
    }
}
