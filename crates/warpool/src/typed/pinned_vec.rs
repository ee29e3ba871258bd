//! [`PinnedVec`]: pinned host memory with an element type, and when the host may access it.
//!
//! Pinned memory is ordinary memory of this process that devices read and write. A Rust reference to it is sound only
//! while no device access conflicts with it, so each one is preceded by a check:
//! - Work is enqueued through `&PinnedVec` (the device reads) or `&mut PinnedVec` (it writes), so no conflicting
//!   reference from before can be alive. Work that was enqueued before is checked by its events.
//! - A captured graph uses it later, without a borrow. After the capture, plain references are refused; the guards of
//!   [`PinnedVec::host`] and [`PinnedVec::host_mut`] are counted, and replays refuse to start while they conflict.
#![expect(unsafe_code, reason = "references to pinned memory, whose address is a number of the driver's")]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::sync::atomic::Ordering;

use bytemuck::Pod;

use super::buffer::Buffer;
use super::device_vec::byte_count;
use super::tracked::Tracked;
use super::vector::vector;
use super::view::{IntoView, IntoViewMut, Part, Sealed, View, ViewMut};
use crate::Result;
use crate::error::BufferError;
use crate::memory::HostAllocator;

/// Pinned host memory with an element type and a fixed length, for asynchronous copies, and for kernels that access it
/// in place.
///
/// It dereferences to a slice while no conflicting copy or kernel is under way. Otherwise `*vec` panics and names the
/// stream with the work; [`try_slice`](Self::try_slice) returns that as an error, and [`wait`](Self::wait) waits.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool::{DeviceVec, Instance, PinnedVec, driver::sim::{SimConfig, SimDriver}};
/// # use warpool::memory::{CachingAllocator, HostAllocator, PinnedSettings, Settings};
/// # fn main() -> warpool::Result<()> {
/// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
/// # let stream = instance.device(0)?.pool_stream()?;
/// let host = HostAllocator::new(&instance, PinnedSettings::default());
/// let mut staging = PinnedVec::<u32>::zeroed(&host, 1000)?;
/// staging[0] = 7; // no copy is under way
///
/// let mut values = DeviceVec::uninit(&allocator, 1000, &stream)?;
/// stream.copy(&staging, &mut values)?; // returns at once
/// assert_eq!(staging[0], 7); // the device only reads it: reading is fine
/// assert!(staging.try_slice_mut().is_err()); // writing is not, yet
/// staging.wait_mut()?[0] = 8;
/// # Ok(())
/// # }
/// ```
pub struct PinnedVec<T> {
    buffer: Buffer,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> PinnedVec<T> {
    /// `len` elements that are not written: zero, or what the memory held before. For the target of a copy, which would
    /// overwrite them.
    pub fn uninit(host: &HostAllocator, len: usize) -> Result<Self> {
        const { assert!(align_of::<T>() <= 512, "pinned memory is aligned to 512 bytes") };
        let block = host.allocate(byte_count::<T>(len)?)?;
        let buffer = Buffer::pinned(block, host.instance().clone());
        Ok(Self { buffer, len, elements: PhantomData })
    }

    /// `len` elements whose bytes are zero.
    pub fn zeroed(host: &HostAllocator, len: usize) -> Result<Self> {
        let mut new = Self::uninit(host, len)?;
        new.try_slice_mut()?.fill(T::zeroed());
        Ok(new)
    }

    /// A copy of `values`.
    pub fn from_slice(host: &HostAllocator, values: &[T]) -> Result<Self> {
        let mut new = Self::uninit(host, values.len())?;
        new.try_slice_mut()?.copy_from_slice(values);
        Ok(new)
    }

    /// The elements. [`BufferError::InUse`] while a device writes them, [`BufferError::UsedByGraph`] once a captured
    /// graph uses them.
    #[inline]
    pub fn try_slice(&self) -> Result<&[T]> {
        self.check(false)?;
        Ok(self.elements())
    }

    /// The elements, to be written; also an error while a device reads them.
    #[inline]
    pub fn try_slice_mut(&mut self) -> Result<&mut [T]> {
        self.check(true)?;
        Ok(self.elements_mut())
    }

    /// Waits until no device writes the elements, and returns them.
    pub fn wait(&self) -> Result<&[T]> {
        self.wait_for(false)?;
        self.try_slice()
    }

    /// Waits until no device uses the elements, and returns them to be written.
    pub fn wait_mut(&mut self) -> Result<&mut [T]> {
        self.wait_for(true)?;
        self.try_slice_mut()
    }

    /// Reads the elements, even if graphs use them: until the guard is dropped, replays that write them are refused
    /// ([`BufferError::BorrowedByHost`]). Waits for work under way.
    pub fn host(&self) -> Result<HostRef<'_, T>> {
        self.borrow(false)?;
        Ok(HostRef { vec: self })
    }

    /// Reads and writes the elements, even if graphs use them: until the guard is dropped, replays are refused
    /// ([`BufferError::BorrowedByHost`]). Waits for work under way.
    pub fn host_mut(&mut self) -> Result<HostMut<'_, T>> {
        self.borrow(true)?;
        Ok(HostMut { vec: self })
    }

    #[inline]
    fn tracked(&self) -> &Tracked {
        self.buffer.tracked()
    }

    /// Fails unless a plain reference is sound now, and as long as it is alive.
    #[inline]
    fn check(&self, write: bool) -> Result<()> {
        if self.tracked().graphs.load(Ordering::Acquire) > 0 {
            return Err(BufferError::UsedByGraph { buffer: self.tracked().name() }.into());
        }
        if self.tracked().busy.load(Ordering::Acquire) { self.check_uses(write) } else { Ok(()) }
    }

    #[cold]
    fn check_uses(&self, write: bool) -> Result<()> {
        let mut uses = self.tracked().try_lock_uses()?;
        if let Some(stream) = uses.busy_for_host(self.tracked().instance(), write)? {
            return Err(BufferError::InUse { buffer: self.tracked().name(), stream }.into());
        }
        if uses.is_empty() {
            self.tracked().busy.store(false, Ordering::Release);
        }
        Ok(())
    }

    fn wait_for(&self, write: bool) -> Result<()> {
        self.tracked().lock_uses()?.wait_for_host(self.tracked().instance(), write, &|| self.tracked().name())
    }

    /// Waits for work under way, and counts a borrow. Replays read the count under the same lock.
    fn borrow(&self, write: bool) -> Result<()> {
        let mut uses = self.tracked().lock_uses()?;
        uses.wait_for_host(self.tracked().instance(), write, &|| self.tracked().name())?;
        let borrows = &self.tracked().host_borrows;
        let current = borrows.load(Ordering::Acquire);
        // An earlier guard was leaked, or another thread has one.
        if current < 0 || (write && current > 0) || current == i32::MAX {
            return Err(BufferError::BorrowedByHost { buffer: self.tracked().name() }.into());
        }
        if write {
            borrows.store(-1, Ordering::Release);
        } else {
            borrows.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }

    /// The elements. Call it only after a check, or with a counted borrow.
    #[inline]
    fn elements(&self) -> &[T] {
        // SAFETY: the block is pinned memory of this process with room for `len` elements, allocated as long as `self`
        // is borrowed; every bit pattern is a `T`. The callers made sure that no device writes it: enqueued work has
        // completed, enqueuing more needs `&mut self`, and replays check the count of borrows or were never captured.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }

    /// The elements, to be written. Call it only after a check, or with a counted borrow.
    #[inline]
    fn elements_mut(&mut self) -> &mut [T] {
        self.tracked().host_wrote.store(true, Ordering::Relaxed);
        // SAFETY: as in `elements`, and no device reads it either; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }

    #[inline]
    fn start(&self) -> *mut T {
        match self.tracked().host_ptr().0 {
            0 => std::ptr::dangling_mut(),
            // Drivers expose the provenance of memory that they pin.
            address => std::ptr::with_exposed_provenance_mut(address as usize),
        }
    }
}

impl<T: Pod> Deref for PinnedVec<T> {
    type Target = [T];

    /// # Panics
    /// While a device writes it, or once a graph uses it; the message says which. See
    /// [`try_slice`](PinnedVec::try_slice).
    #[inline]
    #[track_caller]
    fn deref(&self) -> &[T] {
        match self.try_slice() {
            Ok(elements) => elements,
            Err(error) => panic!("{error}"),
        }
    }
}

impl<T: Pod> DerefMut for PinnedVec<T> {
    /// # Panics
    /// While a device uses it, or once a graph does; the message says which. See
    /// [`try_slice_mut`](PinnedVec::try_slice_mut).
    #[inline]
    #[track_caller]
    fn deref_mut(&mut self) -> &mut [T] {
        match self.try_slice_mut() {
            Ok(elements) => elements,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Access of the host to pinned memory that graphs may use. See [`PinnedVec::host`].
#[derive(Debug)]
pub struct HostRef<'a, T: Pod> {
    vec: &'a PinnedVec<T>,
}

/// Exclusive access of the host to pinned memory that graphs may use. See [`PinnedVec::host_mut`].
#[derive(Debug)]
pub struct HostMut<'a, T: Pod> {
    vec: &'a mut PinnedVec<T>,
}

impl<T: Pod> Deref for HostRef<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.vec.elements()
    }
}

impl<T: Pod> Deref for HostMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.vec.elements()
    }
}

impl<T: Pod> DerefMut for HostMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.vec.elements_mut()
    }
}

impl<T: Pod> Drop for HostRef<'_, T> {
    fn drop(&mut self) {
        self.vec.tracked().host_borrows.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<T: Pod> Drop for HostMut<'_, T> {
    fn drop(&mut self) {
        self.vec.tracked().host_borrows.store(0, Ordering::Release);
    }
}

vector!(PinnedVec);
