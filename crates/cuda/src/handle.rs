//! Handles of CUDA's objects.

use cudarc::driver::sys;
use warpool_driver::RawHandle;

/// A handle of a CUDA object, valid on every thread. Never dereferenced here.
pub(crate) struct CudaHandle<T>(*mut T);

pub(crate) type Context = CudaHandle<sys::CUctx_st>;
pub(crate) type StreamHandle = CudaHandle<sys::CUstream_st>;
pub(crate) type GraphHandle = CudaHandle<sys::CUgraph_st>;
pub(crate) type NodeHandle = CudaHandle<sys::CUgraphNode_st>;

// SAFETY: a handle is only a value here; CUDA's objects may be used from any thread.
unsafe impl<T> Send for CudaHandle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for CudaHandle<T> {}

impl<T> Clone for CudaHandle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for CudaHandle<T> {}

impl<T> PartialEq for CudaHandle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Eq for CudaHandle<T> {}

impl<T> CudaHandle<T> {
    /// A handle that CUDA returned.
    pub(crate) const fn new(raw: *mut T) -> Self {
        Self(raw)
    }

    /// A handle that was passed as a number.
    pub(crate) const fn from_number(number: u64) -> Self {
        Self(std::ptr::without_provenance_mut(number as usize))
    }

    /// The pointer for CUDA's functions.
    pub(crate) const fn raw(self) -> *mut T {
        self.0
    }

    /// The handle as a number.
    pub(crate) fn number(self) -> u64 {
        self.0.addr() as u64
    }

    /// The handle as the contract returns it.
    pub(crate) fn exposed(self) -> RawHandle {
        RawHandle(self.number())
    }
}
