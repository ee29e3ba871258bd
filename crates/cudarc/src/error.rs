//! Errors of either library.

/// The result of a call into this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of Warpool.
    #[error(transparent)]
    Warpool(#[from] warpool::Error),

    /// An error of cudarc.
    #[error("cudarc: {0}")]
    Cudarc(#[from] cudarc::driver::DriverError),

    /// Memory of the simulated GPU, which CUDA cannot access.
    #[error("the allocator is over the {kind} driver; cudarc needs memory of CUDA: open a CudaDriver")]
    NotCuda {
        /// The driver's kind.
        kind: &'static str,
    },

    /// A context that is not its device's primary one.
    #[error("the cudarc context is not the primary context of its device, which Warpool uses; use CudaContext::new")]
    NotPrimary,

    /// A stream of another context.
    #[error("the cudarc stream belongs to device {stream}, and the pool to device {pool}; use one pool per device")]
    StreamContext {
        /// The stream's device.
        stream: usize,
        /// The pool's device.
        pool: usize,
    },

    /// More elements than memory can have.
    #[error("{len} elements are more than any memory has; check how the length was computed")]
    TooLong {
        /// How many.
        len: usize,
    },
}

impl Error {
    /// There was not enough device memory.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Warpool(error) => error.is_out_of_memory(),
            Self::Cudarc(error) => error.0 == cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            _ => false,
        }
    }
}
