//! Libraries that work through handles: the vendor's linear algebra, deep learning and solvers.
//!
//! A handle belongs to one device and to one thread at a time: calls on one handle from two threads at once are made
//! one after the other, but what the one sets the other will use. Warpool knows how to make handles, point them at
//! streams and give cuBLAS its memory; what else a library can do, callers do through its own functions and
//! [`library_raw`](Libraries::library_raw). The one product here, `blas_sgemm`, is there so that all of it can be shown
//! to work, on real and on simulated devices.

use std::fmt;

use crate::{DeviceId, DevicePtr, HandleId, RawHandle, Result, StreamId};

/// A library with handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Library {
    /// Dense linear algebra.
    Blas,
    /// Matrix products with fused epilogues. Its handles have no stream and no workspace: every call is given them.
    BlasLt,
    /// Convolutions and other layers of networks.
    Dnn,
    /// Sparse linear algebra.
    Sparse,
    /// Factorisations and solvers, of dense matrices.
    Solver,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Blas, Self::BlasLt, Self::Dnn, Self::Sparse, Self::Solver];

    /// What NVIDIA calls it.
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

/// How precisely cuBLAS multiplies numbers of 32 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BlasMath {
    /// With all their bits.
    #[default]
    Default,
    /// Rounded to TF32, with 10 bits of mantissa, where that is faster.
    Tf32,
}

/// One matrix of a product, as it lies in memory: column by column, `stride` numbers from one column to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlasMatrix {
    /// Where it starts.
    pub ptr: DevicePtr,
    /// Numbers from one column to the next; at least as many as a column has.
    pub stride: u32,
    /// Whether it takes part with rows and columns exchanged.
    pub transposed: bool,
}

/// A product of matrices of 32-bit numbers: `c = alpha * a * b + beta * c`, where `a` is `m` by `k`, `b` is `k` by `n`
/// and `c` is `m` by `n` (`a` and `b` after their exchange of rows and columns, if they are
/// [`transposed`](BlasMatrix::transposed)).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgemm {
    /// Rows of `a` and `c`.
    pub m: u32,
    /// Columns of `b` and `c`.
    pub n: u32,
    /// Columns of `a`, rows of `b`.
    pub k: u32,
    /// What the product is multiplied by.
    pub alpha: f32,
    /// The left matrix.
    pub a: BlasMatrix,
    /// The right matrix.
    pub b: BlasMatrix,
    /// What the old `c` is multiplied by; 0 does not read it.
    pub beta: f32,
    /// Where the result goes. Never transposed (`InvalidValue`).
    pub c: BlasMatrix,
}

impl Sgemm {
    /// Why the product is impossible, if it is: strides that do not fit, a transposed result, or sizes that cuBLAS cannot
    /// count.
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
    /// Rows and columns in memory, of a matrix that takes part with `rows` rows and `columns` columns.
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

/// Libraries with handles. A library is loaded at its first handle; one that is not there gives
/// `SharedObjectInitFailed`, one that is too old `SharedObjectSymbolNotFound`, and the detail names it. A library's own
/// status becomes the nearest code, and the detail names it too.
pub trait Libraries {
    /// Makes a handle, on the legacy default stream. *During capture: free*, although the libraries' own functions are
    /// not.
    fn library_create(&self, library: Library, device: DeviceId) -> Result<HandleId>;

    /// Takes it away. May wait for all work of its device, as the libraries' own functions do, and breaks captures in
    /// every mode thereby: so it is not even tried while a stream of the device captures (`StreamCaptureUnsupported`).
    /// *During capture: refused.*
    fn library_destroy(&self, handle: HandleId) -> Result<()>;

    /// Points it at a stream of its device (`InvalidValue` for one of another device). A cuBLAS handle forgets its
    /// workspace thereby, and goes back to cuBLAS's own. `NotSupported` for [`Library::BlasLt`]. *During capture:
    /// free.*
    fn library_set_stream(&self, handle: HandleId, stream: StreamId) -> Result<()>;

    /// The library's own handle, for its own functions. Using it is unsafe code of the caller, which must use it when no
    /// other thread does, and leave it as it was: not destroyed, on its stream, with scalars in host memory. *During
    /// capture: free.*
    fn library_raw(&self, handle: HandleId) -> Result<RawHandle>;

    /// Gives a cuBLAS handle (`InvalidHandle` for others) memory to work with, instead of cuBLAS's own; 0 bytes is none
    /// at all. `InvalidValue` unless the address is a multiple of 256 and the range is memory that the device may use. It
    /// belongs to the handle until the next call of this or of [`library_set_stream`](Self::library_set_stream). *During
    /// capture: free.*
    fn blas_set_workspace(&self, handle: HandleId, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Sets how precise a cuBLAS handle (`InvalidHandle` for others) is. *During capture: free.*
    fn blas_set_math(&self, handle: HandleId, math: BlasMath) -> Result<()>;

    /// Whether a cuBLAS handle (`InvalidHandle` for others) may use atomic operations, whose results differ from run to
    /// run; they start out forbidden. *During capture: free.*
    fn blas_set_atomics(&self, handle: HandleId, allowed: bool) -> Result<()>;

    /// Multiplies, in the order of the handle's stream. `InvalidValue` for a product that [`Sgemm::check`] refuses, and
    /// unless its matrices and the handle's workspace are memory that the device may use. `InvalidHandle` for handles of
    /// other libraries. A product with `m` or `n` 0 does nothing. *During capture: stream* (the handle's).
    fn blas_sgemm(&self, handle: HandleId, product: &Sgemm) -> Result<()>;
}
