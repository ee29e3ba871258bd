//! [`PooledSlice`]: memory of Warpool in the shape of a `CudaSlice`.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop,
};
use warpool::memory::DeviceBlock;

use crate::lent::Lent;

/// Memory of a Warpool allocator for cudarc's calls: an argument of its launch builder by reference, a [`DevicePtr`]
/// and [`DevicePtrMut`] for copies and cuBLAS, and [`CudaView`]s of its parts.
///
/// Dropping it makes the stream that it was allocated for wait for its uses in other streams, and returns it to its
/// allocator.
#[derive(Debug)]
pub struct PooledSlice<T> {
    // Dropped before the block: it makes the block's stream wait.
    lent: Lent<T>,
    _block: DeviceBlock,
}

impl<T> PooledSlice<T> {
    pub(crate) fn new(lent: Lent<T>, block: DeviceBlock) -> Self {
        Self { lent, _block: block }
    }

    /// How many elements it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lent.get().len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The whole slice as cudarc's view, whose `slice` and `split_at` return parts.
    #[must_use]
    pub fn as_view(&self) -> CudaView<'_, T> {
        self.lent.get().as_view()
    }

    /// The whole slice as cudarc's exclusive view.
    #[must_use]
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.lent.get_mut().as_view_mut()
    }
}

impl<T> DeviceSlice<T> for PooledSlice<T> {
    fn len(&self) -> usize {
        self.lent.get().len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.lent.get().stream()
    }
}

impl<T> DevicePtr<T> for PooledSlice<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.lent.get().device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for PooledSlice<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.lent.get_mut().device_ptr_mut(stream)
    }
}

// SAFETY: passes on the slice inside, which outlives the arguments as the reference does.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b PooledSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b PooledSlice<T>) -> &mut Self {
        self.arg(arg.lent.get())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut PooledSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut PooledSlice<T>) -> &mut Self {
        self.arg(arg.lent.get_mut())
    }
}
