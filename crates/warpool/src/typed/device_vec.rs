//! [`DeviceVec`]: device memory with an element type.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;

use bytemuck::Pod;

use super::buffer::Buffer;
use super::vector::vector;
use super::view::{IntoView, IntoViewMut, Part, Sealed, View, ViewMut};
use crate::memory::{Allocate, SharedAllocator};
use crate::{Device, Error, Result, Stream};

/// Device memory with an element type and a fixed length, like `Box<[T]>` on the host. Elements are plain data
/// ([`Pod`]: any bytes are a value, so memory that was never written can be read, and has no destructor).
///
/// Every use is recorded for the allocator, and ordered with uses in other streams; see the [module](super). Dropping
/// it frees it, without a driver call and without waiting for work that uses it. A graph that captured work on it keeps
/// the memory.
///
/// Elements that are not plain data do not compile:
/// ```compile_fail,E0599
/// # use std::sync::Arc;
/// # use warpool::{DeviceVec, Stream, memory::DeviceAllocator};
/// # fn strings(allocator: &Arc<dyn DeviceAllocator>, stream: &Stream) {
/// let _ = DeviceVec::<String>::uninit(allocator, 10, stream);
/// # }
/// ```
/// Nor do copies between different types:
/// ```compile_fail,E0277
/// # use warpool::{DeviceVec, Stream};
/// # fn mixed(stream: &Stream, x: &DeviceVec<u32>, y: &mut DeviceVec<f32>) -> warpool::Result<()> {
/// stream.copy(x, y)
/// # }
/// ```
/// Two writers of the same part:
/// ```compile_fail,E0499
/// # use warpool::{DeviceVec, Stream};
/// # fn twice(stream: &Stream, mut x: DeviceVec<f32>) -> warpool::Result<()> {
/// let (mut first, mut second) = (x.slice_mut(..10)?, x.slice_mut(5..)?);
/// stream.fill(&mut first, 1.0)?;
/// stream.fill(&mut second, 2.0)
/// # }
/// ```
/// And views of memory that is gone:
/// ```compile_fail,E0505
/// # use warpool::{DeviceVec, Stream};
/// # fn gone(stream: &Stream, x: DeviceVec<f32>) -> warpool::Result<Vec<f32>> {
/// let view = x.view();
/// drop(x);
/// stream.to_vec(view)
/// # }
/// ```
pub struct DeviceVec<T> {
    buffer: Buffer,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> DeviceVec<T> {
    /// `len` elements for work that begins in `stream`. Their contents are undefined until they are written.
    #[inline]
    pub fn uninit(allocator: &impl SharedAllocator, len: usize, stream: &Stream) -> Result<Self> {
        let bytes = byte_count::<T>(len)?;
        let block = allocator.allocate(bytes, stream)?;
        Ok(Self { buffer: Buffer::device(block), len, elements: PhantomData })
    }

    /// `len` elements whose bytes are zero.
    #[track_caller]
    pub fn zeroed(allocator: &impl SharedAllocator, len: usize, stream: &Stream) -> Result<Self> {
        let mut new = Self::uninit(allocator, len, stream)?;
        stream.fill(&mut new, T::zeroed())?;
        Ok(new)
    }

    /// A copy of `values`, which is complete when this returns.
    #[track_caller]
    pub fn from_slice(allocator: &impl SharedAllocator, values: &[T], stream: &Stream) -> Result<Self> {
        let mut new = Self::uninit(allocator, values.len(), stream)?;
        stream.copy(values, &mut new)?;
        Ok(new)
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        let id = self.buffer.device_id().expect("it is device memory");
        Device::from_id(self.buffer.instance(), id)
    }

    /// Its contents after the work that writes them: `stream` waits for that work, and the host waits for `stream`.
    #[track_caller]
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>> {
        stream.to_vec(self)
    }
}

/// The bytes of `len` elements.
pub(super) fn byte_count<T: Pod>(len: usize) -> Result<u64> {
    const { assert!(size_of::<T>() > 0, "elements of typed memory have a size") };
    match len.checked_mul(size_of::<T>()) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(bytes as u64),
        _ => Err(Error::RequestTooLarge { bytes: u64::MAX }),
    }
}

vector!(DeviceVec);
