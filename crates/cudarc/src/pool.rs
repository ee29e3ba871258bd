//! [`CudarcPool`]: a Warpool allocator for the streams of one cudarc context.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{
    CudaContext, CudaStream, CudaView, CudaViewMut, DeviceRepr, DeviceSlice, HostSlice, ValidAsZeroBits,
};
use warpool::driver::{ForeignStream, RawHandle};
use warpool::memory::{Allocate, DeviceAllocator, SharedAllocator};
use warpool::typed::{IntoView, IntoViewMut, Pod};
use warpool::{Device, Stream};

use crate::lent::Lent;
use crate::slice::PooledSlice;
use crate::{Error, Result};

/// A Warpool allocator for the streams of one cudarc context. Cheap to clone.
#[derive(Clone, Debug)]
pub struct CudarcPool {
    allocator: Arc<dyn DeviceAllocator>,
    context: Arc<CudaContext>,
    device: Device,
    /// The streams that were adopted, by cudarc's handle: querying CUDA about one costs more than an allocation.
    adopted: Arc<Mutex<Vec<(usize, Stream)>>>,
}

impl CudarcPool {
    /// Memory of `allocator`, which is over a `CudaDriver`, for streams of `context`, which is the primary context of
    /// its device ([`CudaContext::new`]): the one that Warpool uses too.
    pub fn new(allocator: &impl SharedAllocator, context: &Arc<CudaContext>) -> Result<Self> {
        let allocator = allocator.to_dyn();
        let instance = allocator.instance();
        let kind = instance.driver().kind();
        if kind != "cuda" {
            return Err(Error::NotCuda { kind });
        }
        if !context.is_primary() {
            return Err(Error::NotPrimary);
        }
        let index = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
        let device = instance.device(index)?;
        Ok(Self { allocator, context: Arc::clone(context), device, adopted: Arc::default() })
    }

    /// Its allocator.
    #[must_use]
    pub fn allocator(&self) -> &Arc<dyn DeviceAllocator> {
        &self.allocator
    }

    /// Adopts a cudarc stream, which is kept until the process ends. [`warpool::Error::PerThreadStream`] for the
    /// per-thread default stream, which is another one on each thread.
    pub fn adopt(&self, stream: &Arc<CudaStream>) -> Result<Stream> {
        self.expect_own(stream)?;
        let handle = stream.cu_stream().expose_provenance();
        // An adopted stream is kept, so no other stream can get its handle.
        if let Some((_, own)) = lock(&self.adopted).iter().find(|(known, _)| *known == handle) {
            return Ok(own.clone());
        }
        keep(stream);
        // SAFETY: it is a stream of this device's primary context, and never destroyed from here on.
        let foreign = unsafe { ForeignStream::new(RawHandle(handle as u64)) };
        let own = Stream::external(&self.device, foreign)?;
        lock(&self.adopted).push((handle, own.clone()));
        Ok(own)
    }

    /// `len` elements for work that begins in `stream`; they are not written.
    ///
    /// # Safety
    /// As for cudarc's `CudaStream::alloc`: they must be written before they are read as `T`.
    pub unsafe fn alloc<T: DeviceRepr>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<PooledSlice<T>> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or(Error::TooLong { len })?;
        let block = self.allocator.allocate(bytes as u64, &self.adopt(stream)?)?;
        // SAFETY: the block has room for `len` elements. It is dropped after the slice, whose stream is the one that
        // the block was allocated for, and has then waited for all uses.
        let lent = unsafe { Lent::new(stream, block.ptr().0, len) };
        Ok(PooledSlice::new(lent, block))
    }

    /// `len` elements whose bytes are zero.
    pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<PooledSlice<T>> {
        // SAFETY: written by the next call.
        let mut slice = unsafe { self.alloc(len, stream) }?;
        if !slice.is_empty() {
            stream.memset_zeros(&mut slice)?;
        }
        Ok(slice)
    }

    /// A copy of host memory.
    pub fn clone_htod<T: DeviceRepr, S: HostSlice<T> + ?Sized>(
        &self,
        source: &S,
        stream: &Arc<CudaStream>,
    ) -> Result<PooledSlice<T>> {
        // SAFETY: written by the next call.
        let mut slice = unsafe { self.alloc(source.len(), stream) }?;
        if !slice.is_empty() {
            stream.memcpy_htod(source, &mut slice)?;
        }
        Ok(slice)
    }

    /// Queues cudarc's work on a [`DeviceVec`](warpool::DeviceVec) or a view of one, which the work only reads.
    /// `stream` waits for uses in other streams first, and the use is recorded.
    pub fn with<'a, T: Pod + DeviceRepr, R>(
        &self,
        memory: impl IntoView<'a, T>,
        stream: &Arc<CudaStream>,
        queue: impl FnOnce(&CudaView<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let (own, view) = (self.adopt(stream)?, memory.into_view());
        let len = view.len();
        let mut outcome = None;
        own.with_address(view, |ptr| {
            // SAFETY: the view has `len` elements there, for as long as the work needs them: Warpool records the use.
            let lent = unsafe { Lent::new(stream, ptr.0, len) };
            outcome = Some(queue(&lent.get().as_view()));
            Ok(())
        })?;
        outcome.expect("it was queued")
    }

    /// The same, for work that writes it.
    pub fn with_mut<'a, T: Pod + DeviceRepr, R>(
        &self,
        memory: impl IntoViewMut<'a, T>,
        stream: &Arc<CudaStream>,
        queue: impl FnOnce(&mut CudaViewMut<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let (own, view) = (self.adopt(stream)?, memory.into_view_mut());
        let len = view.len();
        let mut outcome = None;
        own.with_address_mut(view, |ptr| {
            // SAFETY: as in `with`.
            let mut lent = unsafe { Lent::new(stream, ptr.0, len) };
            outcome = Some(queue(&mut lent.get_mut().as_view_mut()));
            Ok(())
        })?;
        outcome.expect("it was queued")
    }

    fn expect_own(&self, stream: &CudaStream) -> Result<()> {
        if **stream.context() == *self.context {
            return Ok(());
        }
        Err(Error::StreamContext { stream: stream.context().ordinal(), pool: self.context.ordinal() })
    }
}

/// Keeps a stream until the process ends: caches and fences are per stream, and identify it by its handle.
fn keep(stream: &Arc<CudaStream>) {
    static KEPT: Mutex<Vec<Arc<CudaStream>>> = Mutex::new(Vec::new());
    // The default stream always exists.
    if !stream.cu_stream().is_null() {
        lock(&KEPT).push(Arc::clone(stream));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The traits that cudarc's copies and cuBLAS wrappers require; it only has to compile.
const _: () = {
    const fn accepted<T, S: cudarc::driver::DevicePtr<T> + cudarc::driver::DevicePtrMut<T> + DeviceSlice<T>>() {}
    accepted::<f32, PooledSlice<f32>>();
};
