//! A `CudaSlice` over memory that cudarc does not own.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream};

/// A `CudaSlice` whose memory belongs to someone else. When dropped, it makes its stream wait for cudarc's uses, and
/// frees nothing.
#[derive(Debug)]
pub(crate) struct Lent<T> {
    /// `Some` until it is dropped.
    slice: Option<CudaSlice<T>>,
}

impl<T> Lent<T> {
    /// # Safety
    /// There is memory for `len` elements at `ptr`, of the stream's context, for as long as this value or a view is
    /// used, and until the work that uses it has completed.
    pub(crate) unsafe fn new(stream: &Arc<CudaStream>, ptr: CUdeviceptr, len: usize) -> Self {
        // SAFETY: the caller promises the memory. It is never freed by cudarc: `drop` takes it back first.
        Self { slice: Some(unsafe { stream.upgrade_device_ptr(ptr, len) }) }
    }

    pub(crate) fn get(&self) -> &CudaSlice<T> {
        self.slice.as_ref().expect("it is taken only by drop")
    }

    /// Not public: with `&mut CudaSlice` a user could move the slice out, and cudarc would free the memory.
    pub(crate) fn get_mut(&mut self) -> &mut CudaSlice<T> {
        self.slice.as_mut().expect("it is taken only by drop")
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            // Its stream waits for the events of its reads and writes, in whichever streams those were.
            let _ = slice.leak();
        }
    }
}
