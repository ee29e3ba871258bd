//! NVIDIA's libraries with handles: linear algebra, deep learning, solvers.
//!
//! A handle belongs to one device, and one thread at a time should use it: calls on one handle from several threads are
//! serialized, but share its settings. The contract creates handles, sets their streams and gives cuBLAS its workspace;
//! for everything else callers use the library's own functions with [`library_raw`](Libraries::library_raw). The one
//! product here, `blas_sgemm`, serves to test all of this on real and simulated devices.

use std::fmt;

use crate::{DeviceId, DevicePtr, HandleId, RawHandle, Result, StreamId};

/// A library with handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Library {
    /// Dense linear algebra.
    Blas,
    /// Matrix products with fused epilogues. Its handles have no stream and no workspace: every call takes them.
    BlasLt,
    /// Convolutions and other layers of neural networks.
    Dnn,
    /// Sparse linear algebra.
    Sparse,
    /// Factorizations and solvers for dense matrices.
    Solver,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Blas, Self::BlasLt, Self::Dnn, Self::Sparse, Self::Solver];

    /// NVIDIA's name for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blas => "cuBLAS",
            Self::BlasLt => "cuBLASLt",
            Self::Dnn => "cuDNN",
            Self::Sparse => "cuSPARSE",
            Self::Solver => "cuSOLVER",
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The precision of cuBLAS's products of 32-bit numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BlasMath {
    /// Full precision.
    #[default]
    Default,
    /// TF32, with 10 bits of mantissa, where that is faster.
    Tf32,
}

/// A matrix of a product, in column-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlasMatrix {
    /// Its address.
    pub ptr: DevicePtr,
    /// The distance from one column to the next, in numbers; at least the length of a column.
    pub stride: u32,
    /// Whether the product uses its transpose.
    pub transposed: bool,
}

/// A product of matrices of 32-bit numbers: `c = alpha * a * b + beta * c`, where `a` is `m` by `k`, `b` is `k` by `n`
/// and `c` is `m` by `n` (`a` and `b` after transposition, if they are [`transposed`](BlasMatrix::transposed)).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgemm {
    /// Rows of `a` and `c`.
    pub m: u32,
    /// Columns of `b` and `c`.
    pub n: u32,
    /// Columns of `a`, rows of `b`.
    pub k: u32,
    /// The factor of the product.
    pub alpha: f32,
    /// The left matrix.
    pub a: BlasMatrix,
    /// The right matrix.
    pub b: BlasMatrix,
    /// The factor of the old `c`; with 0 it is not read.
    pub beta: f32,
    /// The result. Not transposed (`InvalidValue`).
    pub c: BlasMatrix,
}

impl Sgemm {
    /// Why the product is impossible, if it is: strides that do not fit, a transposed result, or sizes that cuBLAS
    /// cannot count.
    pub fn check(&self) -> std::result::Result<(), String> {
        let Self { m, n, k, a, b, c, .. } = *self;
        if c.transposed {
            return Err("the result of a product cannot be transposed".to_owned());
        }
        // cuBLAS counts in 32 bits with a sign.
        let counts = [m, n, k, a.stride, b.stride, c.stride];
        if let Some(count) = counts.into_iter().find(|&count| i32::try_from(count).is_err()) {
            return Err(format!("{count} is more than cuBLAS can count"));
        }
        for (name, matrix, (rows, _)) in [("a", a, a.shape(m, k)), ("b", b, b.shape(k, n)), ("c", c, (m, n))] {
            if matrix.stride < rows.max(1) {
                return Err(format!("{name} has columns of {rows}, and a stride of {}", matrix.stride));
            }
        }
        Ok(())
    }

    /// The memory that the product uses: start and length of each matrix, as far as it is read or written.
    pub fn ranges(&self) -> impl Iterator<Item = (DevicePtr, u64)> {
        let Self { m, n, k, alpha, a, b, c, .. } = *self;
        let is_read = alpha != 0.0;
        let extent = |matrix: BlasMatrix, rows, columns| (matrix.ptr, matrix.extent(rows, columns));
        [(extent(a, m, k), is_read), (extent(b, k, n), is_read), (extent(c, m, n), true)]
            .into_iter()
            .filter_map(|(range, is_used)| is_used.then_some(range))
    }
}

impl BlasMatrix {
    /// Rows and columns in memory, of a matrix that the product uses with `rows` rows and `columns` columns.
    const fn shape(&self, rows: u32, columns: u32) -> (u32, u32) {
        if self.transposed { (columns, rows) } else { (rows, columns) }
    }

    /// How many bytes there are from the start to the end of the last column.
    fn extent(&self, rows: u32, columns: u32) -> u64 {
        let (rows, columns) = self.shape(rows, columns);
        if rows == 0 || columns == 0 {
            return 0;
        }
        let numbers = (u64::from(columns) - 1).saturating_mul(u64::from(self.stride)).saturating_add(u64::from(rows));
        numbers.saturating_mul(size_of::<f32>() as u64)
    }
}

/// Libraries with handles. A library is loaded with its first handle; one that is not installed gives
/// `SharedObjectInitFailed`, one that is too old `SharedObjectSymbolNotFound`, and the detail names it. A library's own
/// status becomes the nearest error code, and the detail names the status.
pub trait Libraries {
    /// Creates a handle, on the legacy default stream. *During capture: free*, unlike the libraries' own functions.
    fn library_create(&self, library: Library, device: DeviceId) -> Result<HandleId>;

    /// Destroys it. It may wait for all work of its device, as the libraries' own functions do, which would invalidate
    /// captures in every mode: so it is refused while a stream of the device captures (`StreamCaptureUnsupported`).
    /// *During capture: refused.*
    fn library_destroy(&self, handle: HandleId) -> Result<()>;

    /// Sets its stream, one of its device (`InvalidValue` for one of another device). A cuBLAS handle then uses
    /// cuBLAS's own workspace again. `NotSupported` for [`Library::BlasLt`]. *During capture: free.*
    fn library_set_stream(&self, handle: HandleId, stream: StreamId) -> Result<()>;

    /// The library's own handle, for its own functions. Using it is unsafe code of the caller. It must not be used by
    /// two threads at once, and must be left as it was: not destroyed, on its stream, with scalars in host memory.
    /// *During capture: free.*
    fn library_raw(&self, handle: HandleId) -> Result<RawHandle>;

    /// Sets the workspace of a cuBLAS handle (`InvalidHandle` for others), instead of cuBLAS's own; 0 bytes means none.
    /// `InvalidValue` unless the address is a multiple of 256 and the range is memory that the device may use. It
    /// belongs to the handle until the next call of this or of [`library_set_stream`](Self::library_set_stream).
    /// *During capture: free.*
    fn blas_set_workspace(&self, handle: HandleId, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Sets the precision of a cuBLAS handle (`InvalidHandle` for others). *During capture: free.*
    fn blas_set_math(&self, handle: HandleId, math: BlasMath) -> Result<()>;

    /// Whether a cuBLAS handle (`InvalidHandle` for others) may use atomic operations, whose results differ from run to
    /// run; initially it may not. *During capture: free.*
    fn blas_set_atomics(&self, handle: HandleId, allowed: bool) -> Result<()>;

    /// Computes a product in the order of the handle's stream. `InvalidValue` for a product that [`Sgemm::check`]
    /// refuses, and unless its matrices and the handle's workspace are memory that the device may use. `InvalidHandle`
    /// for handles of other libraries. A product with `m` or `n` 0 does nothing. *During capture: stream* (the
    /// handle's).
    fn blas_sgemm(&self, handle: HandleId, product: &Sgemm) -> Result<()>;
}
